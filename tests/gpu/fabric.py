"""Proves on two GPUs or more what `aerie fabric` says of them: paths that work, and planted ones that do not.

    python tests/gpu/fabric.py --out results                       # where torch and Triton are installed; no vLLM
    python tests/gpu/fabric.py --out results --env-file config/nccl-pcie.env        # GPUs on PCIe, as the service runs

As `one_gpu.py`, whose docstring says the rest. It takes five minutes.
"""

from __future__ import annotations

import sys

from items import Item, run

PROVEN = "tests/gpu/fabric_proven.py"
TWO = {"gpus": 2, "alone": True}

ITEMS = [
    Item("proof", PROVEN, ("bytes-arrive-and-the-fallback-has-a-price",), seconds=180, **TWO),
    Item(
        "dead_paths",
        PROVEN,
        (
            "lost-bytes-are-found",
            "garbled-bytes-are-counted",
            "kernels-lost-bytes-are-found",
            "hung-copy-is-killed-and-named",
        ),
        seconds=240,
        **TWO,
    ),
    Item("ranks", PROVEN, ("absent-rank-is-named", "stopped-rank-is-ended"), seconds=240, **TWO),
    Item("others", PROVEN, ("used-gpus-are-left-alone", "ctrl-c-leaves-nothing"), seconds=120, **TWO),
]

if __name__ == "__main__":
    sys.exit(run(__doc__, ITEMS, engine=False))
