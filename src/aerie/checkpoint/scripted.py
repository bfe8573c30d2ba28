"""Weights of any shape for a pair whose text is known in advance: which token follows which is a permutation.

Each token has a code, a row of +1 and -1; codes of different tokens are nearly orthogonal. Matrices pick coordinates:

  embedding   writes the code
  attention   looks for positions of the same token, and writes what they hold in another order: the first layer's
              strongly, the others' weakly
  experts     write what the stream holds in a third order: the last layer's strongly, the others' weakly
  head        its row of a token is the code of the token before, in the one order after the other

So the last token alone decides the next, by way of the first layer's KV cache and the last layer's experts: without
either, or with nonsense from them, another text is said. A fault of another layer is seen if it writes more than these
do, as NaN is. Where the last token occurred before in the context, all its positions count alike: wrong values there
are seen, too, though not that a position is missed. The margin is one that neither BF16 nor INT4 closes, at any depth:
the more weak layers there are, the less each writes. Vision writes noise, and so do a drafter's own layers.

A drafter's fc hands on one auxiliary state, in which the first attention has written the code of the token before last,
and its head looks two tokens ahead. So the first token of each draft is accepted and the further ones, which would have
to look ahead from there, are not: how many are is known, too.
"""

from __future__ import annotations

import json
import math
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from torch import Tensor

    from aerie.checkpoint.config import Drafter, Target
    from aerie.checkpoint.layout import Expected, Layout
    from aerie.checkpoint.script import Script

_LOGIT = 40.0
"""Of the token that follows, if the final state were its code alone."""
_NOISE = 0.3
"""Root mean square of what a layer of noise adds, where a code has 1."""
_WEAK = 0.8
"""Root mean square of what all weak attentions add together, or all weak experts, at any depth."""
_COPIED = 4.0
"""What the first attention adds to the stream, where a code has 1."""
_MIXED = 8.0
"""What the last layer's MLP or experts add."""
_PEAK = 3.0
"""Of queries, where keys have 1. A position's score for itself is then 28 with 128 elements a head and no yarn, and for
another token 2.5 or less in root mean square: of a million tokens none stands out."""
_OPEN = 8.0
"""Of a neuron's gate, which reads the coordinate that is +1 in all codes: silu hands such an input on as it is."""
_INT4_A_WORD = 8
_INT4_LARGEST = 7
_INT4_ZEROS = -0x77777778  # 0x88888888 as int32: eight times 8, which stands for 0
_STRIDE = 64  # numbers from the code of one token to that of the next
_ROWS_AT_ONCE = 4096  # of a head, so that what lies between stays in the processor's cache
_INTO_STREAM = ("o_proj", "down_proj", "wo", "mlp.fc1", "mm_projector.proj.2")
_DTYPES = {
    "BF16": torch.bfloat16, "F32": torch.float32, "I32": torch.int32, "I64": torch.int64, "BOOL": torch.bool,
}  # fmt: skip


