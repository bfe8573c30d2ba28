"""Weights of any shape for a pair whose text is known in advance: which token follows which is a permutation.

Each token has a code, a vector of +1 and -1; codes of different tokens are nearly orthogonal. The target's embedding
holds the codes, all layers between add noise to it, and the head's row of a token is the code of the one before it. So
the last token alone decides the next, with a margin that neither BF16 nor INT4 can close, while a layer that gives
nonsense or nothing at all is seen: its noise is as strong as the code.

A drafter's fc hands on the first auxiliary state, which is the code of the token before last, and its head looks two
tokens ahead. So the first token of each draft is accepted and the further ones, which would have to look ahead from
there, are not: how many are is known, too.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from torch import Tensor

    from aerie.checkpoint.config import Drafter, Target
    from aerie.checkpoint.layout import Expected, Layout
    from aerie.checkpoint.script import Script

LOGIT = 40.0
"""Of the token that follows; the next best of 163,840 in 256 elements has about 12."""
NOISE = 0.3
"""Root mean square of what each attention and MLP adds, where a code has 1."""
_INT4_A_WORD = 8
_INT4_RMS = 4.6  # of the whole numbers from -8 to 7
_INTO_STREAM = ("o_proj", "down_proj", "wo", "mlp.fc1", "mm_projector.proj.2")
_ROWS_AT_ONCE = 8192
_DTYPES = {
    "BF16": torch.bfloat16, "F32": torch.float32, "I32": torch.int32, "I64": torch.int64, "BOOL": torch.bool,
}  # fmt: skip


class _Source:
    """Noise from one buffer, which is as long as numbers do not repeat within a row; the same seed, the same bytes."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._buffer = torch.randn(1 << 24, generator=self._generator)
        self._at = 0

    def noise(self, shape: tuple[int, ...], deviation: float) -> Tensor:
        """Draw normal numbers with this standard deviation."""
        return (self._take(shape) * deviation).reshape(shape)

    def packed(self, shape: tuple[int, ...]) -> Tensor:
        """Draw integers of eight random INT4 each."""
        return torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32, generator=self._generator)

    def codes(self, tokens: int, width: int) -> Tensor:
        """Draw a code for each token, as int8."""
        codes = torch.empty(tokens, width, dtype=torch.int8)
        for begin in range(0, tokens, _ROWS_AT_ONCE):
            some = codes[begin : begin + _ROWS_AT_ONCE]
            some.copy_(torch.randint(0, 2, some.shape, dtype=torch.int8, generator=self._generator) * 2 - 1)
        return codes

    def _take(self, shape: tuple[int, ...]) -> Tensor:
        count = torch.Size(shape).numel()
        if count > len(self._buffer):
            return self._buffer.repeat(-(-count // len(self._buffer)))[:count]
        # Each goes on where the one before ended, so that two of one shape are not alike.
        begin = self._at if self._at + count <= len(self._buffer) else 0
        self._at = begin + count
        return self._buffer[begin : self._at]


def write_target(directory: Path, target: Target, layout: Layout, script: Script, seed: int = 0) -> None:
    """Write a target's weights into one file of `directory`; raises OSError where it cannot be written."""
    source = _Source(seed)
    codes = source.codes(target.vocabulary, target.hidden_size)
    head = codes[torch.tensor(script.before)]
    scale = target.hidden_size**-1 * LOGIT

    def make(name: str, expected: Expected) -> Tensor:
        if name.endswith("embed_tokens.weight"):
            return codes
        if name.endswith("lm_head.weight"):
            return head * scale
        return _filler(source, name, expected, layout)

    write(directory / "model.safetensors", layout, make)


def write_drafter(directory: Path, drafter: Drafter, layout: Layout, script: Script, seed: int = 0) -> None:
    """Write the weights of a drafter for the target of the same script and seed; raises OSError, too."""
    codes = _Source(seed).codes(drafter.vocabulary, drafter.hidden_size)
    source = _Source(seed + 1)
    before = torch.tensor(script.before)
    drafted = torch.tensor(script.drafted(drafter.draft_vocabulary))
    two_before = before[before[drafted]]
    scale = drafter.hidden_size**-1 * LOGIT

    def make(name: str, expected: Expected) -> Tensor:
        match name:
            case "embed_tokens.weight":
                return codes
            case "lm_head.weight":
                return codes[two_before] * scale
            case "fc.weight":
                first = torch.zeros(expected.shape)
                first[:, : drafter.hidden_size] = torch.eye(drafter.hidden_size)
                return first
            case "d2t":
                return drafted - torch.arange(len(drafted))
            case _:
                return _filler(source, name, expected, layout)

    write(directory / "model.safetensors", layout, make)


def write(path: Path, layout: Mapping[str, Expected], make: Callable[[str, Expected], Tensor]) -> None:
    """Write one safetensors file, a tensor at a time: the whole may be larger than the memory."""
    described: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, expected in layout.items():
        begin, end = end, end + expected.size
        described[name] = {"dtype": expected.dtype, "shape": list(expected.shape), "data_offsets": [begin, end]}
    header = json.dumps(described).encode()
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for name, expected in layout.items():
            tensor = make(name, expected).to(_DTYPES[expected.dtype]).contiguous()
            if tuple(tensor.shape) != expected.shape:
                raise ValueError(f"{name} was made as {list(tensor.shape)}, not {list(expected.shape)}")
            file.write(memoryview(tensor.view(torch.uint8).numpy()))


def _filler(source: _Source, name: str, expected: Expected, layout: Layout) -> Tensor:
    """Return what has no part in the script: norms that leave all as it is, and noise."""
    shape = expected.shape
    module = name.rpartition(".")[0]
    if name.endswith((".bias", "e_score_correction_bias")):
        return torch.zeros(shape)
    if name.endswith("weight_shape"):
        rows, words = layout[name.replace("weight_shape", "weight_packed")].shape
        return torch.tensor([rows, words * _INT4_A_WORD])
    strength = NOISE if module.endswith(_INTO_STREAM) else 1.0
    if name.endswith("weight_packed"):
        return source.packed(shape)
    if name.endswith("weight_scale"):
        columns = layout[name.replace("weight_scale", "weight_packed")].shape[1] * _INT4_A_WORD
        return torch.full(shape, strength / (_INT4_RMS * columns**0.5))
    if len(shape) == 1:  # a norm
        return torch.ones(shape)
    columns = torch.Size(shape[1:]).numel()
    return source.noise(shape, strength * columns**-0.5)
