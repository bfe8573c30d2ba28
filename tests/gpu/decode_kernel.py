"""Time vLLM's MLA decode (both kernels) with other blocks and stages, for either type of KV cache, on a GPU.

Usage: python tests/gpu/decode_kernel.py [--file PATH/TO/triton_decode_attention.py] [--json RESULT]

The block that fits the 99 KB of sm_120 with an FP8 cache is chosen by this measurement. On another chip more thread
blocks share a multiprocessor than on sm_120, where each of the candidates is alone on one, so everything is timed
twice: as it comes, and `alone`, with so much shared memory asked for that no second block fits beside it. Before the
times, each candidate's result is compared with float64.

Needs torch, Triton, aerie, and the kernels' file (that of the installed vLLM if none is named); about 2 minutes on an
H200.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import json
import os
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[1] / "patches" / "contracts"))

import torch
import triton
from decode_kernel_file import LATENT, ROPE, decode, largest_error
from triton.compiler.compiler import make_backend
from triton.runtime.errors import OutOfResources

from aerie.rehearsal.decode_kernel import Decode, compile_ahead, installed, load
from aerie.rehearsal.kernels import Chip, splits

if TYPE_CHECKING:
    from collections.abc import Iterator

CACHES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
VARIANTS = ((32, 2), (16, 2), (32, 1))
HEADS = (8, 16)
PAGES = (64, 16)
ROWS = (1, 8, 32, 128)
CONTEXTS = (1024, 16 * 1024, 128 * 1024)
# Lengths that end within a page, a block and a split, one row that is shorter than the splits, and one without context.
UNEQUAL = [16384, 1, 0, 17, 1000, 4097, 31, 9999]
# Largest error accepted, as a part of a row's largest value. Weights and results are rounded to BF16: steps of 2**-8.
TOLERANCE = 0.02


class Variant(NamedTuple):
    cache: str
    block: int
    stages: int
    heads: int
    page: int


@contextlib.contextmanager
def chosen(module: Any, block: int, stages: int, shared: int = 0) -> Iterator[None]:
    """Let the launcher choose this block and these stages, and ask for no less than `shared` bytes of shared memory."""
    kernel = module._fwd_grouped_kernel_stage1
    asked = False

    class Chosen:
        def __getitem__(self, grid: Any) -> Any:
            def launch(*arguments: Any, **constants: Any) -> None:
                nonlocal asked
                constants |= {"BLOCK_N": block, "num_stages": stages}
                # compile_ahead's stand-in for the kernel launches nothing.
                if not asked and isinstance(kernel, triton.JITFunction):
                    ask_for(kernel.warmup(*arguments, grid=grid, **constants), shared)
                    asked = True
                kernel[grid](*arguments, **constants)

            return launch

    with mock.patch.object(module, "_fwd_grouped_kernel_stage1", Chosen()):
        yield


def ask_for(compiled: Any, shared: int) -> None:
    """Launch this compiled kernel with at least so many bytes of shared memory from now on."""
    metadata = compiled.metadata
    if compiled.module is None:
        # A kernel may have more than 48 KB only if it was loaded so.
        compiled.metadata = metadata._replace(shared=max(metadata.shared, 49153))
        compiled._init_handles()
        compiled.metadata = metadata
    wanted = metadata._replace(shared=max(metadata.shared, shared))
    compiled.packed_metadata = make_backend(metadata.target).pack_metadata(wanted)


def compile_all(path: Path, chip: Chip, multiprocessors: int) -> None:
    """Fill Triton's cache with every kernel that will be timed, by all cores, so that the GPU need not wait."""
    variants = itertools.product(CACHES, VARIANTS, HEADS, PAGES, CONTEXTS)
    tasks = [
        (path, chip, Variant(cache, *variant, heads, page), context, splits(context, multiprocessors))
        for cache, variant, heads, page, context in variants
    ]
    with ProcessPoolExecutor(os.cpu_count(), get_context("fork")) as pool:
        list(pool.map(compile_one, tasks))


def compile_one(task: tuple[Path, Chip, Variant, int, int]) -> None:
    path, chip, variant, context, count = task
    step = decode([context], variant.heads, variant.page, count, cache_type=CACHES[variant.cache], device="meta")
    module = load(chip, path)

    def call() -> None:
        with chosen(module, variant.block, variant.stages):
            step.run(module)

    compile_ahead(module, chip, call)


def errors(module: Any) -> dict[Variant, float]:
    """The largest error of each variant that fits, on rows of unequal lengths and with a cache that is scaled."""
    found = {}
    for cache, variant, heads, page in itertools.product(CACHES, VARIANTS, HEADS, PAGES):
        scale = 0.5 if cache == "fp8" else 1.0
        step = decode(UNEQUAL, heads, page, 32, cache_type=CACHES[cache], device="cuda", scale=scale)
        with chosen(module, *variant), contextlib.suppress(OutOfResources):
            found[Variant(cache, *variant, heads, page)] = largest_error(step, module)
    return found


