"""One engine's run, in this process: what its watchers see, and what is made of it."""

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest

from aerie.diagnosis import Kind
from aerie.supervisor import evidence, readiness, run
from aerie.supervisor.arguments import read
from aerie.supervisor.json_file import JsonFile
from aerie.supervisor.liveness import Dead, Hung
from aerie.supervisor.processes import Reaper
from aerie.supervisor.run import EngineRun, StopSignals
from aerie.supervisor.state import Answered, Refused

STUB = Path(__file__).with_name("engine_stub.py")
GIVEN = ["org/model", "--port", "1"]


@pytest.fixture
def engine(tmp_path, monkeypatch):
    """Return a function that runs the stand-in until it ends, a watcher saw something, or it is asked to stop.

    It returns (run, ending, events).
    """
    (tmp_path / "vllm").symlink_to(STUB)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(Path(run.__file__).parents[2]))
    monkeypatch.setenv("STUB", '{"hang": true, "drain": 600}')
    events = []
    started = (tmp_path / "argv.json").exists  # by then the stand-in handles SIGTERM

    def go(seen=None, *, stop=False):
        async def watch(_arguments, _keys, _pid, dispatch):
            dispatch(Answered())
            return seen or await asyncio.Event().wait()

        async def main():
            signals = StopSignals(asyncio.Event(), asyncio.Event())
            one = EngineRun(read(GIVEN, {}), tmp_path, 0, 900, JsonFile(tmp_path / "starts.json", ""), events.append)
            running = asyncio.create_task(one.until_it_ends(GIVEN, Reaper(), signals))
            while stop and not started():
                await asyncio.sleep(0.05)
            if stop:
                signals.stop.set()
            ending = await asyncio.wait_for(running, 30)
            await one.ended()
            await asyncio.wait_for(one._process.ended, 10)
            return one, ending

        monkeypatch.setattr(readiness, "watch", watch)
        return *asyncio.run(main()), events

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

    monkeypatch.setenv("STUB", f'{{"signal": {signal.SIGKILL:d}}}')
    monkeypatch.setattr(evidence, "MemoryCgroup", Cgroup)
    one, ending, _ = engine()
    assert (ending.words, ending.status) == ("vllm serve was killed by SIGKILL", -signal.SIGKILL)
    diagnosis = one.diagnose(ending)
    assert diagnosis.kind is Kind.MEMORY
    assert any("killed 1 of its processes; its limit is 24.0 GiB" in line for line in diagnosis.evidence)


def test_a_drain_ends_at_its_limit(engine, monkeypatch):
    monkeypatch.setattr(run, "_TEARDOWN", 0.5)
    begun = time.monotonic()
    _, ending, _ = engine(stop=True)
    assert (ending.asked, ending.status) == (True, None)
    assert 0.5 <= time.monotonic() - begun < 30, "and not after the ten minutes that the drain takes"
