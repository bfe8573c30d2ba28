"""What has to be gone before another engine may start."""

import asyncio
import subprocess
import threading

import pytest

from aerie.diagnosis import Collector, Kind
from aerie.supervisor import gpus
from aerie.supervisor.release import held_back

GIB = 2**30


@pytest.fixture
def used(monkeypatch):
    """Stand in for the GPUs' memory in use, one reading after the other; the last one stays."""
    readings = []
    monkeypatch.setattr(gpus, "used_bytes", lambda: readings.pop(0) if len(readings) > 1 else readings[0])
    return readings


def test_without_gpus_nothing_is_waited_for():
    assert asyncio.run(held_back(())) == []


def test_memory_that_comes_back_in_time_is_waited_for(used):
    used += [(1 * GIB, 80 * GIB), (1 * GIB, 40 * GIB), (1 * GIB, 1 * GIB)]
    assert asyncio.run(held_back((GIB, GIB), released_within=20)) == []
    assert len(used) == 1, "every reading was looked at"


def test_memory_that_does_not_come_back_is_told_by_gpu(used):
    used += [(1 * GIB, 80 * GIB)]
    (evidence,) = asyncio.run(held_back((GIB, GIB), released_within=0))
    assert evidence.text.startswith("GPU 1: 81920 MiB are in use 0 s after the last process of the engine ended")
    assert evidence.text.endswith(" 1024")
    assert evidence.kind is Kind.HARDWARE


def test_a_driver_that_does_not_answer_is_told(monkeypatch):
    answers = threading.Event()
    monkeypatch.setattr(gpus, "used_bytes", lambda: answers.wait(120))
    (evidence,) = asyncio.run(held_back((GIB,), released_within=0))
    answers.set()
    assert evidence.text == "the GPUs' driver does not answer, 0 s after the last process of the engine ended"
    assert evidence.kind is Kind.HARDWARE


def test_a_process_that_survives_is_told_as_a_stuck_driver(monkeypatch):
    monkeypatch.setattr("aerie.supervisor.processes.kill", lambda _pids: None)
    child = subprocess.Popen(["sleep", "60"])
    try:
        (evidence,) = asyncio.run(held_back((), survives=0.2))
    finally:
        child.kill()
        child.wait()
    assert evidence.text.startswith(f"sleep (pid {child.pid}, state S, waits in ")
    assert evidence.text.endswith(" survives SIGKILL for 0 s")
    diagnosis = Collector().diagnose("VLLM::Worker_TP1 (pid 9) died", [evidence])
    assert diagnosis.kind is Kind.HARDWARE
    assert any("survives SIGKILL" in line for line in diagnosis.evidence)
