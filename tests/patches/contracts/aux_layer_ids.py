"""The drafter gets the states of the layers that its config.json names, in every spelling in use, on both runners.

Each config.json is read by the engine's own configuration, and each runner's own code then sets the layers on the
loaded target. No drafter's weights are read. vLLM's id i is the input of layer i: 0 the embedding, and the number of
layers what the last one hands on. Runs where vLLM is installed, on any release.
"""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from in_process import TINY, engine_config, known_drafters, serving, target_model
from verdict import contract, main
from vllm.model_executor.model_loader import get_model
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

try:
    from vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils import set_eagle3_aux_hidden_state_layers
except ImportError:  # a release whose V2 runner does not take aux states
    set_eagle3_aux_hidden_state_layers = None

if TYPE_CHECKING:
    from torch import nn
    from vllm.config import VllmConfig

NAME = "eagle_aux_hidden_state_layer_ids"


def top_level(config: dict[str, Any], ids: object) -> dict[str, Any]:
    """As vLLM documents it."""
    return config | {NAME: ids}


def nested(config: dict[str, Any], ids: object) -> dict[str, Any]:
    """As SpecForge writes it."""
    return config | {"eagle_config": {NAME: ids, "use_aux_hidden_state": True}}


def model_optimizer(config: dict[str, Any], ids: object) -> dict[str, Any]:
    """As NVIDIA's Model Optimizer exports it (export/plugins/hf_spec_configs.py): nested, amid what else it says."""
    return config | {
        "eagle_config": {
            NAME: ids,
            "use_aux_hidden_state": True,
            "use_input_layernorm_in_first_layer": True,
            "use_last_layernorm": True,
            "use_mtp_layernorm": False,
            "next_layer_regular": True,
            "parallel_draft_step": 1,
            "parallel_draft_heads_num_layers": 1,
        },
    }


def short(config: dict[str, Any], ids: object) -> dict[str, Any]:
    """The short name, which vLLM's V2 runner reads."""
    return config | {"eagle_config": {"layer_ids": ids}}


def speculators(config: dict[str, Any], ids: object) -> dict[str, Any]:
    """As the speculators library saves a drafter (Eagle3SpeculatorConfig); it knows Llama's layer, not MLA's."""
    layer = {name: value for name, value in config.items() if name not in ("architectures", "draft_vocab_size", NAME)}
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.5.0",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"architectures": ["KimiK25ForConditionalGeneration"], "name_or_path": str(TINY / "target")},
        },
        "transformer_layer_config": layer,
        "draft_vocab_size": config["draft_vocab_size"],
        "norm_before_residual": False,
        NAME: ids,
    }


Spelling = "Callable[[dict[str, Any], object], dict[str, Any]]"
SPELLINGS = {
    "drafter-llama": (top_level, nested, model_optimizer, short, speculators),
    "drafter-mla": (top_level, nested, model_optimizer, short),
}


def configured(drafter: str, spelling: Spelling, ids: object, **options: object) -> VllmConfig:
    """The engine's configuration with a drafter whose config.json spells these ids so."""
    with tempfile.TemporaryDirectory() as folder:
        config = json.loads((TINY / drafter / "config.json").read_text())
        config.pop(NAME, None)
        (Path(folder) / "config.json").write_text(json.dumps(spelling(config, ids)))
        return engine_config(Path(folder), **options)


@functools.cache
def target() -> nn.Module:
    """The loaded target."""
    config = engine_config()
    with serving(config):
        return target_model(config)


def set_by_v1(config: VllmConfig) -> None:
    """Set the target's layers as the V1 runner does while it loads the models."""
    runner = SimpleNamespace(
        speculative_config=config.speculative_config,
        use_aux_hidden_state_outputs=True,
        model=target(),
        get_model=target,
    )
    runner._get_eagle3_aux_layers_from_config = lambda: GPUModelRunner._get_eagle3_aux_layers_from_config(runner)
    if hasattr(GPUModelRunner, "_setup_eagle3_aux_hidden_state_outputs"):
        GPUModelRunner._setup_eagle3_aux_hidden_state_outputs(runner)
    else:  # 0.16.0 does it amid load_model, which these two lines stand for
        ids = runner._get_eagle3_aux_layers_from_config() or target().get_eagle3_aux_hidden_state_layers()
        target().set_aux_hidden_state_layers(ids)


