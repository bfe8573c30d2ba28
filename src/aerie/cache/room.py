"""How much of the host's page cache may be filled: what the machine has, and what this process' cgroup may use."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_CGROUPS = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")
_KIB = 1024
_UNLIMITED = 1 << 60  # bytes; version 1 says "no limit" by a number near 2^63
_FILE_PAGES = ("inactive_file", "active_file")


@dataclass(frozen=True)
class Room:
    """Bytes that the page cache may grow to take, what is in it and can be dropped included."""

    machine: int
    cgroup: int | None = None
    """None where no limit holds. Pages count for the cgroup of whoever reads them first, page cache too."""
    total: int = 0
    """Of the machine's memory, or of the cgroup's limit where that is less."""

    @property
    def available(self) -> int:
        """What both leave."""
        return self.machine if self.cgroup is None else min(self.machine, self.cgroup)

    @property
    def bound(self) -> str:
        """Which of the two it is, in words."""
        return "this machine" if self.available == self.machine else "this container's memory limit"


def room(meminfo: Path = _MEMINFO, cgroups: Path = _CGROUPS, membership: Path = _MEMBERSHIP) -> Room:
    """Return what there is now; raises OSError where the kernel does not tell."""
    said = dict(_numbers(meminfo, ":"))
    machine, total = said.get("MemAvailable", 0) * _KIB, said.get("MemTotal", 0) * _KIB
    limits = [limit for limit in _limits(cgroups, membership) if limit[0] < min(total or _UNLIMITED, _UNLIMITED)]
    if not limits:
        return Room(machine, None, total)
    least = min(limits)[0]
    return Room(machine, min(max(0, limit - used) for limit, used in limits), least)


def _limits(cgroups: Path, membership: Path) -> list[tuple[int, int]]:
    """Return (limit, bytes in use that cannot be dropped) of this cgroup and of those around it, as far as shown.

    In a container the hierarchy is mounted from its own cgroup on, so that its path in /proc leads nowhere there, and
    the mount point itself is the cgroup.
    """
    try:
        rows = [line.split(":", 2) for line in membership.read_text().splitlines()]
    except OSError:
        rows = []
    paths = {controllers: path for _number, controllers, path in (row for row in rows if len(row) == 3)}  # noqa: PLR2004 - number:controllers:path
    first = next((path for names, path in paths.items() if "memory" in names.split(",")), "")
    found = []
    for base, path, limit, usage in (
        (cgroups, paths.get("", ""), "memory.max", "memory.current"),
        (cgroups / "memory", first, "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        inner = base / path.lstrip("/")
        for directory in dict.fromkeys([inner, *inner.parents, base]):
            if not directory.is_relative_to(base):
                continue
            try:
                highest = int((directory / limit).read_text())
                used = int((directory / usage).read_text())
                stat = dict(_numbers(directory / "memory.stat"))
            except (OSError, ValueError):  # not shown here; "max"
                continue
            found.append((highest, used - _droppable(stat)))
    return found


def _droppable(stat: Mapping[str, int]) -> int:
    # Version 1 has `total_` before what counts the cgroups below, too, as its usage does.
    return sum(stat.get(f"total_{name}", stat.get(name, 0)) for name in _FILE_PAGES)


def _numbers(path: Path, after: str = "") -> list[tuple[str, int]]:
    found = []
    for line in path.read_text().splitlines():
        words = line.split()
        if len(words) > 1 and words[1].isdecimal():
            found.append((words[0].removesuffix(after), int(words[1])))
    return found
