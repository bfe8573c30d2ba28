"""Processes below this one: found, seen to die, and ended to the last; what the leash adds to that."""

import asyncio
import contextlib
import itertools
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from aerie.supervisor import leash, tree
from aerie.supervisor.processes import Engine, Look, Reaper, kill_below, off_loop, vital_death
from aerie.supervisor.tree import descendants, vital_below

PATIENCE = 120.0  # seconds until a test gives up; none waits that long but to fail


@pytest.fixture
def tree_of_two():
    """Yield (child, grandchild) that ignore SIGTERM; the child's name looks like the end of its /proc entry."""
    script = (
        "import signal, subprocess, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        "open('/proc/self/comm', 'w').write('a) S 1 (b');"
        "below = subprocess.Popen(['sleep', '600'], start_new_session=True);"
        "print(below.pid, flush=True); below.wait()"
    )
    child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    grandchild = int(child.stdout.readline())
    yield child, grandchild
    child.stdout.close()
    with contextlib.suppress(ProcessLookupError):
        os.kill(grandchild, signal.SIGKILL)
    child.kill()
    child.wait()


def test_the_whole_tree_is_found_whatever_its_sessions_and_names(tree_of_two):
    child, grandchild = tree_of_two
    assert {child.pid, grandchild} <= descendants(os.getpid())
    assert grandchild in descendants(child.pid)
    assert child.pid not in descendants(child.pid)


