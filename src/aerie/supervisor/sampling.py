"""What `/proc` shows of the engine's processes. Linux only; nothing is started and nothing is written."""

import os
from pathlib import Path

from aerie.startup.activity import Activity, ProcessActivity
from aerie.supervisor import gpus

_PROC = Path("/proc")
_TICK = 1 / os.sysconf("SC_CLK_TCK")  # seconds
_PAGE = os.sysconf("SC_PAGE_SIZE")  # bytes
_TITLED = "VLLM::"  # how vLLM's processes call themselves (vllm/utils/system_utils.py, set_process_title)

# Where things stand in /proc/<pid>/stat, counted after the name in parentheses (proc_pid_stat(5)).
_STATE, _PARENT, _MINOR_FAULTS, _MAJOR_FAULTS, _USER_TICKS, _SYSTEM_TICKS, _RESIDENT_PAGES = 0, 1, 7, 9, 11, 12, 21


def sample(root_pid: int) -> Activity:
    """Return what `root_pid` and the living processes below it have done so far, and what the GPUs hold.

    Processes that end while they are looked at are left out. Takes some milliseconds, with GPUs more: call it outside
    of an event loop.
    """
    stats = _stats()
    processes = tuple(_activity(pid, *stats[pid]) for pid in _tree(root_pid, stats))
    return Activity(processes, gpus.used_bytes())


def waits_in(pid: int) -> str | None:
    """Return the kernel function that the process's first thread sleeps in; None for one that runs, or a hidden one."""
    try:
        where = (_PROC / str(pid) / "wchan").read_text()
    except OSError:
        return None
    return where if where not in {"", "0"} else None


def _stats() -> dict[int, tuple[str, list[str]]]:
    """Return (name, fields after the name) of each living process."""
    found = {}
    for entry in _PROC.iterdir():
        if not entry.name.isdigit():
            continue
        try:
            line = (entry / "stat").read_text(errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            continue
        head, _, tail = line.rpartition(")")  # the name may hold spaces and parentheses
        fields = tail.split()
        if fields[_STATE] not in "ZX":
            found[int(entry.name)] = (head.partition("(")[2], fields)
    return found


def _tree(root: int, stats: dict[int, tuple[str, list[str]]]) -> list[int]:
    children: dict[int, list[int]] = {}
    for pid, (_, fields) in stats.items():
        children.setdefault(int(fields[_PARENT]), []).append(pid)
    tree = [root] if root in stats else []
    for pid in tree:  # grows while it is walked
        tree += children.get(pid, [])
    return tree


def _activity(pid: int, name: str, fields: list[str]) -> ProcessActivity:
    return ProcessActivity(
        pid=pid,
        name=_title(pid) or name,
        state=fields[_STATE],
        read_bytes=_read_bytes(pid),
        faults=int(fields[_MINOR_FAULTS]) + int(fields[_MAJOR_FAULTS]),
        rss_bytes=int(fields[_RESIDENT_PAGES]) * _PAGE,
        cpu_seconds=(int(fields[_USER_TICKS]) + int(fields[_SYSTEM_TICKS])) * _TICK,
    )


def _title(pid: int) -> str | None:
    """Return the whole title that a process gave itself; the kernel's name of it ends after 15 characters."""
    try:
        first = (_PROC / str(pid) / "cmdline").read_bytes().partition(b"\0")[0].decode(errors="replace").strip()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return first if first.startswith(_TITLED) else None


def _read_bytes(pid: int) -> int:
    try:
        lines = (_PROC / str(pid) / "io").read_text().splitlines()
    except OSError:  # gone, or another user's
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("read_bytes:")), 0)
