"""Shapes of machines by their PCI trees, against the matrices that nvidia-smi gives in public reports of them."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import pytest
from aerie_host.machine import Machine, NumaNode
from aerie_host.pci import Device
from aerie_host.topology import classify, relation

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.mark.parametrize(
    ("name", "shape", "switches", "groups"),
    [
        ("eight-one-switch", "one-switch", 1, [8]),
        ("eight-two-sockets", "two-sockets", 0, [4, 4]),
        ("eight-four-switches", "two-sockets", 4, [4, 4]),
        ("eight-turin", "root-ports", 0, [8]),
        ("four-root-ports", "root-ports", 0, [4]),
        ("seven-of-eight", "one-switch", 1, [7]),
        ("no-gpu", "none", 0, []),
    ],
)
def test_shape(name: str, shape: str, switches: int, groups: list[int], machine: Callable[..., Machine]) -> None:
    found = classify(machine(name))
    assert (found.name, found.switches, [len(group) for group in found.groups.values()]) == (shape, switches, groups)


@pytest.mark.parametrize("name", ["eight-one-switch", "eight-two-sockets", "eight-four-switches", "eight-turin"])
def test_the_tree_says_what_nvidia_smi_says(name: str, machine: Callable[..., Machine]) -> None:
    host = machine(name)
    shape = classify(host)
    order = [gpu.address for gpu in host.served]
    assert len(host.driver_topology) == 56
    assert {(order[a], order[b]): word for (a, b), word in host.driver_topology.items()} == shape.relations


def test_turin_is_told_by_family_and_name(machine: Callable[..., Machine]) -> None:
    assert classify(machine("eight-turin")).turin
    assert not classify(machine("eight-two-sockets")).turin  # Genoa
    assert not Machine(cpu_vendor="AuthenticAMD", cpu_family=26, cpu_model="AMD Ryzen 9 9950X").turin


def gpu(*path: str, root: str = "pci0000:00", node: int | None = 0) -> Device:
    return Device(path[-1], 0x10DE, 0x2BB5, 0x030200, path, root=root, numa_node=node)


def port(address: str, kind: str, *above: str) -> Device:
    return Device(address, 0x1000, 0xC030, 0x060400, (*above, address), kind)


def test_cascaded_switches_are_pxb_and_the_shared_one_alone_is_pix() -> None:
    root, first, down = "0000:00:01.1", "0000:01:00.0", "0000:02:00.0"
    second, third = "0000:03:00.0", "0000:08:00.0"
    ports = [port(second, "upstream", root, first, down), port(third, "upstream", root, first, "0000:02:01.0")]
    a = gpu(root, first, down, second, "0000:04:00.0", "0000:05:00.0")
    b = gpu(root, first, down, second, "0000:04:01.0", "0000:06:00.0")
    c = gpu(root, first, "0000:02:01.0", third, "0000:09:00.0", "0000:0a:00.0")
    machine = Machine(devices={device.address: device for device in [a, b, c, *ports]})
    assert (relation(a, b, machine), relation(a, c, machine), relation(c, b, machine)) == ("PIX", "PXB", "PXB")
    assert classify(machine).name == "one-switch"


def test_two_root_ports_of_one_host_bridge_are_phb() -> None:
    a, b = gpu("0000:00:01.1", "0000:01:00.0"), gpu("0000:00:02.1", "0000:02:00.0")
    assert relation(a, b, Machine()) == "PHB"


def test_where_the_firmware_names_no_node_one_node_is_no_riddle() -> None:
    a = gpu("0000:00:01.1", "0000:01:00.0", node=None)
    b = gpu("0000:40:01.1", "0000:41:00.0", root="pci0000:40", node=0)
    one = Machine(numa=(NumaNode(0, "0-63", 1),))
    two = dataclasses.replace(one, numa=(NumaNode(0, "0-31", 1), NumaNode(1, "32-63", 1)))
    assert (relation(a, b, one), relation(a, b, two)) == ("NODE", "SYS")


def spread(host: Machine, nodes: int) -> Machine:
    """The same machine with so many NUMA nodes a socket (NPS), its GPUs spread over them as its root ports are."""
    count = nodes * host.sockets
    numa = tuple(NumaNode(number, str(number), 1 << 30, (), number // nodes) for number in range(count))
    share = len(host.gpus) // count
    moved = {gpu.address: dataclasses.replace(gpu, numa_node=number // share) for number, gpu in enumerate(host.gpus)}
    return dataclasses.replace(host, numa=numa, devices=host.devices | moved)


def test_nodes_of_one_socket_are_no_two_sockets(machine: Callable[..., Machine]) -> None:
    shape = classify(spread(machine("eight-turin"), 4))
    assert (shape.name, sorted(shape.groups)) == ("root-ports", [0, 1, 2, 3])
    assert shape.matrix()[0] == ["X", "NODE", *["SYS"] * 6]  # the driver's words, which are of nodes
    assert classify(spread(machine("eight-two-sockets"), 2)).name == "two-sockets"


def test_two_switches_on_one_socket() -> None:
    def below(root: str, bus: int) -> list[Device]:
        root_port, up = f"0000:{root}:01.1", f"0000:{bus:02x}:00.0"
        downs = [f"0000:{bus + 1:02x}:0{number}.0" for number in range(2)]
        gpus = [
            gpu(root_port, up, down, f"0000:{bus + 2 + n:02x}:00.0", root=f"pci0000:{root}")
            for n, down in enumerate(downs)
        ]
        return [port(up, "upstream", root_port), *gpus]

    machine = Machine(devices={device.address: device for device in [*below("00", 1), *below("40", 0x41)]})
    shape = classify(machine)
    assert (shape.name, shape.switches) == ("switches", 2)
    assert shape.matrix()[0] == ["X", "PIX", "NODE", "NODE"]
