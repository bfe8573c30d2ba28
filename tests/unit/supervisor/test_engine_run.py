"""One engine's run, in this process: what its watchers see, and what is made of it."""

import asyncio
import json
import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from aerie.diagnosis import Kind
from aerie.diagnosis.evidence import parse_kernel
from aerie.supervisor import evidence, processes, readiness, run, sampling, tree
from aerie.supervisor.arguments import read
from aerie.supervisor.crash import exit_code
from aerie.supervisor.json_file import JsonFile
from aerie.supervisor.liveness import Dead, Hung
from aerie.supervisor.processes import Reaper
from aerie.supervisor.run import EngineRun, StopSignals
from aerie.supervisor.state import Answered, Progressed, Refused
from aerie.supervisor.tree import descendants

STUB = Path(__file__).with_name("engine_stub.py")
GIVEN = ["org/model", "--port", "1"]
PATIENCE = 120.0  # seconds until a test gives up; none waits that long but to fail


async def until(condition):
    async with asyncio.timeout(PATIENCE):
        while not condition():
            await asyncio.sleep(0.02)


@pytest.fixture
def engine(tmp_path, monkeypatch):
    """Return a function that runs the stand-in until it ends, a watcher saw something, or it is asked to stop.

    It returns (run, ending, events).
    """
    (tmp_path / "vllm").symlink_to(STUB)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(Path(run.__file__).parents[2]))
    events = []

    def go(seen=None, *, meanwhile=None, listens=True, drain=0, stall=900, gpus=(), **stub):
        """`meanwhile` is awaited once the stand-in runs; a stop is asked for when it has returned True."""
        monkeypatch.setenv("STUB", json.dumps({"hang": True, "drain": 600} | stub))

        async def watch(_arguments, _keys, _stall_timeout, _pid, dispatch):
            if listens:
                dispatch(Answered())
            return seen or await asyncio.Event().wait()

        async def main():
            signals = StopSignals(asyncio.Event(), asyncio.Event())
            history = JsonFile(tmp_path / "starts.json", "")
            one = EngineRun(read(GIVEN, {}), tmp_path, drain, stall, history, events.append, gpus)
            running = asyncio.create_task(one.until_it_ends(GIVEN, Reaper(), signals))
            if meanwhile:
                await until((tmp_path / "runs").exists)
                if await meanwhile():
                    signals.stop.set()
            ending = await asyncio.wait_for(running, PATIENCE)
            await one.ended()
            await asyncio.wait_for(one._process.ended, PATIENCE)
            return one, ending

        monkeypatch.setattr(readiness, "watch", watch)
        return *asyncio.run(main()), events

    go.events = events
    return go


def test_an_engine_that_hangs_is_ended_and_diagnosed_with_what_its_processes_did(engine):
    stopped = "VLLM::Worker_TP1 (pid 9) is stopped (state T)"
    one, ending, events = engine(Hung("the engine hangs: no step for 100 s", (stopped,)))
    assert (ending.words, ending.status) == ("the engine hangs: no step for 100 s", None)
    assert Refused("the engine hangs: no step for 100 s") in events
    diagnosis = one.diagnose(ending)
    assert diagnosis.kind is Kind.HUNG
    assert any(stopped in line for line in diagnosis.evidence)


def test_an_engine_whose_api_server_outlives_it_is_ended(engine):
    one, ending, _ = engine(Dead("/health answered 503"))
    assert ending.words == "the engine is dead, and its API server stays: /health answered 503"
    assert one.diagnose(ending).kind is not Kind.HUNG


def test_a_kill_for_want_of_memory_is_no_other_kill(engine, monkeypatch):
    class Cgroup:
        counted = iter((2, 3))

        def oom_kills(self):
            return next(self.counted)

        def limit(self):
            return 24 * 2**30

    monkeypatch.setattr(evidence, "MemoryCgroup", Cgroup)
    one, ending, _ = engine(signal=signal.SIGKILL)
    assert (ending.words, ending.status) == ("vllm serve was killed by SIGKILL", -signal.SIGKILL)
    diagnosis = one.diagnose(ending)
    assert diagnosis.kind is Kind.MEMORY
    assert any("killed 1 of its processes; its limit is 24.0 GiB" in line for line in diagnosis.evidence)


XID = "2026-11-29T13:34:58+00:00 host kernel: NVRM: Xid (PCI:0000:{}:00): 79, pid=9, GPU has fallen off the bus.\n"


@pytest.mark.parametrize(("bus", "kind"), [("41", Kind.HARDWARE), ("42", Kind.CRASH)])
def test_what_befell_a_gpu_of_others_explains_nothing(engine, monkeypatch, bus, kind):
    seen = [replace(one, at=None) for one in parse_kernel(XID.format(bus))]
    monkeypatch.setattr(evidence, "outside", lambda *_: seen)
    one, ending, _ = engine(hang=False, exit=1, gpus=("00000000:41:00.0",))
    diagnosis = one.diagnose(ending)
    assert (diagnosis.kind, len(diagnosis.evidence)) == (kind, kind is Kind.HARDWARE)


