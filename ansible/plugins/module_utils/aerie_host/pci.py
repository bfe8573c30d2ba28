"""PCI devices as sysfs and `lspci -vvv` show them: links, BARs, Access Control Services, slots.

The decoders work on the bytes of a configuration space and read nothing else; `read_devices` is the thin reader around
them. Layouts are those of the PCI Express base specification 6.0, section 7; the offsets of a capability's registers
stand where they are read. No pciutils is needed.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from pathlib import Path

NVIDIA = 0x10DE
# Display controllers: VGA compatible (0x0300) and 3D (0x0302), the two as which data-centre and workstation GPUs show.
GPU_CLASSES = (0x0300, 0x0302)
BRIDGE_CLASS = 0x0604

# Bits of the ACS capability and control registers.
ACS_BITS = {
    "SrcValid": 0x01,
    "TransBlk": 0x02,
    "ReqRedir": 0x04,
    "CmpltRedir": 0x08,
    "UpstreamFwd": 0x10,
    "EgressCtrl": 0x20,
    "DirectTrans": 0x40,
}
# Those that send a peer's traffic up to the root complex instead of straight across: requests, completions, and what a
# downstream port forwards upstream. Source validation and blocking of translated requests turn nothing around.
ACS_REDIRECTION = ACS_BITS["ReqRedir"] | ACS_BITS["CmpltRedir"] | ACS_BITS["UpstreamFwd"]

_ADDRESS = re.compile(r"^[0-9a-f]{4,8}:[0-9a-f]{2}:[01][0-9a-f]\.[0-7]$")
_SPEEDS = {1: 2.5, 2: 5.0, 3: 8.0, 4: 16.0, 5: 32.0, 6: 64.0}
_KINDS = {
    0: "endpoint",
    1: "endpoint",
    4: "root port",
    5: "upstream",
    6: "downstream",
    7: "bridge",
    8: "bridge",
    9: "integrated",
    10: "integrated",
}
_CAPABILITY_EXPRESS = 0x10
_EXTENDED = 0x100  # where the extended list begins
_EXTENDED_ACS = 0x000D
_EXTENDED_RESIZABLE_BAR = 0x0015
_BRIDGE_HEADER = 1
_UNSET = 0x20000000  # IORESOURCE_UNSET: the kernel knows the size and found no address
_PREFETCHABLE = 0x2000  # IORESOURCE_PREFETCH
_MEMORY = 0x200  # IORESOURCE_MEM
_HEADER = 64
_WHOLE = 256  # an unprivileged reader gets the first 64 bytes, and of those no capability


@dataclass(frozen=True)
class Link:
    """One end of a PCI Express link. Speeds in GT/s (None: the register holds no known code), widths in lanes.

    A GPU that idles trains its link down to 2.5 GT/s and up again under load; its width stays. `max_*` is what this end
    can do, not what its partner can.
    """

    speed: float | None
    width: int
    max_speed: float | None
    max_width: int
    active: bool | None = None  # the data link layer is up; None: this port does not report it


@dataclass(frozen=True)
class Acs:
    """Access Control Services: where the capability stands, what it can do, what is switched on."""

    offset: int
    capabilities: int
    control: int

    @property
    def redirects(self) -> bool:
        """Whether peer traffic that crosses this port takes the detour over the root complex."""
        return bool(self.control & ACS_REDIRECTION)

    @property
    def enabled(self) -> tuple[str, ...]:
        """The names that `lspci` gives the bits that are on."""
        return tuple(name for name, bit in ACS_BITS.items() if self.control & bit)


@dataclass(frozen=True)
class Bar:
    """One memory region of a device: its size and address in bytes, address 0 where it was given none."""

    index: int
    size: int
    address: int
    prefetchable: bool


@dataclass(frozen=True)
class ResizableBar:
    """What the Resizable BAR capability says of a region: the size that is set and those possible, in bytes."""

    index: int
    size: int
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class Slot:
    """The slot below a port. `present`: a card sits in it; `powered`: its power controller, if it has one, is on."""

    number: int
    present: bool
    powered: bool | None
    hotplug: bool


@dataclass(frozen=True)
class Device:
    """One function. `path` holds the addresses from the root port down to itself; `parent` is the last but one."""

    address: str
    vendor: int
    device: int
    class_code: int  # 24 bits: class, subclass, programming interface
    path: tuple[str, ...]
    kind: str = "endpoint"  # endpoint, root port, upstream, downstream, bridge, integrated, conventional
    driver: str | None = None
    numa_node: int | None = None  # None where the firmware does not say (-1 in sysfs)
    root: str = ""  # the host bridge: domain and first bus, as in pci0000:40
    link: Link | None = None
    bars: tuple[Bar, ...] = ()
    resizable: tuple[ResizableBar, ...] = ()
    acs: Acs | None = None
    slot: Slot | None = None
    # False where the configuration space reads all ones: the device is listed and no longer on the bus.
    answers: bool = True
    # False where only the header could be read (no root): capabilities are then unknown, not absent.
    whole: bool = True
    iommu_group: int | None = None
    iommu_type: str | None = None  # DMA, DMA-FQ, identity, blocked; None without an IOMMU
    buses: tuple[int, int, int] | None = None  # of a bridge: primary, secondary, subordinate

    @property
    def parent(self) -> str | None:
        """The address of the port or bridge right above."""
        return self.path[-2] if len(self.path) > 1 else None

    @property
    def is_gpu(self) -> bool:
        """An NVIDIA display controller."""
        return self.vendor == NVIDIA and self.class_code >> 8 in GPU_CLASSES

    @property
    def memory_bar(self) -> Bar | None:
        """The region through which others reach a GPU's memory, which NVIDIA calls BAR1.

        Its index is 1 where the register before it has 32 bits (GeForce and RTX PRO), and 2 where that has 64 (H200):
        it is the one whose size can be changed, or else the largest.
        """
        large = max((bar for bar in self.resizable if bar.sizes), key=lambda bar: max(bar.sizes), default=None)
        if large:
            return next((bar for bar in self.bars if bar.index == large.index), None)
        return max(self.bars, key=lambda bar: bar.size, default=None)

    @property
    def is_bridge(self) -> bool:
        """A PCI-to-PCI bridge: root port, switch port or conventional."""
        return self.class_code >> 8 == BRIDGE_CLASS


@dataclass(frozen=True)
class Config:
    """What one configuration space holds, before anything of the device's surroundings is known."""

    vendor: int
    device: int
    class_code: int
    kind: str
    link: Link | None
    acs: Acs | None
    resizable: tuple[ResizableBar, ...]
    slot: Slot | None
    answers: bool
    whole: bool
    buses: tuple[int, int, int] | None = None


