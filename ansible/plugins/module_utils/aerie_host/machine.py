"""One host, as far as serving with its GPUs depends on it: read once, then only looked at."""

from __future__ import annotations

from dataclasses import dataclass, field

from .pci import Device, bridges_on_paths, gpus


@dataclass(frozen=True)
class NumaNode:
    """One NUMA node: its CPUs as the kernel lists them (0-31,64-95), its memory in bytes, its distances to all nodes."""

    number: int
    cpus: str
    memory: int
    distances: tuple[int, ...] = ()


@dataclass(frozen=True)
class Machine:
    """What the findings, the topology and the units need to know. Fields that could not be read are None or empty."""

    hostname: str = ""
    distribution: str = ""  # "Debian 12", "Ubuntu 24.04"
    kernel: str = ""
    command_line: str = ""
    cpu_model: str = ""
    logical_cpus: int = 0
    sockets: int = 0
    numa: tuple[NumaNode, ...] = ()
    devices: dict[str, Device] = field(default_factory=dict)

    @property
    def gpus(self) -> list[Device]:
        """The NVIDIA GPUs on the PCI bus, whether or not a driver serves them."""
        return gpus(self.devices)

    @property
    def bridges(self) -> list[Device]:
        """Every port on the GPUs' paths."""
        return bridges_on_paths(self.devices, self.gpus)
