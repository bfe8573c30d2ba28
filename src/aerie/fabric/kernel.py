"""A kernel that copies words: where one end is another GPU's memory, it is that GPU's neighbour that loads or stores.

NCCL and custom all-reduces move their bytes so; the copy engine is another unit, and takes other paths.
"""

from typing import Any

import triton
import triton.language as tl

_BLOCK = 1024


# Triton takes annotations for its own.
@triton.jit  # type: ignore[untyped-decorator]
def _copy(arrived, sent, words, block: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    at = tl.program_id(0) * block + tl.arange(0, block)
    tl.store(arrived + at, tl.load(sent + at, mask=at < words), mask=at < words)


def copy(sent: Any, arrived: Any) -> None:
    """Copy one tensor into another of its size, by a kernel on the current GPU."""
    words = arrived.numel()
    _copy[(triton.cdiv(words, _BLOCK),)](arrived, sent, words, block=_BLOCK)
