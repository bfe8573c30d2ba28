"""The config.json of a target and of a drafter, as far as they decide which code runs and which tensors there must be.

Both are read with the names that the published checkpoints use; what vLLM takes as default where a field is missing is
taken here, too (vllm/model_executor/models of the pinned release).
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

CONFIG = "config.json"

_DEEPSEEK = {"DeepseekV3ForCausalLM", "DeepseekV2ForCausalLM", "KimiK2ForCausalLM"}
_WRAPPED = {"KimiK25ForConditionalGeneration"}
_MLA_DRAFTERS = {"Eagle3DeepseekV2ForCausalLM", "Eagle3DeepseekV3ForCausalLM"}
_LLAMA_DRAFTERS = {"LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM"}


class ConfigError(Exception):
    """A config.json that cannot be used; the message says what was found, what was expected and what to do."""


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention; sizes in elements a head, ranks in elements."""

    heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    nope: int
    rope: int
    value: int


@dataclass(frozen=True)
class Experts:
    """The routed and shared experts of the layers that are not dense."""

    routed: int
    active: int
    shared: int
    width: int
    first_layer: int
    """Layers before it are dense."""


@dataclass(frozen=True)
class Vision:
    """MoonViT and its projector; widths in channels."""

    width: int
    layers: int
    heads: int
    mlp_width: int
    patch: int
    positions: tuple[int, int]
    merge: tuple[int, int]


@dataclass(frozen=True)
class Quantization:
    """What of the target is quantised, and how."""

    method: str
    form: str
    bits: int
    group: int
    symmetric: bool
    ignore: tuple[str, ...]
    kv_cache: str | None
    """Of `kv_cache_scheme`, where there is one: the engine's `kv-cache-dtype: auto` follows it."""

    @property
    def is_packed_integers(self) -> bool:
        """Whether it is compressed-tensors' pack-quantized form, in which Kimi-K2.5 is published."""
        return (self.method, self.form) == ("compressed-tensors", "pack-quantized")

    def quantises(self, module: str) -> bool:
        """Return whether the weights of a linear layer are quantised; `ignore` has names and, after `re:`, patterns."""
        return not any(
            re.match(entry[3:], module) if entry.startswith("re:") else entry in (module, module.rpartition(".")[2])
            for entry in self.ignore
        )