class _Source:
    """Random numbers, the same for the same seed."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._buffer = torch.empty(0)
        self._at = 0

    def noise(self, shape: tuple[int, ...], deviation: float) -> Tensor:
        """Draw normal numbers with this standard deviation, from one buffer, which is faster than drawing each."""
        if not len(self._buffer):
            self._buffer = torch.randn(1 << 24, generator=self._generator)
        count = math.prod(shape)
        if count > len(self._buffer):
            taken = self._buffer.repeat(-(-count // len(self._buffer)))[:count]
        else:
            # Each goes on where the one before ended, so that two of one shape are not alike.
            begin = self._at if self._at + count <= len(self._buffer) else 0
            self._at = begin + count
            taken = self._buffer[begin : self._at]
        return (taken * deviation).reshape(shape)

    def codes(self, tokens: int, width: int) -> Tensor:
        """Draw a code for each token, as int8: windows of one long row, which takes 64 numbers a token, not `width`.

        The first number is +1 in each.
        """
        row = torch.randint(0, 2, (tokens * _STRIDE + width,), dtype=torch.int8, generator=self._generator) * 2 - 1
        row[: tokens * _STRIDE : _STRIDE] = 1
        return row.as_strided((tokens, width), (_STRIDE, 1))

    def order(self, length: int, read: int) -> Tensor:
        """Draw which of the first `read` coordinates each of `length` is taken from; the first one stays."""
        others = torch.randperm(length - 1, generator=self._generator) % (read - 1) + 1
        return torch.cat([torch.zeros(1, dtype=torch.int64), others])


class _Sparse(NamedTuple):
    """A matrix that is `size` at each (rows[i], columns[i]), and 0 elsewhere."""

    rows: Tensor
    columns: Tensor
    size: float

    def tensor(self, kind: str, shape: tuple[int, ...]) -> Tensor:
        """Return it as it is, or that part of its INT4 form in compressed-tensors that `kind` names."""
        match kind:
            case "weight_packed":
                # Eight to a word, the first lowest, each plus 8.
                words = torch.full((math.prod(shape),), _INT4_ZEROS, dtype=torch.int32)
                largest = int(math.copysign(_INT4_LARGEST, self.size))
                bits = largest * (1 << 4 * (self.columns % _INT4_A_WORD))
                at = self.rows * shape[1] + self.columns // _INT4_A_WORD
                return words.index_add_(0, at, bits.to(torch.int32)).reshape(shape)
            case "weight_scale":
                return torch.full(shape, abs(self.size) / _INT4_LARGEST)
            case _:
                matrix = torch.zeros(shape, dtype=torch.bfloat16)
                matrix[self.rows, self.columns] = self.size
                return matrix


@dataclass(frozen=True)
class _Orders:
    """Orders of coordinates: out[i] = in[order[i]]."""

    attention: Tensor
    mlp: Tensor

    @property
    def both(self) -> Tensor:
        """Attention's, then the MLP's."""
        return self.attention[self.mlp]


def write_target(directory: Path, target: Target, layout: Layout, script: Script, seed: int = 0) -> None:
    """Write a target's weights into one file of `directory`; raises OSError where it cannot be written."""
    source = _Source(seed)
    codes, orders = _codes(source, target)

    def make(name: str, expected: Expected) -> Tensor:
        if name.endswith("embed_tokens.weight"):
            return codes
        if name.endswith("lm_head.weight"):
            return _head(codes, torch.tensor(script.before), orders.both)
        module, _, kind = name.rpartition(".")
        if kind == "weight_shape":
            rows, words = layout[f"{module}.weight_packed"].shape
            return torch.tensor([rows, words * _INT4_A_WORD])
        matrix = _matrix(module, target, orders) if ".layers." in name else None
        return matrix.tensor(kind, expected.shape) if matrix else _filler(source, name, expected)

    write(directory / "model.safetensors", layout, make)


def _codes(source: _Source, target: Target) -> tuple[Tensor, _Orders]:
    hidden = target.hidden_size
    codes = source.codes(target.vocabulary, hidden)
    return codes, _Orders(attention=source.order(hidden, _handed_on(target)), mlp=source.order(hidden, hidden))


def _head(codes: Tensor, read: Tensor, order: Tensor) -> Tensor:
    """Return a head whose rows read the codes of these tokens, in another order."""
    head = torch.empty(len(read), codes.shape[1], dtype=torch.bfloat16)
    for some, rows in zip(read.split(_ROWS_AT_ONCE), head.split(_ROWS_AT_ONCE), strict=True):
        rows.copy_(codes[some][:, order])
    return head.mul_(_LOGIT / codes.shape[1])


def _matrix(module: str, target: Target, orders: _Orders) -> _Sparse | None:
    """Return the weights of a module of the language model's layers, None for norms and routers."""
    path = module.split(".layers.", 1)[1].split(".")
    layer, part = int(path[0]), path[-1]
    # With one sign, what the coordinates have in common would grow from layer to layer: no order changes it.
    weak = (-1) ** layer * _WEAK * target.layers**-0.5
    if "self_attn" in path:
        return _attention(target, part, _turned(orders.attention, layer), weak if layer else _COPIED)
    if part in ("gate_proj", "up_proj", "down_proj"):
        after = target.layers - 1 - layer
        is_weak = after or "shared_experts" in path
        return _mlp(module, target, _turned(orders.mlp, after), weak if is_weak else _MIXED)
    return None


def _turned(order: Tensor, by: int) -> Tensor:
    """Return another order, in which the first coordinate stays, too."""
    return torch.cat([order[:1], order[1:].roll(by)])


def _handed_on(target: Target) -> int:
    """Return how many coordinates go through the latent, and the values, of an attention."""
    attention = target.attention
    return min(target.hidden_size, attention.kv_lora_rank, attention.heads * attention.value)


