"""Children that may hang: what they say is heard, and none is left behind."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from aerie.fabric.children import Program, started

STARTS_ANOTHER = """
import subprocess
other = subprocess.Popen(["sleep", "60"])
tell(pid=os.getpid(), other=other.pid)
time.sleep(60)
"""


def test_messages_come_in_order_and_then_the_end(stand_in, environment):
    with started(
        [Program("one", stand_in("tell(step='a'); print('a warning'); tell(step='b')"), environment)]
    ) as children:
        heard = [children.next(20) for _ in range(3)]
        assert [each.message for each in heard] == [{"step": "a"}, {"step": "b"}, None]
        assert children.failed_how(0) is None


def test_nothing_is_heard_of_one_that_hangs(stand_in, environment):
    with started([Program("one", stand_in("time.sleep(60)"), environment)]) as children:
        began = time.monotonic()
        assert children.next(0.3) is None
        assert time.monotonic() - began < 5


@pytest.mark.parametrize(
    ("body", "how"),
    [
        ("print('first'); print('Xid 31'); sys.exit(3)", "it ended with 3: Xid 31"),
        ("raise RuntimeError('CUDA error')", "it ended with 1: RuntimeError: CUDA error"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "signal 11 ended it"),
    ],
)
def test_the_end_is_told_with_what_was_printed_last(stand_in, environment, body, how):
    with started([Program("one", stand_in(body), environment)]) as children:
        assert children.next(20).message is None
        assert children.failed_how(0) == how


def test_what_children_started_ends_with_them(stand_in, environment, gone):
    with started([Program("one", stand_in(STARTS_ANOTHER), environment)]) as children:
        pids = children.next(20).message
    assert gone(pids["pid"])
    assert gone(pids["other"])
    assert children.survivors == []


def test_a_stopped_child_is_ended_too(stand_in, environment, gone):
    with started([Program("one", stand_in("tell(pid=os.getpid()); time.sleep(60)"), environment)]) as children:
        pid = children.next(20).message["pid"]
        os.kill(pid, signal.SIGSTOP)
    assert gone(pid)


def test_one_that_cannot_be_started_leaves_the_others_ended(stand_in, environment, gone, tmp_path):
    body = f"open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    programs = [Program("one", stand_in(body), environment), Program("two", ["/nowhere/program"], environment)]
    with pytest.raises(FileNotFoundError), started(programs):
        pytest.fail("they run")
    pid = tmp_path / "pid"
    assert not pid.exists() or gone(int(pid.read_text()))


def test_a_parent_that_is_killed_takes_its_children_with_it(stand_in, environment, gone, tmp_path):
    command = stand_in("tell(pid=os.getpid()); time.sleep(60)")
    parent = f"""
import json, sys, time
from aerie.fabric.children import Program, started
with started([Program("one", {command!r}, {environment!r})]) as children:
    print(json.dumps(children.next(20).message), flush=True)
    time.sleep(60)
"""
    process = subprocess.Popen([sys.executable, "-c", parent], env=environment, stdout=subprocess.PIPE, text=True)
    try:
        pid = json.loads(process.stdout.readline())["pid"]
    finally:
        process.kill()
        process.communicate()
    assert gone(pid)
