"""Configuration spaces, decoded: against what pciutils says of the same bytes, and where the bytes are a mess."""

from __future__ import annotations

import dataclasses
import functools
import random
import shutil
import struct
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from aerie_host import lspci, pci
from build import config_space, machine
from described import MACHINES

if TYPE_CHECKING:
    from collections.abc import Callable

RECORDED = Path(__file__).parent / "lspci"
needs_lspci = pytest.mark.skipif(not shutil.which("lspci"), reason="pciutils is not installed")


def comparable(device: pci.Device) -> pci.Device:
    """`lspci` does not show the kind of an IOMMU group."""
    return dataclasses.replace(device, iommu_type=None)


def spoken(arguments: list[str]) -> str:
    return subprocess.run(
        ["lspci", *arguments, "-Dvvvnn"], capture_output=True, text=True, check=True, errors="replace"
    ).stdout


@needs_lspci
@pytest.mark.parametrize("name", MACHINES)
def test_lspci_says_the_same_of_every_device_of_every_machine(name: str, tree: Callable[..., Path]) -> None:
    sys = tree(name) / "sys"
    said = lspci.parse_lspci(spoken(["-A", "linux-sysfs", "-O", f"sysfs.path={sys / 'bus/pci'}"]))
    assert said == {address: comparable(device) for address, device in pci.read_devices(sys).items()}


@pytest.mark.parametrize("name", ["eight-degraded", "seven-of-eight", "seven-after-reboot", "eight-small-bars"])
def test_what_lspci_said_once_of_these_machines(name: str, tree: Callable[..., Path]) -> None:
    """The words of pciutils 3.9, kept, so that there is an oracle also where no lspci is."""
    said = lspci.parse_lspci((RECORDED / f"{name}.txt").read_text())
    assert said == {address: comparable(device) for address, device in pci.read_devices(tree(name) / "sys").items()}


def dump(spaces: dict[str, bytes]) -> str:
    return "\n".join(
        f"{address} X\n" + "".join(f"{at:02x}: {space[at : at + 16].hex(' ')}\n" for at in range(0, len(space), 16))
        for address, space in spaces.items()
    )


@needs_lspci
def test_lspci_says_the_same_of_registers_with_any_value(tmp_path: Path) -> None:
    """Links, slots, ACS and Resizable BAR registers with random bits; the lists of capabilities stay whole."""
    chance = random.Random(20261102)  # noqa: S311
    shapes = [device for device in machine("eight-one-switch")["devices"] if not device.update(buses=[0, 1, 2])]
    spaces = {}
    for number in range(250):
        space = bytearray(config_space(chance.choice(shapes)))
        for at, size in ((0x6C, 4), (0x72, 2), (0x74, 4), (0x78, 2), (0x7A, 2), (0x2A4, 2), (0x2A6, 2), (0x138, 4)):
            before = int.from_bytes(space[at : at + size], "little")
            if before or at == 0x2A6:
                space[at : at + size] = (before ^ chance.getrandbits(8 * size) & chance.getrandbits(8 * size)).to_bytes(
                    size, "little"
                )
        spaces[f"0000:{number:02x}:00.0"] = bytes(space)
    (tmp_path / "dump").write_text(dump(spaces))
    said = lspci.parse_lspci(spoken(["-F", str(tmp_path / "dump")]))
    for address, space in spaces.items():
        decoded = pci.decode(space)
        told = said[address]
        assert (decoded.link, decoded.slot, decoded.kind) == (told.link, told.slot, told.kind)
        # lspci names the seven bits of each register that mean something.
        seen = decoded.acs and (decoded.acs.capabilities & 0x7F, decoded.acs.control & 0x7F)
        assert seen == (told.acs and (told.acs.capabilities, told.acs.control))


@functools.cache
def devices_of(name: str) -> list[dict[str, Any]]:
    return machine(name)["devices"]


def space_of(kind: str, **changes: object) -> bytearray:
    device = next(device for device in devices_of("eight-one-switch") if device["is"] == kind)
    return bytearray(config_space({"buses": [2, 3, 3], **device, **changes}))


def test_acs_names_what_is_on_and_whether_traffic_turns_around() -> None:
    acs = pci.decode(bytes(space_of("root port"))).acs
    assert acs == pci.Acs(offset=0x2A0, capabilities=0x5F, control=0x1D)
    assert (acs.redirects, acs.enabled) == (True, ("SrcValid", "ReqRedir", "CmpltRedir", "UpstreamFwd"))
    assert not pci.Acs(0x2A0, 0x5F, 0x03).redirects  # source validation and blocking turn nothing around


def test_a_device_that_fell_off_reads_all_ones() -> None:
    decoded = pci.decode(b"\xff" * 4096)
    assert (decoded.answers, decoded.link, decoded.acs) == (False, None, None)