def set_by_v2(config: VllmConfig) -> None:
    """Set the target's layers as the V2 runner does while it loads the models."""
    set_eagle3_aux_hidden_state_layers(target(), config.speculative_config)


RUNNERS = {"V1": set_by_v1} | ({"V2": set_by_v2} if set_eagle3_aux_hidden_state_layers else {})


def layers_on(runner: str, config: VllmConfig) -> tuple[int, ...]:
    """The layers that the target's decoder has after the runner set them."""
    decoder = target().get_language_model().model
    decoder.aux_hidden_state_layers = ()  # what was set before must not pass for what is set now
    RUNNERS[runner](config)
    return tuple(decoder.aux_hidden_state_layers)


@contract("aux-layer-ids")
def aux_layer_ids() -> str:
    """The target's decoder hands out the states that the drafter's config.json names, in each spelling, on each runner.

    Where it names none, the layers are 2, n/2 and n-3 of n.
    """
    default, asked = (2, 3, 4), [(1, 3, 5), (0, 4, 7)]
    cases = [(ids, list(ids)) for ids in asked] + [(default, None), (default, [])]
    count = 0
    for drafter in known_drafters():
        for spelling in SPELLINGS[drafter]:
            for expected, written in cases:
                config = configured(drafter, spelling, written)
                for runner in RUNNERS:
                    got = layers_on(runner, config)
                    assert got == expected, (
                        f"{drafter}, {spelling.__name__}: {written} gives the layers {got} on {runner}, not {expected}"
                    )
                    count += 1
    return f"{count} right: {', '.join(s.__name__ for s in SPELLINGS['drafter-llama'])}; on {' and '.join(RUNNERS)}"


@contract("aux-layer-ids-refused")
def aux_layer_ids_refused() -> str:
    """Ids that the target cannot hand out as the drafter's fc takes them end the start in its configuration.

    The states come in the order of the layers, once each. The message names the ids, what is expected, and the drafter.
    """
    refused = [
        [4, 3, 2],
        [2, 2, 4],
        [2, 4, 3],
        [2, 3, 8],
        [-1, 2, 3],
        [2, 3.5, 4],
        [2, "3", 4],
        [True, 2, 3],
        "2, 3, 4",
    ]
    drafter = known_drafters()[-1]
    for ids in refused:
        for spelling in SPELLINGS[drafter]:
            try:
                config = configured(drafter, spelling, ids)
            except ValueError as error:
                said = str(error)
            else:
                given = {runner: layers_on(runner, config) for runner in RUNNERS}
                raise AssertionError(f"{spelling.__name__}: {ids!r} was accepted, and gives the layers {given}")
            for part in (repr(ids), "distinct integers in ascending order", "from 0", "to 7", "config.json"):
                assert part in said, f"the refusal of {ids!r} does not say {part!r}: {said}"
    return f"{len(refused)} lists in {len(SPELLINGS[drafter])} spellings"


@contract("aux-layer-count")
def aux_layer_count() -> str:
    """The drafter is built for as many states as its config.json names layers; a count that differs is refused."""
    ids, seen = [1, 2, 4, 7], []
    for drafter in known_drafters():
        for spelling in (top_level, nested):
            config = configured(drafter, spelling, ids, load_format="dummy")
            with serving(config):
                model = get_model(vllm_config=config, model_config=config.speculative_config.draft_model_config).model
            states = model.fc.input_size / config.model_config.get_hidden_size()
            assert states == len(ids), (
                f"{drafter}, {spelling.__name__}: {len(ids)} layers, but its fc is built for {states:g} states"
            )
            seen.append(type(model).__name__)
        try:
            configured(drafter, lambda config, ids: nested(config, ids) | {"num_aux_hidden_states": 3}, ids)
        except ValueError as error:
            assert "num_aux_hidden_states is 3" in str(error), error  # noqa: PT017 - no pytest in the image
        else:
            raise AssertionError(f"{drafter}: {len(ids)} layers with num_aux_hidden_states 3 were accepted")
    return f"{len(ids)} states for {len(ids)} layers: {', '.join(dict.fromkeys(seen))}"


if __name__ == "__main__":
    main()
