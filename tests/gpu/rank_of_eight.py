"""Measures what a tensor-parallel rank of eight takes of a GPU beside its weights, on one GPU: for the memory plan.

Usage: python tests/gpu/rank_of_eight.py RESULT LAYERS

The published pair with an eighth of its heads and of its MLPs' widths computes with a rank's shapes; the vocabulary is
whole, as logits are on every rank. It is rehearsed with the shipped arguments, the decoding of sm_120 and so many
layers: two numbers of them tell what grows with depth, which the plan extrapolates to the model's 61. NCCL has no part.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from supervising import REPOSITORY, with_vllm

MODELS = REPOSITORY / "tests/models"
RANKS = 8
SPLIT = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "moe_intermediate_size")
# The depth is a constant of the rehearsal; everything else is the command's.
PROGRAM = """
import sys
from aerie.checkpoint import shrink
from aerie.cli import main
shrink.LEAST_LAYERS = int(sys.argv.pop(1))
sys.exit(main())
"""
FIGURES = {
    "loaded": r"Model loading took ([\d.]+) GiB",
    "graphs_actual": r"CUDA graph pool memory: ([\d.]+) GiB \(actual\)",
    "graphs_estimated": r"CUDA graph pool memory: .*, ([\d.]+) GiB \(estimated\)",
    "free_at_start": r"Free memory on device \(([\d.]+)/",
    "consumed": r"Actual usage is ([\d.]+) GiB for consumed memory",
    "peak_activations": r"([\d.]+) GiB for peak activation",
    "kv_cache": r"Available KV cache memory: ([\d.]+) GiB",
}
"""In GiB."""


def rank_of(source: Path, place: Path) -> Path:
    """Write the configuration of an eighth of a published model."""
    config = json.loads((source / "config.json").read_text())
    part = config.get("text_config", config)
    part |= {name: max(1, part[name] // RANKS) for name in SPLIT if name in part}
    place.mkdir(parents=True)
    for file in source.iterdir():
        (place / file.name).write_bytes(file.read_bytes())
    (place / "config.json").write_text(json.dumps(config))
    return place


def measure(layers: int) -> dict[str, Any]:
    """Return the figures of one start."""
    # The generation stands in the directories' names.
    with tempfile.TemporaryDirectory(prefix="aerie-rank-", ignore_cleanup_errors=True) as scratch:
        folder = Path(scratch)
        target = rank_of(MODELS / "moonshotai--Kimi-K2.5", folder / "moonshotai--Kimi-K2.5")
        drafter = rank_of(MODELS / "lightseekorg--kimi-k2.5-eagle3-mla", folder / "lightseekorg--kimi-k2.5-eagle3-mla")
        code = subprocess.run(
            [
                *(sys.executable, "-c", PROGRAM, str(layers), "rehearse", "--target", str(target)),
                *("--drafter", str(drafter), "--without-weights", "--accept", "memory", "--cache-dir", str(folder)),
                *("--work-dir", str(folder / "work"), "--", "--config", str(REPOSITORY / "config/kimi-k2.5.yaml")),
                *("--tensor-parallel-size", "1", "--attention-backend", "TRITON_MLA"),
            ],
            env=with_vllm(folder, {}),
            stdin=subprocess.DEVNULL,
            check=False,
        ).returncode
        log = (folder / "work/engine.log").read_text(errors="replace")
    found = {name: re.findall(pattern, log) for name, pattern in FIGURES.items()}
    return {"layers": layers, "exit": code} | {name: float(each[-1]) for name, each in found.items() if each}


if __name__ == "__main__":
    measured = measure(int(sys.argv[2]))
    Path(sys.argv[1]).write_text(json.dumps(measured))
    print(json.dumps(measured))
    sys.exit(measured["exit"])