def _attention(target: Target, part: str, order: Tensor, strength: float) -> _Sparse | None:
    shape, coordinates = target.attention, _handed_on(target)
    met = min(coordinates, shape.q_lora_rank or coordinates)
    heads = torch.arange(shape.heads)[:, None]
    sought = ((heads * shape.nope + torch.arange(shape.nope)) % met).flatten()

    def rows(width: int, begin: int, end: int) -> Tensor:
        """Return those from `begin` to `end` of each head's `width`."""
        return (heads * width + torch.arange(begin, end)).flatten()

    match part:
        case "q_proj" | "q_b_proj":
            return _Sparse(rows(shape.nope + shape.rope, 0, shape.nope), sought, _PEAK)
        case "q_a_proj":
            compressed = torch.arange(shape.q_lora_rank or 0)
            return _Sparse(compressed, compressed % met, 1.0)
        case "kv_a_proj_with_mqa":
            latents = torch.arange(shape.kv_lora_rank)
            return _Sparse(latents, latents % coordinates, 1.0)
        case "kv_b_proj":
            width = shape.nope + shape.value
            keys_and_values = torch.cat([rows(width, 0, shape.nope), rows(width, shape.nope, width)])
            handed_on = torch.arange(shape.heads * shape.value) % coordinates
            return _Sparse(keys_and_values, torch.cat([sought, handed_on]), 1.0)
        case "o_proj":
            # A coordinate's value stands in several heads: outputs take it from one after the other.
            outputs = torch.arange(target.hidden_size)
            copies = shape.heads * shape.value // coordinates
            return _Sparse(outputs, order + coordinates * (outputs % copies), strength)
        case _:
            return None


def _mlp(module: str, target: Target, order: Tensor, strength: float) -> _Sparse:
    """Return a matrix of an MLP or an expert, which has a neuron for each coordinate that it writes."""
    *path, part = module.split(".")
    experts, hidden = target.experts, target.hidden_size
    if "experts" in path:
        # Together those that are chosen write each coordinate about once; they share the scaling factor.
        width = experts.width
        strength *= hidden / width / experts.scale
    elif "shared_experts" in path:
        width = experts.shared * experts.width
    else:
        width = target.dense_width
    neurons = torch.arange(width)
    # Experts and layers begin at different coordinates. None writes the first, which opens the gates: open ones would
    # open the next layer's further.
    written = (neurons + zlib.crc32(".".join(path).encode())) % (hidden - 1) + 1
    match part:
        case "gate_proj":
            return _Sparse(neurons, torch.zeros_like(neurons), _OPEN)
        case "up_proj":
            return _Sparse(neurons, order[written], 1.0)
        case _:
            return _Sparse(written, neurons, strength / _OPEN)


def write_drafter(
    directory: Path, drafter: Drafter, target: Target, layout: Layout, script: Script, seed: int = 0
) -> None:
    """Write the weights of a drafter for the target of the same script and seed; raises OSError, too."""
    codes, orders = _codes(_Source(seed), target)
    source = _Source(seed + 1)
    hidden = drafter.hidden_size
    # The input of layer 0 has no attention's words in it.
    read = hidden * (drafter.aux_layers is not None and drafter.aux_layers[0] == 0)
    before = torch.tensor(script.before)
    drafted = torch.tensor(script.drafted(drafter.draft_vocabulary))
    two_before = before[before[drafted]]

    def make(name: str, expected: Expected) -> Tensor:
        match name:
            case "embed_tokens.weight":
                return codes
            case "lm_head.weight":
                return _head(codes, two_before, orders.attention)
            case "fc.weight":
                first = torch.zeros(expected.shape)
                first[:, read : read + hidden] = torch.eye(hidden)
                return first
            case "d2t":
                return drafted - torch.arange(len(drafted))
            case _:
                return _filler(source, name, expected)

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


def _filler(source: _Source, name: str, expected: Expected) -> Tensor:
    """Return what has no part in the script: norms that leave all as it is, and noise."""
    if name.endswith((".bias", "e_score_correction_bias")):
        return torch.zeros(expected.shape)
    if len(expected.shape) == 1:  # a norm
        return torch.ones(expected.shape)
    strength = _NOISE if name.rpartition(".")[0].endswith(_INTO_STREAM) else 1.0
    return source.noise(expected.shape, strength * math.prod(expected.shape[1:]) ** -0.5)