def test_the_dead_are_not_counted():
    child = subprocess.Popen(["true"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it is a zombie, and stays one
    assert child.pid not in descendants(os.getpid())
    child.wait()


def test_the_whole_tree_is_killed_before_it_returns(tree_of_two):
    assert asyncio.run(kill_below(os.getpid(), PATIENCE)) == []
    assert descendants(os.getpid()) == set()
    assert tree_of_two[0].wait() == -signal.SIGKILL


def test_what_survives_is_told_with_what_it_waits_for(tree_of_two, monkeypatch):
    # No kernel can be asked for a process that SIGKILL does not end; one that never gets it looks the same.
    monkeypatch.setattr("aerie.supervisor.processes.kill", lambda _pids: None)
    survivors = asyncio.run(kill_below(os.getpid(), limit=0.2))
    assert {survivor.pid for survivor in survivors} == {tree_of_two[0].pid, tree_of_two[1]}
    below = next(survivor for survivor in survivors if survivor.pid == tree_of_two[1])
    assert (below.name, below.state) == ("sleep", "S")
    assert f"sleep (pid {below.pid}, state S, waits in {below.waits_in})" == str(below)


def test_a_survivor_whose_title_is_locked_is_told_without(tree_of_two, monkeypatch):
    unlocked = threading.Event()
    monkeypatch.setattr("aerie.supervisor.processes.kill", lambda _pids: None)
    monkeypatch.setattr("aerie.supervisor.tree.title", lambda _pid: "late" if unlocked.wait(10) else "later")
    survivors = asyncio.run(kill_below(os.getpid(), limit=0.1))
    unlocked.set()
    assert [survivor.name for survivor in survivors] == ["a process", "a process"]


def titled(title):
    """Start a process that calls itself so, as setproctitle does for vLLM's."""
    return subprocess.Popen([title, "600"], executable="/bin/sleep")


def test_a_look_that_does_not_return_is_waited_for_again_and_not_begun_anew():
    answers, begun = threading.Event(), []

    def look(what):
        begun.append(what)
        answers.wait(PATIENCE)
        return what

    async def take():
        one = Look(look, "seen")
        assert await one.take(0.1) is None
        assert await one.take(0.1) is None
        answers.set()
        assert await one.take(PATIENCE) == "seen"
        assert begun == ["seen"]
        assert await one.take(PATIENCE) == "seen"
        assert begun == ["seen", "seen"]

    asyncio.run(take())


def test_a_look_that_fails_says_so():
    with pytest.raises(ZeroDivisionError):
        asyncio.run(Look(lambda: 1 / 0).take(PATIENCE))


def test_a_death_is_seen_while_a_look_for_others_does_not_return(monkeypatch):
    hangs, answers = threading.Event(), threading.Event()
    looks = []

    def vital_below(root):
        if looks:
            hangs.set()
            answers.wait(PATIENCE)
        looks.append(root)
        return tree.vital_below(root)

    async def watch():
        vital = titled("VLLM::Worker_TP1")
        monkeypatch.setattr("aerie.supervisor.processes.vital_below", vital_below)
        monkeypatch.setattr("aerie.supervisor.processes._DISCOVER", 0.1)
        seen = asyncio.create_task(vital_death(os.getpid()))
        await asyncio.to_thread(hangs.wait, PATIENCE)
        vital.kill()
        died = await asyncio.wait_for(seen, PATIENCE / 2)
        assert len(looks) == 1
        answers.set()
        vital.wait()
        return died

    assert asyncio.run(watch()).title == "VLLM::Worker_TP1"


@pytest.mark.parametrize("title", ["VLLM::EngineCore", "VLLM::Worker_TP1"])
def test_the_death_of_a_vital_process_is_seen_and_no_other_one(monkeypatch, title):
    known = threading.Event()

    def vital_below(root):
        found = tree.vital_below(root)
        known.set()
        return found

    async def watch():
        other, vital = titled("VLLM::APIServer_0"), titled(title)
        monkeypatch.setattr("aerie.supervisor.processes.vital_below", vital_below)
        seen = asyncio.create_task(vital_death(os.getpid()))
        await asyncio.to_thread(known.wait, PATIENCE)
        other.kill()
        other.wait()
        await asyncio.sleep(0.4)  # longer than between two looks
        assert not seen.done(), "an API server that ends is seen by its exit"
        vital.kill()  # and not collected: a zombie
        died = await asyncio.wait_for(seen, PATIENCE)
        vital.wait()
        return vital.pid, died

    pid, died = asyncio.run(watch())
    assert (died.title, died.pid) == (title, pid)


def test_what_never_answers_keeps_nobody_from_ending():
    script = (
        "import asyncio, threading\nfrom aerie.supervisor.processes import off_loop\n"
        "async def main():\n"
        "    try: await asyncio.wait_for(off_loop(threading.Event().wait), 0.1)\n"
        "    except TimeoutError: print('given up')\n"
        "asyncio.run(main())"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, timeout=PATIENCE, check=True
    )
    assert ran.stdout == b"given up\n"


def test_what_fails_off_the_loop_fails_where_it_is_awaited():
    def fail():
        raise ValueError("x")

    with pytest.raises(ValueError, match="x"):
        asyncio.run(off_loop(fail))


def run_leashed(*command, beside=None):
    """Run a command on the leash, and a coroutine beside it; return its pid, its status, and what it wrote."""

    async def run():
        reaper, written = Reaper(), []
        task = asyncio.create_task(beside(written)) if beside else None
        engine = await Engine.start(
            command, dict(os.environ) | {"PYTHONPATH": os.pathsep.join(sys.path)}, reaper, written.append
        )
        status = await asyncio.wait_for(engine.ended, PATIENCE)
        await asyncio.wait_for(engine.copied.wait(), PATIENCE)
        if task:
            await task
        return engine.pid, status, b"".join(written)

    return asyncio.run(run())


@pytest.mark.parametrize("status", [0, 3, -signal.SIGKILL, -signal.SIGSEGV, -signal.SIGTERM])
def test_on_the_leash_an_engine_ends_as_it_would_without(status):
    end = f"kill -{-status} $$" if status < 0 else f"exit {status}"
    pid, seen, written = run_leashed("sh", "-c", f"echo $$; {end}")
    assert (seen, written) == (status, f"{pid}\n".encode())


def test_on_the_leash_nothing_of_ours_is_blocked_or_ignored():
    show = ("grep", "-E", "^Sig(Blk|Ign)", "/proc/self/status")
    _, _, written = run_leashed(*show)
    blocked, ignored = (int(mask, 16) for mask in written.split()[1::2])
    # What these tests were started with, such as nohup's SIGHUP, is the caller's will.
    outside = int(subprocess.run(show, capture_output=True, check=True).stdout.split()[-1], 16)
    assert (blocked, (ignored ^ outside) & 0x7FFFFFFF) == (0, 0), "the C library ignores 32 and 33 itself"


def test_on_the_leash_nothing_of_ours_stays_open():
    _, _, written = run_leashed("ls", "/proc/self/fd")
    assert written.split() == [b"0", b"1", b"2", b"3"], "its own three, and the directory that it lists"


def test_a_flood_of_output_leaves_the_loop_to_others(monkeypatch):
    turns, size = [], 1_000_000
    show = Engine._show

    def slowly(engine, chunk):
        turns.append("piece")
        time.sleep(0.02)  # in which the next pieces come
        show(engine, chunk)

    async def look(written):
        while sum(map(len, written)) < size:
            turns.append("others")
            await asyncio.sleep(0)

    monkeypatch.setattr(Engine, "_show", slowly)
    run_leashed("head", "-c", str(size), "/dev/zero", beside=look)
    assert turns.count("piece") > 5
    assert ("piece", "piece") not in itertools.pairwise(turns)


def test_what_cannot_be_started_is_told():
    with pytest.raises(OSError, match="No such file or directory"):
        run_leashed("/no/such/program")


def test_a_leash_whose_holder_is_gone_starts_nothing(tmp_path):
    command = [sys.executable, "-m", leash.__name__, "1", "2", "touch", str(tmp_path / "started")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run(command, env=environment, timeout=PATIENCE, check=False).returncode == 128 + signal.SIGKILL
    assert not (tmp_path / "started").exists()


def test_what_a_worker_forks_is_no_worker():
    """inductor's compilers begin as a copy of the worker, title and all; their end is no end of the engine."""
    source = "import os, time; os.fork(); os.write(1, b'1\\n'); time.sleep(600)"
    worker = subprocess.Popen(["VLLM::Worker_TP7", "-c", source], executable=sys.executable, stdout=subprocess.PIPE)
    try:
        assert worker.stdout.readline() == b"1\n"
        assert worker.stdout.readline() == b"1\n"
        assert len(descendants(worker.pid)) == 1
        assert [each.pid for each in vital_below(os.getpid()) if each.title == "VLLM::Worker_TP7"] == [worker.pid]
    finally:
        for pid in (*descendants(worker.pid), worker.pid):
            os.kill(pid, signal.SIGKILL)
        worker.wait()
        worker.stdout.close()
