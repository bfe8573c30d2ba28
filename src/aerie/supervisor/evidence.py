"""What the machine around the engine says of its death: the container's memory counters, the host kernel's lines."""

import os
from pathlib import Path

from aerie.diagnosis.evidence import Evidence, parse_kernel
from aerie.diagnosis.signatures import Kind

KERNEL_LOG = Path("/var/log/host-kernel/kernel.log")
"""Where compose.yaml mounts what the host's unit writes (ansible/roles/vllm/files/kernel-log.sh)."""
_TAIL = 1_000_000  # bytes of the kernel's log that are read
_CGROUPS = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")
_UNLIMITED = 1 << 60  # bytes; version 1 says "no limit" by a number near 2^63


class MemoryCgroup:
    """The memory counters of the cgroup that this process is in, of version 1 or 2."""

    def __init__(self, cgroups: Path = _CGROUPS, membership: Path = _MEMBERSHIP) -> None:
        self._counters = self._limit = None
        for directory, counters, limit in _candidates(cgroups, membership):
            if (directory / counters).is_file():
                self._counters, self._limit = directory / counters, directory / limit
                return

    def oom_kills(self) -> int:
        """Return how many processes of the cgroup the kernel killed for want of memory; 0 where it does not say."""
        if self._counters is None:
            return 0
        try:
            rows = [line.split() for line in self._counters.read_text().splitlines()]
            return sum(int(number) for name, number in rows if name == "oom_kill")
        except (OSError, ValueError):
            return 0  # shown to root alone, or in another form

    def limit(self) -> int | None:
        """Return the limit in bytes, None for none."""
        if self._limit is None:
            return None
        try:
            limit = int(self._limit.read_text())
        except (OSError, ValueError):  # version 2 says "max"
            return None
        return limit if limit < _UNLIMITED else None


def _candidates(cgroups: Path, membership: Path) -> list[tuple[Path, str, str]]:
    """Return (directory, counters, limit) in the order to try.

    In a container the hierarchy is mounted from its own cgroup on (by a namespace, or by Docker for version 1), so the
    path in /proc leads nowhere there, and the mount point itself is the cgroup.
    """
    try:
        rows = [line.split(":", 2) for line in membership.read_text().splitlines()]
    except OSError:
        rows = []
    paths = {controllers: path.lstrip("/") for _number, controllers, path in (row for row in rows if len(row) == 3)}  # noqa: PLR2004 - number:controllers:path
    version_1 = next((path for names, path in paths.items() if "memory" in names.split(",")), "")
    return [
        *((cgroups / path, "memory.events", "memory.max") for path in (paths.get("", ""), "")),
        *((cgroups / "memory" / path, "memory.oom_control", "memory.limit_in_bytes") for path in (version_1, "")),
    ]


def outside(oom_kills: int, at: float, cgroup: MemoryCgroup, kernel_log: Path = KERNEL_LOG) -> list[Evidence]:
    """Return what was said outside of an engine that was started when the cgroup had counted `oom_kills`.

    `at` is now, in seconds since the epoch. What the kernel said may be older; `relevant` knows how old is too old.
    """
    older = kernel_log.with_name(f"{kernel_log.name}.1")
    return [*_killed(cgroup.oom_kills() - oom_kills, at, cgroup.limit()), *_kernel(older), *_kernel(kernel_log)]


def _killed(kills: int, at: float, limit: int | None) -> list[Evidence]:
    if kills <= 0:
        return []
    bound = f"its limit is {limit / 2**30:.1f} GiB" if limit else "it has no limit: the host's memory ran out"
    text = f"the container ran out of memory and the kernel killed {kills} of its processes; {bound}"
    return [Evidence("cgroup", at, text, kind=Kind.MEMORY)]


def _kernel(path: Path) -> list[Evidence]:
    try:
        with path.open("rb") as file:
            if file.seek(0, os.SEEK_END) > _TAIL:
                file.seek(-_TAIL, os.SEEK_END)
                file.readline()  # which has no beginning any more
            else:
                file.seek(0)
            return parse_kernel(file.read().decode(errors="replace"))
    except OSError:
        return []  # no unit writes it here
