"""A smaller config.json of the same architecture, and what it does not prove of the real one. Pure.

With GPUs only depth and the number of experts shrink, so every rank computes with the real shapes. Without one, widths
shrink, too: then kernels, limits and sizes of the real model are not what was run, and each is listed.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from aerie.checkpoint.config import CONFIG, ConfigError, Drafter, Target, default_aux_layers

LEAST_LAYERS = 7
"""For which vLLM's default auxiliary layers differ from one another."""
_LAYERS_A_STAGE = 4
_EXPERTS = 16

# On a CPU. Two heads and more a rank: one alone takes another kernel. Head sizes and latent ranks stay, since backends
# are chosen by them, and so does the vocabulary, which the tokenizer has.
_HIDDEN = 512
_HEADS = 4
_EXPERT_WIDTH = 128
_DENSE_WIDTH = 512
_VISION_HEADS = 2
_VISION_LAYERS = 2
_VISION_MLP_WIDTH = 288


class Profile(StrEnum):
    """What the shrunken pair is to run on."""

    GPU = "gpu"
    CPU = "cpu"


@dataclass(frozen=True)
class Change:
    """One field that is not as it really is."""

    field: str
    real: Any
    here: Any


@dataclass(frozen=True)
class Shrunken:
    """A config.json to write, and what was changed in it."""

    config: dict[str, Any]
    changes: tuple[Change, ...]


class _Edit:
    def __init__(self, config: dict[str, Any], part: dict[str, Any], prefix: str = "") -> None:
        self.config, self.part, self.prefix = config, part, prefix
        self.changes: list[Change] = []

    def set(self, name: str, here: Any, real: Any = None) -> None:
        """Set a field of `part`; it is no change where it has that value already."""
        real = self.part.get(name, real)
        if real != here:
            self.part[name] = here
            self.changes.append(Change(self.prefix + name, real, here))

    def remove(self, name: str, here: str) -> None:
        """Take a field out wherever it stands."""
        for part in (self.config, self.part):
            if part.pop(name, None) is not None:
                self.changes.append(Change(self.prefix + name, "as published", here))


def shrink_target(target: Target, profile: Profile, stages: int = 1) -> Shrunken:
    """Return a target of few layers, for so many pipeline stages."""
    config = copy.deepcopy(dict(target.whole))
    edit = _Edit(config, config.get("text_config") or config)
    edit.set("num_hidden_layers", min(target.layers, max(LEAST_LAYERS, _LAYERS_A_STAGE * stages)))
    edit.set("n_routed_experts", min(target.experts.routed, max(_EXPERTS, 2 * target.experts.active)))
    if profile is Profile.CPU:
        heads = min(target.attention.heads, _HEADS)
        edit.set("hidden_size", min(target.hidden_size, _HIDDEN))
        edit.set("num_attention_heads", heads)
        edit.set("num_key_value_heads", heads)
        edit.set("intermediate_size", min(target.dense_width, _DENSE_WIDTH))
        edit.set("moe_intermediate_size", min(target.experts.width, _EXPERT_WIDTH))
        # No kernel for INT4 experts runs on a CPU but Intel's with AMX.
        edit.remove("quantization_config", "not quantised")
        if target.vision:
            edit.changes += _shrink_vision(config, target)
    return Shrunken(config, tuple(edit.changes))


def _shrink_vision(config: dict[str, Any], target: Target) -> list[Change]:
    vision = target.vision
    assert vision is not None  # noqa: S101 - of this module's caller
    config["vision_config"] = part = config.get("vision_config") or {}
    edit = _Edit(config, part, "vision_config.")
    heads = min(vision.heads, _VISION_HEADS)
    width = vision.width // vision.heads * heads
    # The published names, and those of transformers' own class, which does not know the published ones.
    for published, own, real, here in (
        ("vt_hidden_size", "hidden_size", vision.width, width),
        ("vt_num_attention_heads", "num_attention_heads", vision.heads, heads),
        ("vt_num_hidden_layers", "num_hidden_layers", vision.layers, min(vision.layers, _VISION_LAYERS)),
        ("vt_intermediate_size", "intermediate_size", vision.mlp_width, min(vision.mlp_width, _VISION_MLP_WIDTH)),
    ):
        edit.set(published, here, real)
        edit.part[own] = here
    edit.part |= {"mm_hidden_size": width, "text_hidden_size": min(target.hidden_size, _HIDDEN)}
    config["projection_hidden_size"] = width
    return edit.changes


def shrink_drafter(drafter: Drafter, target: Target, shrunken: Target, profile: Profile) -> Shrunken:
    """Return a drafter for the shrunken target, which reads the layers that stand where the real ones do.

    Raises ConfigError where it reads more layers than the shrunken target has.
    """
    config = copy.deepcopy(dict(drafter.whole))
    edit = _Edit(config, config, "drafter.")
    if drafter.aux_layers is not None:
        ids = _moved(drafter, target, shrunken)
        nested = config.get("eagle_config") or {}
        for part in (config, nested):
            for name in ("eagle_aux_hidden_state_layer_ids", "layer_ids"):
                if part.get(name):
                    part[name] = ids
        if ids != list(drafter.aux_layers):
            edit.changes.append(Change("drafter.eagle_aux_hidden_state_layer_ids", list(drafter.aux_layers), ids))
    if "target_hidden_size" in config:
        edit.set("target_hidden_size", shrunken.hidden_size)
    if profile is Profile.CPU:
        heads = min(drafter.heads, _HEADS)
        edit.set("hidden_size", min(drafter.hidden_size, _HIDDEN))
        edit.set("num_attention_heads", heads)
        if "num_key_value_heads" in config:
            edit.set("num_key_value_heads", max(2, heads * drafter.kv_heads // drafter.heads))
        if not drafter.is_mla:
            edit.set("head_dim", drafter.head_size, drafter.head_size)
            config["head_dim"] = drafter.head_size
        edit.set("intermediate_size", min(drafter.width, _DENSE_WIDTH))
    return Shrunken(config, tuple(edit.changes))


def _moved(drafter: Drafter, target: Target, shrunken: Target) -> list[int]:
    try:
        return move_layers(drafter.aux_layers or (), target.layers, shrunken.layers)
    except ValueError as error:
        raise ConfigError(f"{drafter.directory / CONFIG}: {error}: only static checks can be made of it") from None


def move_layers(ids: Sequence[int], layers: int, fewer: int) -> list[int]:
    """Return where layers of a model stand in one with fewer: ends stay ends, others do not become ends, none meet.

    vLLM's default stays the default: 2, 30, 58 of 61 are 2, 3, 4 of 7. Raises ValueError for more ids than there is
    room for.
    """
    if tuple(ids) == default_aux_layers(layers):
        return list(default_aux_layers(fewer))
    moved = [each and (fewer if each == layers else max(1, round(each * fewer / layers))) for each in ids]
    for number in range(1, len(moved)):
        moved[number] = max(moved[number], moved[number - 1] + 1)
    for number in range(len(moved) - 1, -1, -1):
        limit = moved[number + 1] - 1 if number < len(moved) - 1 else fewer - (ids[number] < layers)
        moved[number] = min(moved[number], limit)
    if moved and moved[0] < min(ids[0], 1):
        raise ValueError(f"{len(ids)} auxiliary layers do not fit into {fewer} layers")
    return moved