def decode(config: bytes) -> Config:
    """Decode a configuration space of 64 (no root), 256 (conventional) or 4096 bytes. ValueError: fewer than 64."""
    if len(config) < _HEADER:
        raise ValueError(f"a configuration space has at least {_HEADER} bytes, and this one has {len(config)}")
    if config[:4] == b"\xff\xff\xff\xff":
        return Config(
            0xFFFF, 0xFFFF, 0xFFFFFF, "endpoint", None, None, (), None, answers=False, whole=len(config) >= _WHOLE
        )
    vendor, device = struct.unpack_from("<HH", config, 0)
    class_code = int.from_bytes(config[9:12], "little")
    header = config[0x0E] & 0x7F
    kind = "bridge" if header == _BRIDGE_HEADER else "conventional"
    link, slot = None, None
    express = capability(config, _CAPABILITY_EXPRESS)
    if express is not None:
        flags = _u16(config, express + 2)
        kind = _KINDS.get(flags >> 4 & 0xF, "endpoint")
        link = _link(config, express, kind)
        if flags & 0x100 and kind in ("root port", "downstream"):
            slot = _slot(config, express)
    return Config(
        vendor,
        device,
        class_code,
        kind,
        link,
        _acs(config),
        _resizable(config),
        slot,
        answers=True,
        whole=len(config) >= _WHOLE,
        buses=(config[0x18], config[0x19], config[0x1A]) if header == _BRIDGE_HEADER else None,
    )


def capability(config: bytes, wanted: int) -> int | None:
    """Offset of a capability of the conventional list, or None."""
    if len(config) < _WHOLE or not _u16(config, 0x06) & 0x10:
        return None
    offset = config[0x34] & 0xFC
    seen: set[int] = set()
    while offset >= _HEADER and offset not in seen:
        seen.add(offset)
        if config[offset] == wanted:
            return offset
        offset = config[offset + 1] & 0xFC
    return None


def extended_capability(config: bytes, wanted: int) -> int | None:
    """Offset of a capability of the extended list, which begins at 0x100, or None."""
    offset = _EXTENDED
    seen: set[int] = set()
    while _EXTENDED <= offset <= len(config) - 8 and offset not in seen:
        seen.add(offset)
        header = _u32(config, offset)
        if header in (0, 0xFFFFFFFF):
            return None
        if header & 0xFFFF == wanted:
            return offset
        offset = header >> 20 & 0xFFC
    return None


def _link(config: bytes, express: int, kind: str) -> Link | None:
    if kind == "integrated":  # it has no link
        return None
    capabilities = _u32(config, express + 0x0C)
    status = _u16(config, express + 0x12)
    return Link(
        speed=_SPEEDS.get(status & 0xF),
        width=status >> 4 & 0x3F,
        max_speed=_SPEEDS.get(capabilities & 0xF),
        max_width=capabilities >> 4 & 0x3F,
        active=bool(status & 0x2000) if capabilities & 0x100000 else None,
    )