@dataclass(frozen=True)
class Target:
    """A target model: DeepSeek-V3's architecture, as Kimi-K2 and, behind a vision tower, Kimi-K2.5 and K2.6 have it."""

    directory: Path
    whole: Mapping[str, Any]
    """The file."""

    @cached_property
    def text(self) -> Mapping[str, Any]:
        """The language model's part."""
        return self.whole.get("text_config") or self.whole

    @cached_property
    def architecture(self) -> str:
        """The class that vLLM takes for it."""
        return _architecture(self.directory, self.whole)

    @property
    def is_multimodal(self) -> bool:
        """Whether there is a vision tower before the language model."""
        return self.architecture in _WRAPPED

    @property
    def prefix(self) -> str:
        """What the names of the language model's tensors begin with."""
        return "language_model." if self.is_multimodal else ""

    @property
    def hidden_size(self) -> int:
        """Elements of a hidden state."""
        return self._number("hidden_size")

    @property
    def layers(self) -> int:
        """Layers of the language model."""
        return self._number("num_hidden_layers")

    @property
    def vocabulary(self) -> int:
        """Rows of the embedding."""
        return self._number("vocab_size")

    @property
    def positions(self) -> int:
        """Longest sequence; it has the yarn factor in it already."""
        return self._number("max_position_embeddings")

    @property
    def dense_width(self) -> int:
        """Elements between the linear layers of a dense MLP."""
        return self._number("intermediate_size")

    @cached_property
    def attention(self) -> Latent:
        """Its attention."""
        return _latent(self.directory, self.text)

    @cached_property
    def experts(self) -> Experts:
        """Its experts."""
        return Experts(
            routed=self._number("n_routed_experts"),
            active=self._number("num_experts_per_tok"),
            shared=self.text.get("n_shared_experts") or 0,
            width=self._number("moe_intermediate_size"),
            first_layer=self.text.get("first_k_dense_replace", 0),
        )

    @cached_property
    def vision(self) -> Vision | None:
        """Its vision tower, None for a language model alone."""
        if not self.is_multimodal:
            return None
        given = self.whole.get("vision_config") or {}

        # The published file says vt_hidden_size and so on, transformers' own class hidden_size. What is left out has
        # the value of that class (Kimi_K25VisionConfig).
        def number(name: str, published: str, default: int) -> int:
            return _whole(self.directory, f"vision_config.{name}", given.get(published, given.get(name, default)))

        height, width = (number(f"pos_emb_{side}", f"init_pos_emb_{side}", 64) for side in ("height", "width"))
        down, right = given.get("merge_kernel_size", (2, 2))
        return Vision(
            width=number("hidden_size", "vt_hidden_size", 1152),
            layers=number("num_hidden_layers", "vt_num_hidden_layers", 27),
            heads=number("num_attention_heads", "vt_num_attention_heads", 16),
            mlp_width=number("intermediate_size", "vt_intermediate_size", 4304),
            patch=number("patch_size", "patch_size", 14),
            positions=(height, width),
            merge=(down, right),
        )

    @cached_property
    def quantization(self) -> Quantization | None:
        """How it is quantised; the published Kimi-K2.5 says so below text_config alone."""
        given = self.whole.get("quantization_config") or self.text.get("quantization_config")
        return _quantization(self.directory, given) if given else None

    @property
    def is_kimi_k2_generation(self) -> bool:
        """Whether it is a Kimi-K2 without vision; a drafter for K2.5 does not fit it, whatever its shapes are."""
        return not self.is_multimodal

    def _number(self, name: str) -> int:
        return _whole(self.directory, name, self.text.get(name))


