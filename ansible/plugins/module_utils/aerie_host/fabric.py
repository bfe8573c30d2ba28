"""What decides how traffic between a host's GPUs is set up: their topology, ACS, CPUs, and what runs already."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .acs import describe, redirecting
from .machine import NOT_THERE, read_machine
from .topology import classify

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .topology import Topology


def environment(topology: Topology) -> str:
    """Name the file config/nccl-pcie.<name>.env that has what differs on such a host; `none` where nothing does."""
    if topology.name == "two-sockets":
        return "turin" if topology.turin else "two-sockets"
    return topology.name if topology.name == "one-switch" else "none"


def highest_apic_id(cpuinfo: str) -> int:
    """Return the highest APIC id in /proc/cpuinfo, 0 where none is told. Ids have gaps, so it may pass the count."""
    return max(map(int, re.findall(r"^apicid\s*:\s*(\d+)$", cpuinfo, re.MULTILINE)), default=0)


def read_fabric(root: Path = Path("/")) -> dict[str, Any]:
    """Read the host below `root`, without asking the driver, which may not be there yet."""

    def ask_nobody(_command: Sequence[str], _seconds: float = 0) -> tuple[int, str]:
        return NOT_THERE, ""

    machine = read_machine(root, run=ask_nobody, data="")
    topology = classify(machine)
    return {
        "topology": topology.name,
        "environment": environment(topology),
        "gpus": list(topology.gpus),
        "numa_nodes": sorted(node for node in topology.groups if node >= 0),
        "redirecting": [describe(port) for port in redirecting(machine.devices)],
        "bridges": len(machine.bridges),
        "cpu_vendor": machine.cpu_vendor,
        "logical_cpus": machine.logical_cpus,
        "highest_apic_id": highest_apic_id((root / "proc/cpuinfo").read_text()),
        "command_line": machine.command_line.split(),
        "numa_balancing": machine.numa_balancing,
        "governors": list(machine.governors),
        "link_power": machine.aspm,
    }
