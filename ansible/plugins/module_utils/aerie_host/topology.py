"""How GPUs reach each other, by the PCI tree and the NUMA nodes: what `nvidia-smi topo -m` shows, without a driver."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .machine import Machine
    from .pci import Device


_AT_A_ROOT_PORT = 2  # root port, GPU: a longer path has a switch in it


@dataclass(frozen=True)
class Topology:
    """The shape of the paths between GPUs.

    `name`:
      none         no GPU
      single       one
      one-switch   all below one root port: peers never leave the switch (or the cascade of switches)
      switches     several switches on one socket: part of the pairs cross the root complex
      root-ports   every GPU at a root port of its own, on one socket: all pairs cross the root complex
      two-sockets  GPUs on more than one socket: part of the pairs cross the link between them
    `relations` has the words of `nvidia-smi topo -m` for each pair of addresses (X is left out): PIX one switch, PXB
    several in a row, PHB one host bridge, NODE one NUMA node, SYS further. `groups` are the GPUs of each NUMA node, -1
    for those of which the firmware does not say. `switches` counts the upstream ports right below root ports that have
    GPUs below them.
    """

    name: str
    gpus: tuple[str, ...]
    relations: dict[tuple[str, str], str]
    groups: dict[int, tuple[str, ...]]
    switches: int
    turin: bool

    def matrix(self) -> list[list[str]]:
        """Rows and columns in the order of the GPUs' addresses."""
        return [["X" if a == b else self.relations[a, b] for b in self.gpus] for a in self.gpus]


def classify(machine: Machine) -> Topology:
    """Tell the shape of a machine's GPUs that are on the bus."""
    found = [gpu for gpu in machine.gpus if gpu.answers]
    relations = {(a.address, b.address): relation(a, b, machine) for a in found for b in found if a is not b}
    groups: dict[int, tuple[str, ...]] = {}
    for gpu in found:
        node = _node(gpu, machine)
        groups[node] = (*groups.get(node, ()), gpu.address)
    return Topology(
        name=_name(found, set(relations.values()), sockets=len({_socket(gpu, machine) for gpu in found})),
        gpus=tuple(gpu.address for gpu in found),
        relations=relations,
        groups=groups,
        switches=len({gpu.path[1] for gpu in found if len(gpu.path) > _AT_A_ROOT_PORT}),  # root port, switch, ..., GPU
        turin=machine.turin,
    )


def relation(one: Device, other: Device, machine: Machine) -> str:
    """Name the path between two GPUs as NVIDIA's tools do."""
    if one.path[0] == other.path[0]:
        shared = sum(1 for a, b in zip(one.path, other.path, strict=False) if a == b)  # paths differ in length
        # Beyond the switch in which the paths meet, each upstream port is a further switch on the way.
        further = {*one.path[shared:], *other.path[shared:]}
        cascaded = any(machine.devices[at].kind == "upstream" for at in further if at in machine.devices)
        return "PXB" if cascaded else "PIX"
    if one.root == other.root and one.root:
        return "PHB"
    return "NODE" if _node(one, machine) == _node(other, machine) else "SYS"


def _node(gpu: Device, machine: Machine) -> int:
    """Where the firmware does not say, a machine with one node has no choice."""
    if gpu.numa_node is not None:
        return gpu.numa_node
    return machine.numa[0].number if len(machine.numa) == 1 else -1


def _socket(gpu: Device, machine: Machine) -> int:
    """Tell the socket by the node; where no CPU of it is known, each node counts for one."""
    node = _node(gpu, machine)
    if machine.sockets == 1:
        return 0
    return next((one.socket for one in machine.numa if one.number == node and one.socket is not None), node)


def _name(found: list[Device], said: set[str], *, sockets: int) -> str:
    if len(found) <= 1:
        return "single" if found else "none"
    if sockets > 1:
        return "two-sockets"
    if said <= {"PIX", "PXB"}:
        return "one-switch"
    return "switches" if said & {"PIX", "PXB"} else "root-ports"
