"""`lspci -vvv` as text, which is how people report a machine: the same devices that sysfs would show there."""

from __future__ import annotations

import re
from dataclasses import replace

from .pci import ACS_BITS, Acs, Bar, Device, Link, ResizableBar, Slot

_HEAD = re.compile(r"^((?:[0-9a-f]{4,8}:)?[0-9a-f]{2}:[01][0-9a-f]\.[0-7]) (.*)$")
_IDENTIFIERS = re.compile(r"\[([0-9a-f]{4}):([0-9a-f]{4})\]")
# What stands for the identifiers where lspci ran without -nn.
_CLASSES = {
    "Host bridge": 0x060000,
    "PCI bridge": 0x060400,
    "VGA compatible controller": 0x030000,
    "3D controller": 0x030200,
    "Audio device": 0x040300,
    "Ethernet controller": 0x020000,
    "Non-Volatile memory controller": 0x010802,
}
_VENDORS = {
    "Advanced Micro Devices": 0x1022,
    "Broadcom / LSI": 0x1000,
    "Intel Corporation": 0x8086,
    "NVIDIA Corporation": 0x10DE,
}
_KINDS = {
    "Endpoint": "endpoint",
    "Legacy Endpoint": "endpoint",
    "Root Port": "root port",
    "Upstream Port": "upstream",
    "Downstream Port": "downstream",
    "PCI-Express to PCI/PCI-X Bridge": "bridge",
    "PCI/PCI-X to PCI-Express Bridge": "bridge",
    "Root Complex Integrated Endpoint": "integrated",
    "Root Complex Event Collector": "integrated",
}
_UNITS = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40, "P": 50}


def parse_lspci(text: str) -> dict[str, Device]:
    """Read `lspci -vvv` (better with -D and -nn), by address. What the text does not show is None, empty or 0."""
    devices: dict[str, Device] = {}
    block: list[str] = []
    for line in [*text.splitlines(), "ff:1f.7 end"]:
        if _HEAD.match(line):
            if block:
                device = _device(block)
                devices[device.address] = device
            block = [line]
        elif block:
            block.append(line.strip())
    return {address: _placed(device, devices) for address, device in sorted(devices.items())}


def _device(block: list[str]) -> Device:
    head = _HEAD.match(block[0])
    assert head  # noqa: S101
    address, title = head[1], head[2]
    body = "\n".join(block[1:])
    identifiers = _IDENTIFIERS.search(title)
    named = re.search(r"Device ([0-9a-f]{4})\b", title)
    class_code = re.search(r"^[^\[]*\[([0-9a-f]{4})\]:", title)
    interface = re.search(r"\(prog-if ([0-9a-f]{2})", title)
    name = title.partition(":")[0].partition(" [")[0]
    vendor = next((number for text, number in _VENDORS.items() if text in title), 0)
    express = re.search(r"Express \(v\d+\) ([A-Za-z/ -]+?)(?: \(Slot([+-])\))?(?:, |$)", body, re.MULTILINE)
    kind = _KINDS.get(express[1], "endpoint") if express else "bridge" if "PCI bridge" in title else "conventional"
    node = _number(r"NUMA node: (\d+)", body)
    buses = re.search(r"Bus: primary=(\w\w), secondary=(\w\w), subordinate=(\w\w)", body)
    answers = "Unknown header type 7f" not in body and "(rev ff)" not in title
    return Device(
        address=address if address.count(":") > 1 else f"0000:{address}",
        vendor=int(identifiers[1], 16) if identifiers else vendor,
        device=int(identifiers[2], 16) if identifiers else int(named[1], 16) if named else 0,
        class_code=(int(class_code[1], 16) << 8 if class_code else _CLASSES.get(name, 0) & 0xFFFF00)
        | (int(interface[1], 16) if interface else 0),
        path=(),
        kind=kind if answers else "endpoint",
        driver=_text(r"Kernel driver in use: (\S+)", body),
        numa_node=node,
        link=_link(body) if answers and kind != "integrated" else None,
        bars=_bars(body),
        resizable=_resizable(body),
        acs=_acs(body),
        slot=_slot(body) if express and express[2] == "+" else None,
        answers=answers,
        whole="<access denied>" not in body,
        iommu_group=_number(r"IOMMU group: (\d+)", body),
        buses=(int(buses[1], 16), int(buses[2], 16), int(buses[3], 16)) if buses else None,
    )