def test_the_unprivileged_64_bytes_have_no_capabilities_and_say_so() -> None:
    decoded = pci.decode(bytes(space_of("gpu")[:64]))
    assert (decoded.vendor, decoded.class_code, decoded.whole, decoded.link) == (pci.NVIDIA, 0x030200, False, None)


def test_fewer_than_64_bytes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"at least 64 bytes, and this one has 63"):
        pci.decode(b"\0" * 63)


@pytest.mark.parametrize("chain", [{0x34: 0x60, 0x61: 0x60}, {0x34: 0x60, 0x61: 0x41}, {0x34: 0xFC}])
def test_a_conventional_list_that_bites_its_tail_ends(chain: dict[int, int]) -> None:
    space = space_of("gpu")
    for at, value in chain.items():
        space[at] = value
    pci.decode(bytes(space))


def test_an_extended_list_that_bites_its_tail_ends() -> None:
    space = space_of("gpu")
    struct.pack_into("<I", space, 0x100, 0x0001 | 1 << 16 | 0x100 << 20)
    assert pci.decode(bytes(space)).resizable == ()


def test_a_slow_random_space_never_raises() -> None:
    chance = random.Random(1)  # noqa: S311
    for _ in range(300):
        space = space_of(chance.choice(["gpu", "root port", "switch downstream"]))
        for _ in range(chance.choice([1, 5, 60])):
            space[chance.randrange(len(space))] = chance.randrange(256)
        pci.decode(bytes(space))


def test_sizes_beyond_128_tib_stand_in_the_control_register() -> None:
    space = space_of("gpu")
    struct.pack_into("<II", space, 0x138, 1 << 31, 1 | 1 << 5 | 28 << 8 | 1 << 16)
    assert pci.decode(bytes(space)).resizable == (pci.ResizableBar(1, 1 << 48, (1 << 47, 1 << 48)),)


def test_a_region_without_an_address_has_a_size() -> None:
    lines = ["0x0000000000000000 0x0000000003ffffff 0x0000000020040200", *["0x0 0x0 0x0"] * 5]
    assert pci.parse_resource("\n".join(lines)) == (pci.Bar(0, 64 << 20, 0, prefetchable=False),)


def test_the_region_of_the_memory_has_the_index_that_the_registers_before_it_leave() -> None:
    """As an H200 shows it: 64-bit registers, so regions 0, 2 and 4, and no Resizable BAR."""
    resource = """\
0x0000104002000000 0x0000104002ffffff 0x000000000014220c
0x0000000000000000 0x0000000000000000 0x0000000000000000
0x0000100000000000 0x0000103fffffffff 0x000000000014220c
0x0000000000000000 0x0000000000000000 0x0000000000000000
0x0000104000000000 0x0000104001ffffff 0x000000000014220c
0x0000000000000000 0x0000000000000000 0x0000000000000000
"""
    gpu = pci.Device("0000:00:06.0", pci.NVIDIA, 0x2335, 0x030200, ("0000:00:06.0",), bars=pci.parse_resource(resource))
    assert gpu.memory_bar == pci.Bar(2, 256 << 30, 0x100000000000, prefetchable=True)
    small = (pci.Bar(0, 64 << 20, 0xB0000000, prefetchable=False), pci.Bar(1, 64 << 20, 0xC0000000, prefetchable=True))
    resizable = (pci.ResizableBar(0, 64 << 20, (64 << 20,)), pci.ResizableBar(1, 64 << 20, (64 << 20, 1 << 37)))
    assert dataclasses.replace(gpu, bars=small, resizable=resizable).memory_bar == small[1]


def test_io_ports_are_no_memory() -> None:
    assert pci.parse_resource("0x0000000000003000 0x000000000000307f 0x0000000000040101") == ()


def test_the_path_goes_from_the_root_port_down(tree: Callable[..., Path]) -> None:
    gpu = pci.read_devices(tree("eight-one-switch") / "sys")["0000:03:00.0"]
    assert gpu.path == ("0000:00:01.1", "0000:01:00.0", "0000:02:00.0", "0000:03:00.0")
    assert (gpu.parent, gpu.root, gpu.numa_node, gpu.driver) == ("0000:02:00.0", "pci0000:00", 0, "nvidia")


def test_a_device_that_goes_while_it_is_read_is_left_out(tree: Callable[..., Path]) -> None:
    sys = tree("eight-one-switch") / "sys"
    (sys / "bus/pci/devices/0000:03:00.0/config").unlink()
    assert "0000:03:00.0" not in pci.read_devices(sys)


def test_no_pci_bus_no_devices(tmp_path: Path) -> None:
    assert pci.read_devices(tmp_path) == {}


def test_bridges_stand_once_each(tree: Callable[..., Path]) -> None:
    devices = pci.read_devices(tree("eight-one-switch") / "sys")
    ports = pci.bridges_on_paths(devices, pci.gpus(devices))
    assert [port.kind for port in ports] == ["root port", "upstream", *["downstream"] * 8]