def _slot(config: bytes, express: int) -> Slot:
    capabilities = _u32(config, express + 0x14)
    return Slot(
        number=capabilities >> 19,
        present=bool(_u16(config, express + 0x1A) & 0x40),
        powered=not _u16(config, express + 0x18) & 0x400 if capabilities & 0x02 else None,
        hotplug=bool(capabilities & 0x40),
    )


def _acs(config: bytes) -> Acs | None:
    offset = extended_capability(config, _EXTENDED_ACS)
    return None if offset is None else Acs(offset, _u16(config, offset + 4), _u16(config, offset + 6))


def _resizable(config: bytes) -> tuple[ResizableBar, ...]:
    offset = extended_capability(config, _EXTENDED_RESIZABLE_BAR)
    if offset is None or offset + 12 > len(config):
        return ()
    found = []
    for number in range(_u32(config, offset + 8) >> 5 & 0x7):
        entry = offset + 4 + 8 * number
        if entry + 8 > len(config):
            break
        capabilities, control = _u32(config, entry), _u32(config, entry + 4)
        # Bits 4 to 31 stand for 1 MiB to 128 TiB; the upper half of the control register goes on from there.
        sizes = [1 << 20 + bit for bit in range(28) if capabilities & 1 << bit + 4]
        sizes += [1 << 48 + bit for bit in range(16) if control & 1 << bit + 16]
        found.append(ResizableBar(control & 0x7, 1 << 20 + (control >> 8 & 0x3F), tuple(sizes)))
    return tuple(found)


def _u16(config: bytes, offset: int) -> int:
    return int.from_bytes(config[offset : offset + 2], "little")


def _u32(config: bytes, offset: int) -> int:
    return int.from_bytes(config[offset : offset + 4], "little")


# --- sysfs ------------------------------------------------------------------------------------------------------------


def read_devices(sys: Path = Path("/sys")) -> dict[str, Device]:
    """Read every PCI function below `sys`, by address. Empty where there is no PCI bus."""
    found = {}
    for entry in sorted((sys / "bus/pci/devices").glob("*")):
        if _ADDRESS.match(entry.name):
            try:
                found[entry.name] = _read_device(entry)
            except FileNotFoundError:  # removed while we looked
                continue
    return found


def _read_device(entry: Path) -> Device:
    place = entry.resolve()
    config = decode((entry / "config").read_bytes()[:4096].ljust(64, b"\xff"))
    vendor, device, class_code = (int(_text(entry / name) or "0", 16) for name in ("vendor", "device", "class"))
    node = int(_text(entry / "numa_node") or "-1")
    group = entry / "iommu_group"
    return Device(
        address=entry.name,
        vendor=vendor,
        device=device,
        class_code=class_code,
        path=tuple(part for part in place.parts if _ADDRESS.match(part)),
        kind=config.kind,
        driver=(entry / "driver").resolve().name if (entry / "driver").exists() else None,
        numa_node=node if node >= 0 else None,
        root=next((part for part in place.parts if re.match(r"^pci[0-9a-f]{4,8}:[0-9a-f]{2}$", part)), ""),
        link=config.link,
        bars=parse_resource(_text(entry / "resource")),
        resizable=config.resizable,
        acs=config.acs,
        slot=config.slot,
        answers=config.answers,
        whole=config.whole,
        iommu_group=int(group.resolve().name) if group.exists() else None,
        iommu_type=_text(group / "type") or None,
        buses=config.buses,
    )


def parse_resource(text: str) -> tuple[Bar, ...]:
    """Read sysfs' `resource`: a line each region with first and last address and flags; the first six are the BARs."""
    bars = []
    for index, line in enumerate(text.splitlines()[:6]):
        first, last, flags = (int(word, 16) for word in line.split())
        if last > first and flags & _MEMORY:
            bars.append(Bar(index, last - first + 1, 0 if flags & _UNSET else first, bool(flags & _PREFETCHABLE)))
    return tuple(bars)


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


# --- What the findings ask --------------------------------------------------------------------------------------------


def gpus(devices: dict[str, Device]) -> list[Device]:
    """List the NVIDIA GPUs by their addresses, which is the driver's order under CUDA_DEVICE_ORDER=PCI_BUS_ID."""
    return [device for _, device in sorted(devices.items()) if device.is_gpu]


def bridges_on_paths(devices: dict[str, Device], wanted: list[Device]) -> list[Device]:
    """Every port and bridge between the root complex and the given devices, each once, in the order of addresses."""
    addresses = {address for device in wanted for address in device.path[:-1]}
    return [devices[address] for address in sorted(addresses) if address in devices]
