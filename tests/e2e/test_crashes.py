"""A crash is told at once: the diagnosis is the last thing printed, and the gate fails with it.

The bounds are wide, for machines with other work; `tests/bench/crash.py` prints the figures.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from crashes import ENGINE_CORE, WORKER, Crashes, Told, crashing

if TYPE_CHECKING:
    from collections.abc import Iterator

    from service import Service

TOLD_WITHIN = 10.0  # seconds


@pytest.fixture(scope="module")
def crashes(running: Service, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crashes]:
    with crashing(running, tmp_path_factory.mktemp("crashes")) as crashes:
        yield crashes


def check(told: Told, phase: str, kind: str) -> None:
    diagnosis = told.status["diagnosis"]
    assert (told.status["phase"], diagnosis["kind"]) == (phase, kind), told.status
    assert diagnosis["title"] in told.after[0]
    assert diagnosis["remedy"].split()[0] in "\n".join(told.after)
    check_times(told, diagnosis["title"])
    # Whoever looks at the end of the log sees it.
    assert not [line for line in told.after if line.startswith(("(APIServer", "(EngineCore", "(Worker", "Traceback"))]


def check_times(told: Told, why: str) -> None:
    assert 0 <= told.printed < TOLD_WITHIN
    assert 0 <= told.gate < TOLD_WITHIN
    assert told.gate_exit == 1, told.gate_said
    assert why in told.gate_said


def test_a_missing_drafter_is_told_and_held(crashes: Crashes) -> None:
    told = crashes.missing_drafter()
    assert (told.status["phase"], told.status["engine"]["starts"]) == ("held", 0), "it needs no engine to be seen"
    check_times(told, "drafter /data/models/no-such-drafter does not exist")


def test_a_drafter_that_only_vllm_can_miss_is_told_and_held(crashes: Crashes) -> None:
    check(crashes.missing_repository(), "held", "configuration")


def test_a_port_clash_is_told_and_held(crashes: Crashes) -> None:
    told = crashes.port_clash()
    check(told, "held", "configuration")
    assert told.status["diagnosis"]["signature"] == "port-taken"


@pytest.mark.parametrize("pattern", [WORKER, ENGINE_CORE])
def test_a_killed_process_is_told_by_name_and_tried_again(crashes: Crashes, pattern: str) -> None:
    told = crashes.killed(pattern)
    check(told, "failed", "killed")
    assert told.status["next_start"]


def test_an_oom_kill_is_told_as_one(crashes: Crashes) -> None:
    check(crashes.out_of_memory(), "failed", "memory")