@dataclass(frozen=True)
class Drafter:
    """An EAGLE-3 drafter, with MLA or with Llama's attention."""

    directory: Path
    whole: Mapping[str, Any]

    @cached_property
    def architecture(self) -> str:
        """The class that vLLM takes for it."""
        return _architecture(self.directory, self.whole)

    @property
    def is_mla(self) -> bool:
        """Whether its attention is latent, as the target's."""
        return self.architecture in _MLA_DRAFTERS

    @property
    def hidden_size(self) -> int:
        """Elements of its hidden state."""
        return self._number("hidden_size")

    @property
    def target_hidden_size(self) -> int:
        """Elements of each auxiliary state that its fc reads."""
        return _whole(self.directory, "target_hidden_size", self.whole.get("target_hidden_size", self.hidden_size))

    @property
    def layers(self) -> int:
        """Decoder layers."""
        return _whole(self.directory, "num_hidden_layers", self.whole.get("num_hidden_layers", 1))

    @property
    def vocabulary(self) -> int:
        """Ids that it reads: the target's."""
        return self._number("vocab_size")

    @property
    def draft_vocabulary(self) -> int:
        """Ids that it can draft."""
        return _whole(self.directory, "draft_vocab_size", self.whole.get("draft_vocab_size") or self.vocabulary)

    @property
    def width(self) -> int:
        """Elements between the linear layers of its MLP."""
        return self._number("intermediate_size")

    @property
    def positions(self) -> int | None:
        """Longest sequence that it was trained for, None where its file does not say."""
        given = self.whole.get("max_position_embeddings")
        return None if given is None else _whole(self.directory, "max_position_embeddings", given)

    @cached_property
    def attention(self) -> Latent:
        """Its attention where that is latent."""
        return _latent(self.directory, self.whole)

    @property
    def heads(self) -> int:
        """Attention heads."""
        return self._number("num_attention_heads")

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values, of Llama's attention."""
        return _whole(self.directory, "num_key_value_heads", self.whole.get("num_key_value_heads", self.heads))

    @property
    def head_size(self) -> int:
        """Elements of a head, of Llama's attention."""
        return _whole(self.directory, "head_dim", self.whole.get("head_dim") or self.hidden_size // self.heads)

    @cached_property
    def aux_layers(self) -> tuple[Any, ...] | None:
        """The ids of the auxiliary layers as they are written, in whichever spelling; None where there are none."""
        nested = self.whole.get("eagle_config") or {}
        given = (
            self.whole.get("eagle_aux_hidden_state_layer_ids")
            or nested.get("eagle_aux_hidden_state_layer_ids")
            or nested.get("layer_ids")
        )
        if not given:
            return None
        if not isinstance(given, list):
            raise _unusable(self.directory, "eagle_aux_hidden_state_layer_ids", given, "a list of layer ids")
        return tuple(given)

    @property
    def aux_states(self) -> int:
        """How many auxiliary states its fc reads."""
        given = self.whole.get("num_aux_hidden_states")
        if given is not None:
            return _whole(self.directory, "num_aux_hidden_states", given)
        return len(self.aux_layers) if self.aux_layers else 3

    def _number(self, name: str) -> int:
        return _whole(self.directory, name, self.whole.get(name))


def read_target(directory: Path) -> Target:
    """Read a target's config.json; raises ConfigError where it is none, or of an architecture that is not served."""
    target = Target(directory, _read(directory))
    known = _DEEPSEEK | _WRAPPED
    if target.architecture not in known:
        raise _unusable(directory, "architectures", target.architecture, f"one of {', '.join(sorted(known))}")
    return target


def read_drafter(directory: Path) -> Drafter:
    """Read a drafter's config.json; raises ConfigError where it is none, or of an architecture that is not served."""
    drafter = Drafter(directory, _read(directory))
    known = _MLA_DRAFTERS | _LLAMA_DRAFTERS
    if drafter.architecture not in known:
        raise _unusable(directory, "architectures", drafter.architecture, f"one of {', '.join(sorted(known))}")
    return drafter


def _read(directory: Path) -> Mapping[str, Any]:
    path = directory / CONFIG
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist: give the directory of a checkpoint") from None
    except NotADirectoryError:
        raise ConfigError(f"{directory} is not a directory: give that of a checkpoint") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:  # a UnicodeDecodeError is one
        raise ConfigError(f"{path} is not JSON ({error}): fetch it again") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds {type(content).__name__}, not an object: fetch it again")
    return content


def _architecture(directory: Path, whole: Mapping[str, Any]) -> str:
    match whole.get("architectures"):
        case [str(name)]:
            return name
        case given:
            raise _unusable(directory, "architectures", given, "a list of one name")


def _latent(directory: Path, text: Mapping[str, Any]) -> Latent:
    def number(name: str) -> int:
        return _whole(directory, name, text.get(name))

    return Latent(
        heads=number("num_attention_heads"),
        q_lora_rank=None if text.get("q_lora_rank") is None else number("q_lora_rank"),
        kv_lora_rank=number("kv_lora_rank"),
        nope=number("qk_nope_head_dim"),
        rope=number("qk_rope_head_dim"),
        value=number("v_head_dim"),
    )


def _quantization(directory: Path, given: Any) -> Quantization:
    if not isinstance(given, dict):
        raise _unusable(directory, "quantization_config", given, "an object")
    groups = given.get("config_groups") or {}
    weights = next((group.get("weights") or {} for group in groups.values()), {})
    scheme = given.get("kv_cache_scheme") or {}
    return Quantization(
        method=str(given.get("quant_method")),
        form=str(given.get("format")),
        bits=weights.get("num_bits") or 0,
        group=weights.get("group_size") or 0,
        symmetric=bool(weights.get("symmetric", True)),
        ignore=tuple(given.get("ignore") or ()),
        kv_cache=f"{scheme.get('type')}{scheme.get('num_bits')}" if scheme else None,
    )


def _whole(directory: Path, name: str, given: Any) -> int:
    if type(given) is not int or given < 0:
        raise _unusable(directory, name, given, "a whole number")
    return given


def _unusable(directory: Path, name: str, given: Any, expected: str) -> ConfigError:
    found = "is missing" if given is None else f"is {given!r}"
    return ConfigError(f"{directory / CONFIG}: {name} {found}, expected {expected}")
