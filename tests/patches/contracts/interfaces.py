"""The interfaces that EAGLE-3 needs of a Kimi-K2.5 target, each asked of the engine's real classes in this process.

Stand-ins, where there are any, are small modules in the place of decoder layers, so that every state can be told by
its value. Runs where vLLM is installed, on any release; no kernel is called.
"""

from __future__ import annotations

import functools
import json
import shutil
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

import torch
from in_process import DEVICE, TINY, engine_config, known_drafters, serving, target_model
from torch import nn
from verdict import contract, main
from vllm.model_executor.models import deepseek_v2
from vllm.model_executor.models.interfaces import supports_eagle3
from vllm.model_executor.models.kimi_k25 import KimiK25ForConditionalGeneration
from vllm.multimodal.registry import MultiModalRegistry

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from vllm.config import VllmConfig

LAYERS, HIDDEN, TOKENS = 7, 8, 5  # of the decoder of stand-ins
EMBEDDED = torch.arange(TOKENS * HIDDEN, dtype=torch.float32).view(TOKENS, HIDDEN)


@functools.cache
def alone() -> tuple[VllmConfig, nn.Module]:
    """The target without speculation: its configuration, and the model as loaded."""
    config = engine_config()
    with serving(config):
        return config, target_model(config)


@contract("whitelist")
def whitelist() -> str:
    """The engine's configuration takes eagle3 for a Kimi-K2.5 target, with each type of drafter that it knows."""
    seen = []
    for drafter in known_drafters():
        speculation = engine_config(drafter).speculative_config
        assert speculation.method == "eagle3", f"{drafter}: method is {speculation.method}"
        seen.append(speculation.draft_model_config.architectures[0])
    return f"accepted: {', '.join(seen)}"


@contract("image-token")
def image_token() -> str:
    """Loading the drafter finds the target's image placeholder where Kimi-K2.5 keeps it.

    That is media_placeholder_token_id; the published config.json has neither image_token_index nor image_token_id.
    """
    with tempfile.TemporaryDirectory() as folder:
        target = Path(shutil.copytree(TINY / "target", Path(folder) / "target"))
        published = json.loads((target / "config.json").read_text())
        placeholder = published["media_placeholder_token_id"]
        for name in ("image_token_id", "image_token_index"):
            published.pop(name, None)
        (target / "config.json").write_text(json.dumps(published))
        config = engine_config("drafter-llama", target=target)
        with serving(config):
            return load_drafter(config, target_model(config), placeholder)


def load_drafter(config: VllmConfig, target: nn.Module, placeholder: int) -> str:
    """Load the drafter by the code of the runner that this configuration selects, and say where it found the token."""
    # Imported where they are taken: not every release has both.
    if getattr(config, "use_v2_model_runner", False):
        from vllm.v1.worker.gpu.spec_decode.eagle.utils import load_eagle_model  # noqa: PLC0415

        drafter = load_eagle_model(target, config)
        found = "V2's loader asks for none"
    else:
        from vllm.v1.spec_decode.eagle import EagleProposer  # noqa: PLC0415

        # 0.16.0 would import the checkpoint's own image processor, to learn whether the drafter gets images.
        with mock.patch.object(MultiModalRegistry, "supports_multimodal_inputs", return_value=False, create=True):
            proposer = EagleProposer(config, DEVICE)
        proposer.load_model(target)
        drafter = proposer.model
        index = drafter.config.image_token_index
        assert index == placeholder, f"the drafter was told {index}, the target's placeholder is {placeholder}"
        found = f"image_token_index {index}"
    embedding = target.get_language_model().model.embed_tokens
    assert drafter.model.embed_tokens is embedding, "the drafter does not share the target's embedding"
    return f"{type(drafter).__name__} loaded; {found}"