def median_us(module: Any, step: Decode) -> float | None:
    """A step's median time in microseconds, caches cold, as part of a CUDA graph; None if the kernel does not fit."""
    try:
        step.run(module)
    except OutOfResources:
        return None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step.run(module)
    return round(1000 * triton.testing.do_bench(graph.replay, warmup=5, rep=30, return_mode="median"), 1)


def times(module: Any, multiprocessors: int, alone: int) -> Iterator[dict[str, Any]]:
    """The time of every variant at every size; `alone` bytes of shared memory leave no room for a second block."""
    tokens = max(ROWS) * max(CONTEXTS)
    bf16 = torch.randn(tokens, 1, LATENT + ROPE, device="cuda", dtype=torch.bfloat16)
    pool = {"bf16": bf16, "fp8": bf16.to(torch.float8_e4m3fn)}
    gc.freeze()  # each capture collects garbage
    for heads, page, rows, context, cache in itertools.product(HEADS, PAGES, ROWS, CONTEXTS, CACHES):
        pages = tokens // page
        count = splits(context, multiprocessors)
        step = Decode(
            query=torch.randn(rows, heads, LATENT + ROPE, device="cuda", dtype=torch.bfloat16),
            cache=pool[cache].view(pages, page, 1, LATENT + ROPE),
            table=torch.randperm(pages, device="cuda", dtype=torch.int32)[: rows * context // page].view(rows, -1),
            lengths=torch.full((rows,), context, device="cuda", dtype=torch.int32),
            logits=torch.empty(rows, heads, count, LATENT + 1, device="cuda"),
            scale=torch.tensor(1.0, device="cuda"),
        )
        for (block, stages), shared in itertools.product(VARIANTS, (0, alone)):
            with chosen(module, block, stages, shared):
                us = median_us(module, step)
            variant = Variant(cache, block, stages, heads, page)._asdict()
            yield {**variant, "rows": rows, "context": context, "splits": count, "alone": shared > 0, "us": us}


def table(measured: list[dict[str, Any]]) -> str:
    """The times as a Markdown table, one row for each size, and below it the geometric mean of each column."""
    columns = [(cache, *variant, alone) for alone in (False, True) for cache in CACHES for variant in VARIANTS]
    sizes = list(itertools.product(HEADS, PAGES, ROWS, CONTEXTS))
    key = ("heads", "page", "rows", "context", "cache", "block", "stages", "alone")
    us = {tuple(m[k] for k in key): m["us"] for m in measured}
    names = [f"{cache} {block}/{stages}{' alone' * alone}" for cache, block, stages, alone in columns]
    rows = [[*size, *(us[*size, *column] or "-" for column in columns)] for size in sizes]
    of_column = [[us[*size, *column] for size in sizes] for column in columns]
    means = [round(statistics.geometric_mean(values), 1) if all(values) else "-" for values in of_column]
    rows.append(["geometric mean", "", "", "", *means])
    lines = [["heads", "page", "rows", "context", *names], ["---"] * (4 + len(columns)), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file", type=Path, help="triton_decode_attention.py; that of the installed vLLM by default")
    parser.add_argument("--json", type=Path, help="where the figures go")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("no GPU: torch.cuda.is_available() is false")
    path = arguments.file or installed()
    properties = torch.cuda.get_device_properties(0)
    multiprocessors = properties.multi_processor_count
    chip = Chip(10 * properties.major + properties.minor, properties.shared_memory_per_block_optin)
    # A block takes 1 KB more than it asks for: with half of the multiprocessor's memory it is alone there.
    alone = properties.shared_memory_per_multiprocessor // 2

    began = time.monotonic()

    def say(what: str) -> None:
        print(f"{time.monotonic() - began:4.0f} s: {what}", flush=True)

    say(f"{properties.name}, torch {torch.__version__}, Triton {triton.__version__}")
    compile_all(path, chip, multiprocessors)
    say("compiled")
    module = load(chip, path)
    error_of = errors(module)
    say(f"compared with float64, largest error {max(error_of.values()):.4f}")
    measured = list(times(module, multiprocessors, alone))
    say(f"timed; median microseconds by block/stages\n\n{table(measured)}")
    if arguments.json:
        result = {
            "device": properties.name,
            "torch": torch.__version__,
            "triton": triton.__version__,
            "errors": [{**variant._asdict(), "error": error} for variant, error in error_of.items()],
            "times": measured,
        }
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    if wrong := {variant: error for variant, error in error_of.items() if not error < TOLERANCE}:
        sys.exit(f"differs from float64 by {TOLERANCE} or more: {wrong}")


if __name__ == "__main__":
    main()
