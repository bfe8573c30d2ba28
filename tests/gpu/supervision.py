"""Proves on GPUs what the supervisor does there: starts that are told, failures that are diagnosed, GPUs given back.

    python tests/gpu/supervision.py --out results        # where vLLM 0.32.0's CUDA wheel is installed, patched or not

As `one_gpu.py`, whose docstring says the rest. Some items take two GPUs and are skipped where there is one.
"""

from __future__ import annotations

import sys

from items import Item, run
from two_gpus import PCIE

FAILURES = "tests/gpu/failures.py"
SUPERVISED = "tests/gpu/supervised.py"
TWO = {"gpus": 2, "alone": True, "environment": PCIE}

ITEMS = [
    Item(
        "one_gpu",
        SUPERVISED,
        ("start-is-told", "killed-engine-frees-its-gpu", "nothing-outlives-the-supervisor"),
        alone=True,
        seconds=250,
    ),
    Item("stopped_rank", SUPERVISED, ("stopped-rank-is-found",), seconds=320, **TWO),
    Item("killed_rank", SUPERVISED, ("killed-rank-is-told",), seconds=200, **TWO),
    Item("never_meet", SUPERVISED, ("ranks-that-never-meet",), seconds=160, **TWO),
    # These end before they measure what memory is free, and may share.
    Item("visibility", FAILURES, ("no-gpu", "no-such-gpu"), seconds=200),
    Item("refused", FAILURES, ("fewer-gpus-than-ranks", "backend-not-of-this-chip"), seconds=200),
    Item("no_compiler", FAILURES, ("no-compiler",), seconds=200),
    Item("memory_taken", FAILURES, ("gpu-taken", "out-of-memory-at-the-context"), alone=True, seconds=150),
    Item("memory_loading", FAILURES, ("out-of-memory-loading",), alone=True, seconds=120),
    Item("memory_profiling", FAILURES, ("out-of-memory-profiling",), alone=True, seconds=120),
    Item("memory_cache", FAILURES, ("no-memory-for-the-cache", "cache-for-no-request"), alone=True, seconds=150),
    Item("memory_serving", FAILURES, ("out-of-memory-serving",), alone=True, seconds=200),
    Item("device_assert", FAILURES, ("device-side-assert",), alone=True, seconds=150),
]

if __name__ == "__main__":
    sys.exit(run(__doc__, ITEMS))