@contract("supports-eagle3")
def supports() -> str:
    """Wrapper and language model implement SupportsEagle3, and what is set on the wrapper reaches the decoder."""
    inner_class = deepseek_v2.DeepseekV2ForCausalLM
    for model in (KimiK25ForConditionalGeneration, inner_class, alone()[1], alone()[1].get_language_model()):
        name = model.__name__ if isinstance(model, type) else f"an instance of {type(model).__name__}"
        assert supports_eagle3(model), f"{name} does not implement SupportsEagle3"
    wrapper = alone()[1]
    layers = len(decoder().layers)
    defaults = default_layers(wrapper)
    assert tuple(defaults) == (2, layers // 2, layers - 3), f"default layers of {layers}: {defaults}"
    wrapper.set_aux_hidden_state_layers((1, 4))
    reached = tuple(decoder().aux_hidden_state_layers)
    assert reached == (1, 4), f"(1, 4) was set on the wrapper, its decoder has {reached}"
    return f"wrapper and language model; default layers of {layers}: {tuple(defaults)}"


def default_layers(model: nn.Module) -> tuple[int, ...]:
    """The default aux layers, by the name under which this release's runner asks for them."""
    current, former = "get_eagle3_default_aux_hidden_state_layers", "get_eagle3_aux_hidden_state_layers"
    return getattr(model, current if hasattr(model, current) else former)()


def decoder() -> nn.Module:
    """The DeepseekV2Model inside the wrapper."""
    return alone()[1].get_language_model().model


class StandInLayer(nn.Module):
    """A decoder layer that leaves its index in what it returns; hidden states and residual differ.

    With `shares`, it hands on its rank's share of the tokens, as layers with sequence-parallel experts do.
    """

    def __init__(self, index: int, *, shares: bool = False):
        super().__init__()
        self.index = index
        self.use_sequence_parallel_moe = shares

    def forward(self, positions, hidden_states, residual, *_):
        state = hidden_states if residual is None else hidden_states + residual
        whole = len(state) == len(positions)
        assert whole or self.use_sequence_parallel_moe, (
            f"layer {self.index} got {len(state)} of {len(positions)} tokens"
        )
        if whole and self.use_sequence_parallel_moe:
            state = Ranks.share(state)
        return torch.full_like(state, self.index + 1.0), state


class LastNorm(nn.Module):
    """The decoder's last norm, as a sum, so that no kernel is needed."""

    def forward(self, hidden_states, residual):
        return hidden_states + residual, residual


@contextmanager
def stand_ins(ids: tuple[int, ...], sharing: Collection[int] = ()) -> Iterator[Callable[[], object]]:
    """The loaded decoder with stand-ins for its layers, those of `sharing` sequence parallel; yields its forward."""
    model = decoder()
    layers = nn.ModuleList(StandInLayer(i, shares=i in sharing) for i in range(LAYERS))
    with (
        serving(alone()[0]),
        mock.patch.object(model, "layers", layers),
        mock.patch.object(model, "end_layer", LAYERS),
        mock.patch.object(model, "norm", LastNorm()),
        mock.patch.object(model, "hidden_size", HIDDEN, create=True),
    ):
        alone()[1].set_aux_hidden_state_layers(ids)

        def forward() -> object:
            try:
                return type(model).forward(model, None, torch.arange(TOKENS), None, EMBEDDED)
            except TypeError as error:
                raise AssertionError(f"forward with aux layers {ids} raises {error}") from error

        yield forward


def compare(ids: tuple[int, ...], returned: object) -> None:
    """AssertionError unless the last hidden states came with one right state for each id, in their order.

    The state at layer i is the embedding, to which the layers before it have added 1, 2, ..., i.
    """
    assert isinstance(returned, tuple), (
        f"forward with aux layers {ids} returned {type(returned).__name__}, not hidden states and aux states"
    )
    last, states = returned
    assert torch.equal(last, EMBEDDED + LAYERS * (LAYERS + 1) / 2), f"aux layers {ids}: the last hidden states changed"
    assert len(states) == len(ids), f"{len(states)} aux states for the layers {ids}"
    for index, state in zip(ids, states, strict=True):
        expected = EMBEDDED + index * (index + 1) / 2
        assert state.shape == expected.shape, f"aux layer {index}: {len(state)} tokens of {len(expected)}"
        assert torch.equal(state, expected), f"aux layer {index} of {ids}: not the input of that layer"


@contract("aux-from-forward")
def aux_from_forward() -> str:
    """The decoder's forward returns, for each id in order, the sum of hidden states and residual before that layer.

    Id 0 is the embedding, the id that equals the number of layers the state before the last norm. Without ids, forward
    returns one tensor.
    """
    asked = [(2, 3, 4), (1,), (LAYERS - 1,), (LAYERS,), (0,), (0, 3, LAYERS), tuple(range(LAYERS + 1))]
    for ids in asked:
        with stand_ins(ids) as forward:
            compare(ids, forward())
    with stand_ins(()) as forward:
        plain = forward()
    assert isinstance(plain, torch.Tensor), f"forward without aux layers returned {type(plain).__name__}"
    return f"{len(asked)} sets of ids, 0 to {LAYERS} of {LAYERS} layers"


class Ranks:
    """Tensor-parallel ranks as threads, with an all-gather that waits for every one of them."""

    COUNT = 2
    _local = threading.local()

    def __init__(self):
        self.gathers = 0
        self._parts = [torch.empty(0)] * self.COUNT
        self._barrier = threading.Barrier(self.COUNT, timeout=10)

    def run(self, forward: Callable[[], object]) -> list[object]:
        """What each rank's forward returns."""

        def on(rank: int) -> object:
            self._local.rank = rank
            return forward()

        with ThreadPoolExecutor(self.COUNT) as pool:
            return list(pool.map(on, range(self.COUNT)))

    @classmethod
    def share(cls, state: torch.Tensor) -> torch.Tensor:
        """This rank's share of all tokens; they are padded to equal shares."""
        size = -(-len(state) // cls.COUNT)
        padded = nn.functional.pad(state, (0, 0, 0, size * cls.COUNT - len(state)))
        return padded[cls._local.rank * size :][:size]

    def gather(self, part: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Every rank's part, one after the other."""
        self._parts[self._local.rank] = part
        self._barrier.wait()
        whole = torch.cat(self._parts, dim)
        self._barrier.wait()
        self.gathers += 1
        return whole


@contract("aux-sequence-parallel")
def aux_sequence_parallel() -> str:
    """With sequence-parallel experts, each rank still gets every aux state for all tokens.

    Today's layers hand on their rank's share, and the decoder gathers it. In 0.16.0 the experts gather for themselves.
    """
    asked = [(2, 3, 4), tuple(range(1, LAYERS + 1))]
    if not hasattr(decoder().layers[0], "use_sequence_parallel_moe"):
        for ids in asked:
            with stand_ins(ids) as forward:
                compare(ids, forward())
        return experts_gather()
    for ids in asked:
        # As Kimi-K2.5 has it, one dense layer and then experts; and with a dense layer that follows experts.
        for sharing in ({*range(1, LAYERS)}, {*range(1, LAYERS)} - {4}):
            ranks = Ranks()
            with (
                mock.patch.object(deepseek_v2, "tensor_model_parallel_all_gather", ranks.gather),
                stand_ins(ids, sharing) as forward,
            ):
                for returned in ranks.run(forward):
                    compare(ids, returned)
            assert ranks.gathers, "nothing was gathered"
    return f"{Ranks.COUNT} ranks, {TOKENS} tokens in padded shares: every state whole on each"


def experts_gather() -> str:
    """The experts' forward takes all tokens and returns all tokens, though each rank computes its share."""
    config, ranks = alone()[0], Ranks()
    experts = next(layer.mlp for layer in decoder().layers if hasattr(layer.mlp, "experts"))
    shares = []

    class Experts(nn.Module):
        is_internal_router = True

        def forward(self, hidden_states, **_):
            shares.append(len(hidden_states))
            return None, hidden_states.clone()

    with (
        serving(config),
        mock.patch.multiple(
            deepseek_v2, tensor_model_parallel_all_gather=ranks.gather, sequence_parallel_chunk=Ranks.share
        ),
        mock.patch.multiple(experts, is_sequence_parallel=True, shared_experts=None, experts=Experts()),
        mock.patch.object(experts, "routed_scaling_factor", 2.0),
    ):
        for returned in ranks.run(lambda: experts(EMBEDDED.clone())):
            assert torch.equal(returned, EMBEDDED * 2), f"the experts returned {len(returned)} of {TOKENS} tokens"
    return f"experts gather for themselves: shares of {sorted(set(shares))}, {TOKENS} tokens returned"


if __name__ == "__main__":
    main()
