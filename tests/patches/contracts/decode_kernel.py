"""The MLA decode kernels fit the shared memory of each chip, with either type of KV cache.

They are compiled ahead of time, so that neither a GPU nor an engine is needed: vLLM's own launcher runs for a chip that
is not there, and each of its launches is compiled for that chip instead of run. `--table` prints every figure.
"""

from __future__ import annotations

import itertools
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import TYPE_CHECKING, NamedTuple

# A compiled kernel is of no use to anyone here.
os.environ.setdefault("TRITON_CACHE_DIR", "/tmp/aerie-decode-kernel")  # noqa: S108
# Triton 3.9 asks for a choice; this is what every release did until now.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import torch
import triton
from decode_kernel_file import decode
from verdict import contract, main

from aerie.rehearsal.decode_kernel import Launch, compile_ahead, load
from aerie.rehearsal.kernels import SM_90, SM_100, SM_120, Chip

if TYPE_CHECKING:
    from collections.abc import Iterator

CACHES = {"bf16": torch.bfloat16, "fp8e4nv": torch.float8_e4m3fn}
# 64 heads over TP32, TP8, TP4 and TP1; with DCP the heads of its ranks come together again.
HEADS = (2, 8, 16, 64)
PAGES = (16, 64)
# As many as a long context gets on the 188 multiprocessors of an RTX PRO 6000 (triton_mla.py: two for each).
SPLITS = 2 * 188
# Block and stages of the grouped kernel that 0.32.0 has for every chip; only FP8 on a small chip needs others.
UPSTREAM = (32, 2)


class Case(NamedTuple):
    chip: Chip
    cache: str
    heads: int
    page: int


def launches(case: Case) -> list[Launch]:
    """The launches of one decode step, compiled. Shared memory depends on types, strides and constants only."""
    step = decode([1], case.heads, case.page, SPLITS, cache_type=CACHES[case.cache])
    module = load(case.chip)
    return compile_ahead(module, case.chip, lambda: step.run(module))


def compiled(cases: list[Case]) -> Iterator[tuple[Case, list[Launch]]]:
    """The cases in order, each with its launches; compiled by as many processes as there are cores."""
    with ProcessPoolExecutor(os.cpu_count(), get_context("fork")) as pool:
        yield from zip(cases, pool.map(launches, cases), strict=True)


@contract("fp8-kv-fits-sm120")
def fits() -> str:
    """Every decode kernel fits sm_120, sm_90 and sm_100; only FP8 on sm_120 may be launched in another way."""
    # What fails without the patch comes first.
    cases = [Case(*case) for case in itertools.product((SM_120, SM_90, SM_100), reversed(CACHES), HEADS, PAGES)]
    largest: dict[tuple[int, str], int] = {}
    for case, found in compiled(cases):
        grouped, _ = found
        what = f"sm_{case.chip.capability}, {case.cache} KV cache, {case.heads} heads, page {case.page}"
        for launch in found:
            assert launch.shared <= case.chip.shared_memory, (
                f"{what}: {launch.kernel} needs {launch.shared:,} bytes of shared memory, "
                f"a block has {case.chip.shared_memory:,} there"
            )
        chosen = (grouped.constants["BLOCK_N"], grouped.constants["num_stages"])
        if case.chip != SM_120 or case.cache == "bf16":
            assert chosen == UPSTREAM, f"{what}: block and stages are {chosen}, no longer {UPSTREAM}"
        key = (case.chip.capability, case.cache)
        largest[key] = max(largest.get(key, 0), grouped.shared)
    figures = ", ".join(f"sm_{chip} {cache} {shared:,}" for (chip, cache), shared in largest.items())
    return f"{len(cases)} kernels by Triton {triton.__version__}, bytes at most: {figures}"


def table() -> str:
    """The shared memory of each launch as a Markdown table, one head a rank included; what is alike shares a row."""
    cases = [Case(*case) for case in itertools.product((SM_120, SM_90, SM_100), CACHES, (1, *HEADS), PAGES)]
    alike: dict[tuple[object, ...], list[Case]] = {}
    for case, found in compiled(cases):
        for launch in found:
            chosen = (launch.constants.get("BLOCK_N", "-"), launch.constants["num_stages"])
            key = (case.cache, f"`{launch.kernel}`", *chosen, f"sm_{case.chip.capability}", f"{launch.shared:,}")
            alike.setdefault((*key, f"{case.chip.shared_memory:,}"), []).append(case)
    head = ["KV cache", "kernel", "block", "stages", "chip", "bytes", "limit", "local heads", "pages"]
    rows = [head, ["---"] * len(head)]
    for key, group in alike.items():
        counts = ({case.heads for case in group}, {case.page for case in group})
        rows.append([*key, *(", ".join(map(str, sorted(found))) for found in counts)])
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in rows)


if __name__ == "__main__":
    if sys.argv[1:] == ["--table"]:
        print(f"Triton {triton.__version__}\n\n{table()}")
    else:
        main()
