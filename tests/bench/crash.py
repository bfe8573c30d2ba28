"""Print how long it takes from a crash until its diagnosis is printed and `aerie wait` has failed.

    .venv/bin/python tests/bench/crash.py        # after `./run up`, as root; two minutes where nothing else runs

Each crash is real, in a container of the same image and files as the running service. `tests/e2e/test_crashes.py`
asserts what is told; this says how fast. Docker's own time is in the gate's: `docker exec` ends after `aerie wait`.
The story's three errors have their figures in `./run test-patches -s -k told`.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "e2e"))

from crashes import ENGINE_CORE, WORKER, crashing
from service import deployed


def main() -> None:
    """Provoke each crash once and print its row."""
    print("| crash | what was told | printed, s | gate failed, s |\n|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as folder, crashing(deployed(), Path(folder)) as crashes:
        for name, crash in {
            "drafter's directory missing": crashes.missing_drafter,
            "drafter's repository missing": crashes.missing_repository,
            "port taken": crashes.port_clash,
            "kill -9 of the worker": lambda: crashes.killed(WORKER),
            "kill -9 of the engine core": lambda: crashes.killed(ENGINE_CORE),
            "OOM kill": crashes.out_of_memory,
        }.items():
            told = crash()
            what = (told.status["diagnosis"] or {}).get("title") or told.status["reason"]
            print(f"| {name} | {what[:80]} | {told.printed:.2f} | {told.gate:.2f} |", flush=True)


if __name__ == "__main__":
    main()
