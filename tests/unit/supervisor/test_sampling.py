"""/proc as it is: real processes that work, idle and stop."""

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from aerie.supervisor import sampling, tree
from aerie.supervisor.sampling import sample
from aerie.supervisor.tree import waits_in

IDLE = "import time; time.sleep(60)"
# A parent whose title is vLLM's and whose child works: 256 MiB written page by page.
FAMILY = f"""
import subprocess, time
child = subprocess.Popen([{sys.executable!r}, "-c", "b = bytearray(256 << 20); print(len(b), flush=True); input()"],
                         stdin=subprocess.PIPE)
time.sleep(60)
"""


@contextmanager
def running(source, *, title=sys.executable):
    process = subprocess.Popen([title, "-c", source], executable=sys.executable, stdout=subprocess.PIPE)
    try:
        yield process
    finally:
        for each in sample(process.pid).processes:
            os.kill(each.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()


def until(condition, limit=120.0):
    deadline = time.monotonic() + limit
    while not (value := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return value


def test_a_tree_is_its_root_and_everything_below():
    with running(FAMILY, title="VLLM::Worker_TP3") as process:
        process.stdout.readline()
        root, child = sample(process.pid).processes
    assert (root.pid, root.name) == (process.pid, "VLLM::Worker_TP3")
    assert child.name.startswith("python")
    assert child.rss_bytes > 256 << 20
    assert child.rss_bytes > 2 * root.rss_bytes
    assert child.faults * os.sysconf("SC_PAGE_SIZE") > 8 << 20, (
        "huge pages fault once for 2 MiB, and this much at least"
    )
    assert child.cpu_seconds > 0


def test_bytes_from_storage_are_counted(tmp_path):
    file = tmp_path / "weights"
    file.write_bytes(os.urandom(4 << 20))
    source = f"""
import os, time
f = os.open({str(file)!r}, os.O_RDWR)
os.fsync(f)
os.posix_fadvise(f, 0, 0, os.POSIX_FADV_DONTNEED)
print(len(os.read(f, 4 << 20)), flush=True)
time.sleep(60)
"""
    with running(source) as process:
        process.stdout.readline()
        (read,) = sample(process.pid).processes
    if read.read_bytes == 0:
        pytest.skip("this file system keeps its files in memory")
    assert read.read_bytes >= 1 << 20, "the kernel may keep some of the pages that it was told to drop"


def test_an_idle_process_sleeps_and_a_stopped_one_is_stopped():
    with running(IDLE) as process:

        def idles():
            (before,) = sample(process.pid).processes
            time.sleep(0.1)
            return before.state == "S" and sample(process.pid).processes == (before,)

        until(idles)
        assert waits_in(process.pid) != "0"
        process.send_signal(signal.SIGSTOP)
        until(lambda: sample(process.pid).processes[0].state == "T")


def test_what_may_not_be_read_is_not_told(tmp_path, monkeypatch):
    """/proc mounted with hidepid, or a process of another user."""
    proc = Path("/proc") / str(os.getpid())
    (tmp_path / "7" / "stat").mkdir(parents=True)
    (tmp_path / "8").mkdir()
    (tmp_path / "8" / "stat").write_text((proc / "stat").read_text())
    for hidden in ("cmdline", "io", "wchan"):
        (tmp_path / "8" / hidden).mkdir()
    for module in (tree, sampling):
        monkeypatch.setattr(module, "_PROC", tmp_path)
    assert sample(7).processes == ()
    (seen,) = sample(8).processes
    assert seen.name == (proc / "comm").read_text().strip()
    assert seen.read_bytes == 0
    assert waits_in(8) is None


def test_a_dead_process_and_a_stranger_are_nobody():
    with running(IDLE) as process:
        assert os.getpid() not in {each.pid for each in sample(process.pid).processes}
        process.kill()
        until(lambda: sample(process.pid).processes == ())  # not waited for yet: a zombie
    assert sample(process.pid).processes == ()
    assert waits_in(process.pid) is None
