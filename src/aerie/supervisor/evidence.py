"""What the machine around the engine says of its death: the container's memory counters, the host kernel's lines."""

import os
from dataclasses import dataclass
from pathlib import Path

from aerie.diagnosis.evidence import Evidence, parse_kernel

KERNEL_LOG = Path("/var/log/host-kernel/kernel.log")
"""Where compose.yaml mounts what the host's unit writes (ansible/roles/vllm/files/kernel-log.sh)."""
_BEFORE = 120.0  # seconds; a GPU may fall off the bus some time before the first call to it fails
_TAIL = 1_000_000  # bytes of the kernel's log that are read
_CGROUPS = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")
_UNLIMITED = 1 << 60  # bytes; version 1 says "no limit" by a number near 2^63


@dataclass(frozen=True)
class Before:
    """What was so when an engine was started: the time in seconds since the epoch, and the kills counted till then."""

    at: float
    oom_kills: int | None


class MemoryCgroup:
    """The memory counters of the cgroup that this process is in, of version 1 or 2."""

    def __init__(self, cgroups: Path = _CGROUPS, membership: Path = _MEMBERSHIP) -> None:
        self._counters = self._limit = None
        for directory, counters, limit in _candidates(cgroups, membership):
            if (directory / counters).is_file():
                self._counters, self._limit = directory / counters, directory / limit
                return

    def oom_kills(self) -> int | None:
        """Return how many processes of the cgroup the kernel killed for want of memory; None where it does not say."""
        if self._counters is None:
            return None
        try:
            fields = dict(line.split(" ", 1) for line in self._counters.read_text().splitlines())
            return int(fields["oom_kill"])
        except (OSError, LookupError, ValueError):
            return None  # a kernel before 4.13, or a file that only root may read

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


def before(at: float, cgroup: MemoryCgroup) -> Before:
    """Return what to compare with later; `at` in seconds since the epoch."""
    return Before(at, cgroup.oom_kills())


def outside(since: Before, at: float, cgroup: MemoryCgroup, kernel_log: Path = KERNEL_LOG) -> list[Evidence]:
    """Return what was said outside of the engine since it was started, and shortly before that."""
    return [*_killed(since, at, cgroup), *_kernel(kernel_log, since.at - _BEFORE)]


def _killed(since: Before, at: float, cgroup: MemoryCgroup) -> list[Evidence]:
    kills = cgroup.oom_kills()
    if kills is None or since.oom_kills is None or kills <= since.oom_kills:
        return []
    limit = cgroup.limit()
    bound = f"the container's limit is {limit / 2**30:.1f} GiB" if limit else "it has no limit: the host's ran out"
    text = f"the kernel killed {kills - since.oom_kills} of the container's processes for want of memory"
    return [Evidence(source="cgroup", at=at, text=f"oom_kill: {text} ({bound})", pci=None, pid=None)]


def _kernel(path: Path, since: float) -> list[Evidence]:
    try:
        with path.open("rb") as file:
            if file.seek(0, os.SEEK_END) > _TAIL:
                file.seek(-_TAIL, os.SEEK_END)
                file.readline()  # which has no beginning any more
            else:
                file.seek(0)
            text = file.read().decode(errors="replace")
    except OSError:
        return []  # no unit writes it here
    return [line for line in parse_kernel(text) if line.at is None or line.at >= since]
