"""What measures vLLM's loaders: its plans, what it knows of the page cache, its table and its checkpoints' sizes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[1] / "bench"
sys.path[:0] = [str(BENCH), str(BENCH / "weights")]

pytest.importorskip("numpy")

import checkpoint  # noqa: E402
import page_cache  # noqa: E402
import plan  # noqa: E402
import plot_loaders  # noqa: E402

from aerie.checkpoint.files import read_weights  # noqa: E402


@pytest.mark.parametrize("name", sorted(plan.PLANS))
def test_each_run_has_a_key_of_its_own_and_the_disk_comes_first(name):
    runs = plan.PLANS[name].runs
    assert len({run.key for run in runs}) == len(runs)
    assert runs[0].loader == plan.DISK
    assert runs == plan.PLANS[name].runs, "a run that goes on must have the same order"


def test_a_file_is_in_the_page_cache_after_it_was_filled_and_not_after_it_was_evicted(tmp_path):
    file = tmp_path / "file"
    file.write_bytes(bytes(3_000_000))
    assert page_cache.fill([file]) == 3_000_000
    left = page_cache.evict([file])
    if left == 3_000_000:
        pytest.skip("nothing can be evicted from this file system, tmpfs perhaps")
    assert page_cache.resident([file]) == 0


@pytest.mark.parametrize("int4", [False, True])
def test_a_checkpoint_has_about_the_wanted_size_and_every_tensor(tmp_path, int4):
    wanted = 45_000_000
    widths = checkpoint.TINY._replace(hidden=256, expert=128, layers=3)
    size, tensors = checkpoint.write_weights(tmp_path, wanted, widths, int4=int4)
    weights = read_weights(tmp_path)
    assert not weights.faults
    assert (weights.size, len(weights.tensors)) == (size, tensors)
    assert abs(size - wanted) < 5_000_000
    assert any(name.endswith("weight_packed") for name in weights.tensors) == int4


def _run(loader, seconds, **others):
    rank = {"weights_seconds": seconds, "load_seconds": seconds + 1, "read_bytes": 4e9, "peak_rss": 5e9}
    return {
        "key": f"{loader}{seconds}", "set": "s", "ranks": 1, "loader": loader, "state": "cold", "bytes": 4_000_000_000,
        "seconds": seconds + 1, "ranks_measured": [rank], **others,
    }  # fmt: skip


def test_the_table_compares_with_the_disk_and_with_the_default():
    disk = _run("disk", 2.0) | {"ranks": 0, "ranks_measured": [], "seconds": 2.0}
    runs = [disk, _run("lazy", 8.0), _run("warm first", 2.0, warm_seconds=2.0), _run("runai", 1.0, error="no module")]
    content = {
        "about": {
            "cpu": "2 x a", "memory": 24, "gpus": [], "kernel": "6", "versions": {},
            "began": "2026-12-01T", "commit": "c",
        },
        "sets": {"s": {"bytes": 4_000_000_000, "tensors": 9, "shards": 2, "int4": False}},
        "runs": json.loads(json.dumps(runs)),
    }  # fmt: skip
    lines = plot_loaders.table(content).splitlines()
    first = next(line for line in lines if "| warm first |" in line)
    assert "| 1.00 | 1.00 to 1.00 | 50% | 2.00 |" in first
    assert "failed: no module" in next(line for line in lines if "| runai |" in line)
