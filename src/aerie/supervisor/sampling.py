"""What `/proc` shows of the engine's processes. Linux only; nothing is started and nothing is written."""

import os
from pathlib import Path

from aerie.startup.activity import Activity, ProcessActivity
from aerie.supervisor import gpus
from aerie.supervisor.tree import TITLE, Stat, family, title

_PROC = Path("/proc")
_TICK = 1 / os.sysconf("SC_CLK_TCK")  # seconds
_PAGE = os.sysconf("SC_PAGE_SIZE")  # bytes


def sample(root_pid: int) -> Activity:
    """Return what `root_pid` and the living processes below it have done so far, and what the GPUs hold.

    Processes that end while they are looked at are left out. Takes some milliseconds, with GPUs more, and where a
    driver does not answer it never returns: call it outside of an event loop, and do not wait for it.
    """
    processes = tuple(_activity(pid, stat) for pid, stat in family(root_pid).items())
    return Activity(processes, gpus.used_bytes())


def _activity(pid: int, stat: Stat) -> ProcessActivity:
    titled = title(pid)  # whole: the kernel's name of a process ends after 15 characters
    return ProcessActivity(
        pid=pid,
        name=titled if titled.startswith(TITLE) else stat.name,
        state=stat.state,
        read_bytes=_read_bytes(pid),
        faults=stat.faults,
        rss_bytes=stat.resident_pages * _PAGE,
        cpu_seconds=stat.cpu_ticks * _TICK,
    )


def _read_bytes(pid: int) -> int:
    try:
        lines = (_PROC / str(pid) / "io").read_text().splitlines()
    except OSError:  # gone, or another user's
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("read_bytes:")), 0)