def _text(pattern: str, body: str) -> str | None:
    match = re.search(pattern, body)
    return match[1] if match else None


def _number(pattern: str, body: str) -> int | None:
    found = _text(pattern, body)
    return int(found) if found else None


def _link(body: str) -> Link | None:
    able = re.search(r"LnkCap:.*?Speed ([\d.]+|unknown)(?:GT/s)?, Width x(\d+)(.*?)LnkCtl:", body, re.DOTALL)
    now = re.search(r"LnkSta:\s*Speed ([\d.]+|unknown)(?:GT/s)?(?: \(\w+\))?, Width x(\d+)(.*)", body, re.DOTALL)
    if not able or not now:
        return None
    speeds = [None if text == "unknown" else float(text) for text in (now[1], able[1])]
    reports = "LLActRep+" in able[3]
    # The flags of the link's state stand on the next line.
    active = "DLActive+" in "\n".join(now[3].splitlines()[:2])
    return Link(speeds[0], int(now[2]), speeds[1], int(able[2]), active if reports else None)


def _bars(body: str) -> tuple[Bar, ...]:
    found = re.findall(r"^Region (\d): Memory at (\S+)(.*)\[size=(\d+)([KMGT]?)\]", body, re.MULTILINE)
    return tuple(
        Bar(
            int(index),
            int(size) << _UNITS[unit],
            int(address, 16) if re.fullmatch(r"[0-9a-f]+", address) else 0,
            ", prefetchable" in rest,
        )
        for index, address, rest, size, unit in found
    )


def _resizable(body: str) -> tuple[ResizableBar, ...]:
    found = re.findall(r"^BAR (\d): current size: (\w+), supported: (.*)$", body, re.MULTILINE)
    return tuple(
        ResizableBar(int(index), _size(now), tuple(_size(word) for word in sizes.split()))
        for index, now, sizes in found
    )


def _size(text: str) -> int:
    match = re.fullmatch(r"(\d+)([KMGTP]?)B", text)
    return int(match[1]) << _UNITS[match[2]] if match else 0


def _acs(body: str) -> Acs | None:
    offset = re.search(r"\[([0-9a-f]+)(?: v\d+)?\] Access Control Services", body)
    if not offset:
        return None
    able, on = (re.search(rf"^{name}:(.*)$", body, re.MULTILINE) for name in ("ACSCap", "ACSCtl"))
    return Acs(int(offset[1], 16), _bits(able[1] if able else ""), _bits(on[1] if on else ""))


def _bits(text: str) -> int:
    return sum(bit for name, bit in ACS_BITS.items() if f"{name}+" in text)


def _slot(body: str) -> Slot:
    controls = "PwrCtrl+" in body
    return Slot(
        number=_number(r"Slot # *(\d+)", body) or 0,
        present=bool(re.search(r"SltSta:.*PresDet\+", body)),
        powered=not re.search(r"Control:.*Power\+ ", body) if controls else None,
        hotplug="HotPlug+" in body,
    )


def _placed(device: Device, devices: dict[str, Device]) -> Device:
    """Find the way down from the root: each bridge is above the bus that it names as its secondary one."""
    path, seen = [device.address], {device.address}
    domain = device.address.rpartition(":")[0].rpartition(":")[0]
    while True:
        bus = int(path[0].split(":")[1], 16)
        above = next(
            (
                port
                for port in devices.values()
                if port.buses and port.buses[1] == bus and port.address.startswith(domain)
            ),
            None,
        )
        if above is None or above.address in seen or not bus:
            return replace(device, path=tuple(path), root=f"pci{domain}:{bus:02x}")
        seen.add(above.address)
        path.insert(0, above.address)
