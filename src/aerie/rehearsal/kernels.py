"""Does vLLM's MLA decode kernel fit the chip: compiled for it with the real model's shapes, whatever this machine is.

Triton compiles ahead of time without a GPU; the driver would refuse the result only at the first decode, after the
whole load. The shared memory that it needs is the compiler's own figure.
"""

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass

from aerie.rehearsal.backends import ATTENTION, expected
from aerie.rehearsal.findings import Finding, failed, passed, skipped
from aerie.rehearsal.static.arguments import FP8_DECODE_REMEDY, FP8_DECODE_SOURCE, Setup

_CHECK = "decode kernel"
_BACKEND = "TRITON_MLA"
_PAGE = 16
"""Tokens of a block of KV cache, as the engine takes them for it."""
_TOKENS_A_SPLIT = 512
_WITHIN = 120.0
"""Seconds; a compilation takes some, and importing torch more."""
_NOT_INSTALLED = "ModuleNotFoundError"


@dataclass(frozen=True)
class Chip:
    """A compute capability, and the bytes of shared memory that one thread block of it can have.

    CUDA C++ Programming Guide, "Technical Specifications per Compute Capability": 227 KB for 9.0 and 10.0, 99 KB for
    8.6, 8.9 and 12.0.
    """

    capability: int
    shared_memory: int

    @property
    def name(self) -> str:
        """As the compilers write it."""
        return f"sm_{self.capability}"


SM_90 = Chip(90, 227 * 1024)
SM_100 = Chip(100, 227 * 1024)
SM_120 = Chip(120, 99 * 1024)
CHIPS = {chip.name: chip for chip in (SM_90, SM_100, SM_120)}


@dataclass(frozen=True)
class DecodeShape:
    """What the kernel's constants come from; widths in elements, heads of one rank, `longest` and `page` in tokens."""

    heads: int
    longest: int
    page: int
    splits: int
    latent: int
    rope: int
    has_fp8_cache: bool


def shape_of(setup: Setup) -> DecodeShape:
    """Return the shape of a decode step over the longest context (triton_mla.py, TritonMLAMetadataBuilder)."""
    attention, settings = setup.target.attention, setup.settings
    return DecodeShape(
        # Under DCP the ranks' heads come together again before they decode.
        heads=max(1, attention.heads // settings.tensor_parallel) * settings.context_parallel,
        longest=setup.longest,
        page=_PAGE,
        splits=splits(setup.longest, setup.hardware.multiprocessors),
        latent=attention.kv_lora_rank,
        rope=attention.rope,
        has_fp8_cache=setup.has_fp8_cache,
    )


def splits(longest: int, multiprocessors: int) -> int:
    """Return in how many parts a context of so many tokens is read (triton_mla.py, _compute_num_kv_splits)."""
    parts = max(1, longest // _TOKENS_A_SPLIT)
    return min(1 << (parts - 1).bit_length(), 2 * multiprocessors)


def compile_decode(setup: Setup) -> Finding:
    """Compile the installed decode kernel for `setup.hardware`; failed where the chip has too little shared memory."""
    if obstacle := _obstacle(setup):
        return skipped(_CHECK, obstacle)
    chip, shape = CHIPS[str(setup.hardware.chip)], shape_of(setup)
    command = [sys.executable, "-P", "-m", "aerie.rehearsal.decode_kernel", chip.name, json.dumps(asdict(shape))]
    # Triton's interpreter compiles nothing.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    try:
        done = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_WITHIN,
            check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return skipped(_CHECK, f"the compiler was not done within {_WITHIN:.0f} s")
    if done.returncode == 0:
        return judge(shape, chip, json.loads(done.stdout.splitlines()[-1]))
    said = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
    if said[-1].startswith(_NOT_INSTALLED):
        return skipped(_CHECK, f"there is nothing to compile here: {said[-1]}")
    return failed(
        _CHECK,
        f"vLLM's MLA decode kernel does not compile for {chip.name}: {said[-1]}",
        "use the image's own vLLM and Triton, unchanged",
    )


def _obstacle(setup: Setup) -> str | None:
    """Return why there is nothing to compile."""
    name = setup.hardware.chip
    if name is None:
        return "there is no GPU: --chip names one to compile for"
    if name not in CHIPS:
        return f"the limits of {name} are not known here, but those of {', '.join(CHIPS)}"
    backend = expected(setup, {}).get(ATTENTION)
    if backend and backend.name != _BACKEND:
        return f"decoding takes {backend.name} on {name}, whose kernels are compiled in the image"
    return None


def judge(shape: DecodeShape, chip: Chip, needed: dict[str, int]) -> Finding:
    """Return whether the kernels fit, by the bytes of shared memory that each needs."""
    what = f"{_cache(shape)} KV cache, {shape.heads} heads a rank, pages of {shape.page}, {shape.splits} splits"
    kernel = max(needed, key=lambda name: needed[name])
    figures = f"needs {needed[kernel]:,} bytes of shared memory, and a block of {chip.name} has {chip.shared_memory:,}"
    if needed[kernel] <= chip.shared_memory:
        return passed(_CHECK, f"{what}: {kernel} {figures}", FP8_DECODE_SOURCE)
    remedy = FP8_DECODE_REMEDY if shape.has_fp8_cache else "use a chip with more shared memory"
    text = f"{what}: {kernel} {figures}, so the first decode after the load ends the engine"
    return failed(_CHECK, text, remedy, FP8_DECODE_SOURCE)


def _cache(shape: DecodeShape) -> str:
    return "FP8" if shape.has_fp8_cache else "BF16"
