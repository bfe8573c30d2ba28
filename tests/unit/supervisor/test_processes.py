"""Processes below this one: found, and ended to the last."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time

import pytest

from aerie.supervisor.processes import descendants, kill_descendants


@pytest.fixture
def tree():
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


def test_the_whole_tree_is_found_whatever_its_sessions_and_names(tree):
    child, grandchild = tree
    assert {child.pid, grandchild} <= descendants()


def test_the_dead_are_not_counted():
    child = subprocess.Popen(["true"])
    time.sleep(0.3)
    assert child.pid not in descendants()
    child.wait()


def test_the_whole_tree_is_killed_before_it_returns(tree):
    asyncio.run(asyncio.wait_for(kill_descendants(), 10))
    assert descendants() == set()
    assert tree[0].wait() == -signal.SIGKILL