KILLED = "Memory cgroup out of memory: Killed process 9 (VLLM::Worker_TP) total-vm:1kB"


@pytest.mark.parametrize(("seconds", "kind"), [(0, Kind.MEMORY), (-30, Kind.KILLED)])
def test_a_kill_before_the_engine_was_started_explains_nothing(engine, monkeypatch, seconds, kind):
    monkeypatch.setattr(
        evidence, "outside", lambda _kills, at, _cgroup: [replace(one, at=at + seconds) for one in parse_kernel(KILLED)]
    )
    one, ending, _ = engine(signal=signal.SIGKILL)
    assert one.diagnose(ending).kind is kind


def test_a_driver_that_does_not_answer_stalls_a_start(engine, monkeypatch):
    answers = threading.Event()
    monkeypatch.setattr(sampling, "sample", lambda _pid: answers.wait(PATIENCE))
    monkeypatch.setattr(run, "_SAMPLED_WITHIN", 0.05)
    _, ending, _ = engine(stall=0.2, listens=False)
    answers.set()
    assert ending.kind is Kind.HUNG


def test_an_engine_that_answers_and_fails_the_check_is_no_stall(engine, monkeypatch):
    """Loading it again would not mend it; what hangs from there on is the judge's to say."""
    monkeypatch.setattr(run, "_TEARDOWN", 0.1)

    def is_stalled():
        return any(isinstance(event, Progressed) and event.start["stalled"] for event in engine.events)

    async def stalled():
        await until(is_stalled)
        return True

    _, ending, _ = engine(meanwhile=stalled, stall=0.2)
    assert ending.asked
    assert is_stalled()


async def stop():
    return True


def test_a_drain_ends_at_its_limit(engine, monkeypatch):
    monkeypatch.setattr(run, "_TEARDOWN", 0.1)
    begun = time.monotonic()
    _, ending, _ = engine(meanwhile=stop, drain=1)
    assert (ending.asked, ending.status) == (True, None)
    assert 1.1 <= time.monotonic() - begun < 300, "and not after the ten minutes that the drain takes"


def test_an_engine_that_loads_and_is_deaf_is_waited_for_a_moment_only(engine, monkeypatch):
    monkeypatch.setattr(run, "_LOADING_GRACE", 0.1)
    _, ending, _ = engine(meanwhile=stop, drain=600, listens=False, deaf=True, core=True)
    assert (ending.asked, ending.status) == (True, None)
    assert descendants(os.getpid()) == set()


@pytest.mark.parametrize("title", ["VLLM::EngineCore", "VLLM::Worker_TP1"])
def test_a_vital_process_that_dies_ends_an_engine_whose_api_server_lives_on(engine, monkeypatch, title):
    seen = []

    def vital_below(root):
        seen.extend(found := tree.vital_below(root))
        return found

    async def kill():
        await until(lambda: seen)
        os.kill(seen[0].pid, signal.SIGKILL)

    monkeypatch.setattr(processes, "_DISCOVER", 0.05)
    monkeypatch.setattr(processes, "vital_below", vital_below)
    one, ending, _ = engine(meanwhile=kill, vital=title)
    assert (ending.words, ending.status) == (f"{title} (pid {seen[0].pid}) died", None)
    assert one.diagnose(ending).kind is Kind.KILLED


@pytest.mark.parametrize(("stub", "code"), [
    ({"exit": 0}, 5),
    ({"says": "vllm: error: unrecognized arguments: --x", "exit": 2}, 2),
    ({"says": "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", "exit": 1}, 3),
    ({"says": "RuntimeError: CUDA error: unspecified launch failure", "exit": 1}, 4),
    ({"says": "ZeroDivisionError: nobody has seen this one", "exit": 1}, 5),
    ({"signal": signal.SIGKILL}, 137),
    ({"signal": signal.SIGSEGV}, 5),
])  # fmt: skip
def test_an_end_has_the_exit_code_of_its_sort(engine, stub, code):
    one, ending, _ = engine(hang=False, **stub)
    assert exit_code(one.diagnose(ending), ending.status, served=one.served) == code


def test_a_start_that_stalls_and_an_engine_that_hangs_have_signatures_of_their_own(engine):
    one, ending, _ = engine(stall=0.2, listens=False)
    assert (ending.kind, one.diagnose(ending).signature) == (Kind.HUNG, "start-stalled")
    one, ending, _ = engine(Hung("the engine hangs: no step for 100 s; requests running: 1", ()))
    assert one.diagnose(ending).signature == "engine-hangs"
