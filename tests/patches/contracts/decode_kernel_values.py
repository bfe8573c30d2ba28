"""The MLA decode kernels compute what float64 says, and their scratch space may be larger than 2**31 floats.

Where there is a GPU they run on it, otherwise in Triton's interpreter on the CPU, whose BF16 is no use: FP16 stands for
it there.
"""

from __future__ import annotations

import itertools
import mmap
import os
from dataclasses import replace

import torch

GPU = torch.cuda.is_available()
if not GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it once

from decode_kernel_file import LATENT, decode, largest_error  # noqa: E402
from verdict import contract, main  # noqa: E402

from aerie.rehearsal.decode_kernel import load  # noqa: E402
from aerie.rehearsal.kernels import SM_90, SM_120, Chip  # noqa: E402

DEVICE = "cuda" if GPU else "cpu"
TYPE = torch.bfloat16 if GPU else torch.float16
# As a part of a row's largest value: weights and results are rounded to steps of 2**-8 (BF16) or 2**-11 (FP16).
TOLERANCE = 0.02 if GPU else 0.0025
# Of several blocks, ending within one and within a page; of fewer tokens than splits.
LENGTHS = [16384, 9999, 3] if GPU else [100, 2]
SPLITS = 32 if GPU else 3

# The kernels' scratch as triton_mla.py lays it out, [rows, heads, splits, 513] floats, with 8 local heads (TP8) and the
# 376 splits of 188 multiprocessors. A row has 1,543,104 floats: the end of row 1391 lies beyond 2**31, and so does all
# of row 1392. Where the row's start is 32 bits wide, the first is lost in a sum and the second in a product.
ROWS, HEADS, MOST_SPLITS = 1393, 8, 376
BEYOND = (1391, 1392)


def large_chip() -> Chip:
    """The GPU that runs the kernels; without one, a chip with room for upstream's constants."""
    if not GPU:
        return SM_90
    properties = torch.cuda.get_device_properties(0)
    return Chip(10 * properties.major + properties.minor, properties.shared_memory_per_block_optin)


@contract("decode-kernel-values")
def values() -> str:
    """Output and log-sum-exp agree with float64, for every head count, page size and cache type, FP8 on each chip."""
    small, large = load(SM_120), load(large_chip())
    launched = [(small, TYPE), (small, torch.float8_e4m3fn), (large, torch.float8_e4m3fn)]
    worst = 0.0
    cases = list(itertools.product(launched, (2, 8, 16, 64), (16, 64)))
    for (module, cache), heads, page in cases:
        scale = 1.0 if cache == TYPE else 0.5
        error = largest_error(decode(LENGTHS, heads, page, SPLITS, TYPE, cache, DEVICE, scale), module)
        assert error < TOLERANCE, (
            f"{module.__name__}, {cache}, {heads} heads, page {page}: "
            f"off by {error:.4f} where less than {TOLERANCE} is right"
        )
        worst = max(worst, error)
    where = torch.cuda.get_device_name() if GPU else "the interpreter"
    return f"{len(cases)} cases on {where}, largest error {worst:.5f}"


def scratch() -> torch.Tensor:
    """Zeros of the scratch's shape, with 2**31 more in front of them, where an offset that wraps around ends up.

    17.2 GB; on a CPU that is address space, and memory only where it is touched.
    """
    shape = torch.Size((ROWS, HEADS, MOST_SPLITS, LATENT + 1))
    floats = 2**31 + shape.numel()
    if GPU:
        return torch.zeros(floats, device=DEVICE)[2**31 :].view(shape)
    no_reserve = 0x4000  # Linux's MAP_NORESERVE, which Python has no name for
    memory = mmap.mmap(-1, 4 * floats, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve)
    return torch.frombuffer(memory, dtype=torch.float32)[2**31 :].view(shape)


@contract("decode-offsets-64-bit")
def offsets() -> str:
    """Each row writes its own place in a scratch of more than 2**31 floats, and the result is right."""
    logits, module = scratch(), load(SM_120)
    worst = 0.0
    for last in BEYOND:
        part = logits[: last + 1]
        if not GPU:
            # A few rows and one split are enough for the interpreter: a view with the strides of the whole.
            every = next(n for n in range(100, last) if last % n == 0)
            part = part[::every, :, :1]
        rows, heads, splits, _ = part.shape
        step = replace(decode([2 * splits] * rows, heads, 16, 1, TYPE, TYPE, DEVICE), logits=part)
        error = largest_error(step, module)
        lost = (part[..., LATENT] == 0).any(-1).nonzero().tolist()
        assert not lost, (
            f"{len(lost)} of {rows * heads} pairs of row and head did not write their place in the scratch, the first "
            f"in row {last} of {last + 1}, head {lost[0][1]}: its offset is beyond 32 bits"
        )
        assert error < TOLERANCE, f"{last + 1} rows: off by {error:.4f} where less than {TOLERANCE} is right"
        worst = max(worst, error)
        part[..., LATENT] = 0
    return f"{ROWS:,} rows of {logits.stride(0):,} floats, largest error {worst:.5f}"


if __name__ == "__main__":
    main()
