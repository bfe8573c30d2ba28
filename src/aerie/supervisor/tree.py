"""The processes below a process, as `/proc` shows them. Imports little: the leash starts with every engine."""

import contextlib
import os
import signal
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

_PROC = Path("/proc")
TITLE = "VLLM::"
"""How the titles of vLLM's processes begin (vllm/utils/system_utils.py, set_process_title)."""
# Without any of these two kinds an engine is dead; the API server's end is its own, and the helpers of Python's
# multiprocessing come and go.
_VITAL = (f"{TITLE}EngineCore", f"{TITLE}Worker")
_GONE = frozenset("ZX")  # states of /proc/<pid>/stat of a process that has ended


class Stat(NamedTuple):
    """What `/proc/<pid>/stat` says (proc_pid_stat(5))."""

    name: str
    state: str
    parent: int
    faults: int
    """Minor and major."""
    cpu_ticks: int
    """In user and kernel mode."""
    began: int
    """In ticks since the machine did; with the pid it names one process for ever."""
    resident_pages: int


class Vital(NamedTuple):
    """A process without which an engine is dead."""

    pid: int
    title: str
    began: int

    def lives(self) -> bool:
        """Return whether it still runs; a zombie does not."""
        stat = _stat(self.pid)
        return stat is not None and stat.began == self.began


class Survivor(NamedTuple):
    """A process that SIGKILL does not end: the kernel, mostly a driver, does not let go of it."""

    pid: int
    name: str
    state: str
    """One letter of `/proc/<pid>/stat`: D for an uninterruptible wait."""
    waits_in: str
    """The kernel's function that it waits in, `?` where that is not told."""

    def __str__(self) -> str:
        return f"{self.name} (pid {self.pid}, state {self.state}, waits in {self.waits_in})"


def descendants(root: int) -> set[int]:
    """Return the living processes below `root`; none leaves the tree of one that adopts orphans."""
    return set(_below(root, _stats()))


def family(root: int) -> dict[int, Stat]:
    """Return `root` and the living processes below it, those that begin others first; nothing where it has ended."""
    stats = _stats()
    return {pid: stats[pid] for pid in (root, *_below(root, stats))} if root in stats else {}


def vital_below(root: int) -> list[Vital]:
    """Return vLLM's engine cores and workers below `root`.

    What one of them forks has its title, too, for good or until it becomes a compiler, and may end as it likes: whose
    parent has the same title is no worker. The kernel lets a reader of a process' title wait while that process maps
    memory: call it outside of an event loop.
    """
    found = []
    for pid in descendants(root):
        stat, titled = _stat(pid), title(pid)
        if stat and titled.startswith(_VITAL) and title(stat.parent) != titled:
            found.append(Vital(pid, titled, stat.began))
    return found


def kill(pids: Iterable[int]) -> None:
    """Send SIGKILL to each that still exists."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def survivor(pid: int, *, titled: bool) -> Survivor:
    """Say what is known of a process that should be gone, which may keep a reader of its title waiting for ever."""
    stat = _stat(pid)
    name = title(pid) if titled else ""
    return Survivor(pid, name or "a process", stat.state if stat else "?", waits_in(pid) or "?")


def title(pid: int) -> str:
    """Return the first argument, which is the title of a process that gave itself one; empty where it is not told."""
    try:
        return (_PROC / str(pid) / "cmdline").read_bytes().partition(b"\0")[0].decode(errors="replace").strip()
    except OSError:
        return ""


def waits_in(pid: int) -> str | None:
    """Return the kernel function that the process's first thread sleeps in; None for one that runs, or a hidden one."""
    try:
        where = (_PROC / str(pid) / "wchan").read_text()
    except OSError:
        return None
    return where if where not in {"", "0"} else None


def _below(root: int, stats: Mapping[int, Stat]) -> list[int]:
    children: dict[int, list[int]] = {}
    for pid, stat in stats.items():
        children.setdefault(stat.parent, []).append(pid)
    below = list(children.get(root, ()))
    for pid in below:  # grows while it is walked
        below += children.get(pid, ())
    return below


def _stats() -> dict[int, Stat]:
    names = os.listdir(_PROC)  # noqa: PTH208 - several times a second: names are enough
    return {int(name): stat for name in names if name.isdigit() and (stat := _stat(int(name)))}


def _stat(pid: int) -> Stat | None:
    """Return what is told of a living process; None for one that has ended, or is another user's and hidden."""
    try:
        text = (_PROC / str(pid) / "stat").read_text(errors="replace")
    except OSError:
        return None
    head, _, tail = text.rpartition(")")  # the name may hold spaces and parentheses
    fields = tail.split()
    if fields[0] in _GONE:
        return None
    parent, minor, major, user, system, began, resident = (int(fields[at]) for at in (1, 7, 9, 11, 12, 19, 21))
    return Stat(head.partition("(")[2], fields[0], parent, minor + major, user + system, began, resident)
