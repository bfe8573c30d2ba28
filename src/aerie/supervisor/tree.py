"""The processes below a process, as `/proc` shows them. Imports little: the leash starts with every engine."""

import contextlib
import os
import signal
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

_PROC = Path("/proc")
TITLE = "VLLM::"
"""How the titles of vLLM's processes begin (vllm/utils/system_utils.py, set_process_title)."""
# Without any of these two kinds an engine is dead; the API server's end is its own, and the helpers of Python's
# multiprocessing come and go.
_VITAL = (f"{TITLE}EngineCore", f"{TITLE}Worker")
_GONE = frozenset("ZX")  # states of /proc/<pid>/stat of a process that has ended


class _Stat(NamedTuple):
    state: str
    parent: int
    began: int  # in ticks since the machine did; with the pid it names one process for ever


class Vital(NamedTuple):
    """A process without which an engine is dead."""

    pid: int
    title: str
    began: int

    def lives(self) -> bool:
        """Return whether it still runs; a zombie does not."""
        stat = _stat(self.pid)
        return stat is not None and stat.state not in _GONE and stat.began == self.began


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
    children: dict[int, list[int]] = {}
    for pid, stat in _stats():
        if stat.state not in _GONE:
            children.setdefault(stat.parent, []).append(pid)
    below = list(children.get(root, ()))
    for pid in below:  # grows while it is walked
        below += children.get(pid, ())
    return set(below)


def vital_below(root: int) -> list[Vital]:
    """Return vLLM's engine cores and workers below `root`.

    The kernel lets a reader of a process' title wait while that process maps memory: call it outside of an event loop.
    """
    found = []
    for pid in descendants(root):
        stat, title = _stat(pid), _title(pid)
        if stat and title.startswith(_VITAL):
            found.append(Vital(pid, title, stat.began))
    return found


def kill(pids: Iterable[int]) -> None:
    """Send SIGKILL to each that still exists."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def survivor(pid: int, *, titled: bool) -> Survivor:
    """Say what is known of a process that should be gone, which may keep a reader of its title waiting for ever."""
    stat = _stat(pid)
    try:
        where = (_PROC / str(pid) / "wchan").read_text()
    except OSError:
        where = ""
    title = titled and _title(pid)
    return Survivor(pid, title or "a process", stat.state if stat else "?", where if where not in {"", "0"} else "?")


def _stats() -> Iterator[tuple[int, _Stat]]:
    for name in os.listdir(_PROC):  # noqa: PTH208 - several times a second: names are enough
        if name.isdigit() and (stat := _stat(int(name))):
            yield int(name), stat


def _stat(pid: int) -> _Stat | None:
    try:
        text = (_PROC / str(pid) / "stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    # pid (name) state parent ...; the name may hold spaces and parentheses. The start time is the 22nd field.
    fields = text.rpartition(")")[2].split()
    return _Stat(fields[0], int(fields[1]), int(fields[19]))


def _title(pid: int) -> str:
    """Return the first argument, which is the title of a process that gave itself one; empty where it has ended."""
    try:
        return (_PROC / str(pid) / "cmdline").read_bytes().partition(b"\0")[0].decode(errors="replace").strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""
