"""What the machine around the engine says of its death: the container's memory counters, the host kernel's lines."""

import os
import re
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from aerie.diagnosis.evidence import Evidence, parse_kernel, pci_address
from aerie.diagnosis.signatures import Kind

KERNEL_LOG = Path("/var/log/host-kernel/kernel.log")
"""Where compose.yaml mounts what the host's unit writes (ansible/roles/vllm/files/kernel-log.sh)."""
_TAIL = 1_000_000  # bytes of the kernel's log that are read
_CGROUPS = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")
_PCI_DEVICES = Path("/sys/bus/pci/devices")
_PCI_FUNCTION = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_OTHERS = "a process of another container or of the host: this one counts none that was killed"
_UNLIMITED = 1 << 60  # bytes; version 1 says "no limit" by a number near 2^63


class MemoryCgroup:
    """The memory counters of the cgroup that this process is in, of version 1 or 2."""

    def __init__(self, cgroups: Path = _CGROUPS, membership: Path = _MEMBERSHIP) -> None:
        self._counters = self._limit = None
        for directory, counters, limit in _candidates(cgroups, membership):
            if (directory / counters).is_file():
                self._counters, self._limit = directory / counters, directory / limit
                return

    def oom_kills(self) -> int | None:
        """Return how many processes of the cgroup the kernel killed for want of memory; None where it does not say.

        Those count that it killed for the limit, and those for the whole machine's want.
        """
        if self._counters is None:
            return None
        try:
            rows = [line.split() for line in self._counters.read_text().splitlines()]
            return next((int(number) for name, number in rows if name == "oom_kill"), None)
        except (OSError, ValueError):
            return None  # shown to root alone, or in another form

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


def with_ports_above(gpus: Collection[str], devices: Path = _PCI_DEVICES) -> tuple[str, ...]:
    """Return the GPUs' PCI addresses and those of the ports above them: to be asked while all are there."""
    paths = [(devices / f"{pci_address(gpu)}.0").resolve() for gpu in gpus]
    return (*gpus, *{part for path in paths for part in path.parts if _PCI_FUNCTION.fullmatch(part)})


def outside(oom_kills: int | None, at: float, cgroup: MemoryCgroup, kernel_log: Path = KERNEL_LOG) -> list[Evidence]:
    """Return what was said outside of an engine that was started when the cgroup had counted `oom_kills`.

    `at` is now, in seconds since the epoch. What the kernel said may be older; `relevant` knows how old is too old.
    Its word that a process was killed for memory explains nothing where the cgroup counts, and has counted none since.
    """
    now = cgroup.oom_kills()
    kills = None if now is None or oom_kills is None else now - oom_kills
    said = [*_kernel(kernel_log.with_name(f"{kernel_log.name}.1")), *_kernel(kernel_log)]
    if kills == 0:
        said = [replace(one, kind=None, meaning=_OTHERS) if one.kind is Kind.MEMORY else one for one in said]
    return [*_killed(kills or 0, at, cgroup.limit()), *said]


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
