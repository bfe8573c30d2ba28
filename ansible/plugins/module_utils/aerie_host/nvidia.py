"""What NVIDIA's driver says of itself and its GPUs: in /proc, by `nvidia-smi`, and in the kernel's log."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

FALLEN_OFF_THE_BUS = 79
# PCI identifiers of the GPUs that Aerie's figures are for: sm_120, 96 GB, PCIe 5.0 x16.
RTX_PRO_6000_BLACKWELL = {0x2BB1: "Workstation Edition", 0x2BB4: "Max-Q Workstation Edition", 0x2BB5: "Server Edition"}

_VERSION = re.compile(r"^NVRM version: +(?P<flavour>.*?) +(?P<version>\d+\.\d+(?:\.\d+)?)\b", re.MULTILINE)
_BUS = r"(?P<address>(?:[0-9a-fA-F]{4,8}:)?[0-9a-fA-F]{2}:[0-9a-fA-F]{2}(?:\.[0-7])?)"
_XID = re.compile(rf"NVRM: Xid \((?:PCI:)?{_BUS}\): (?P<xid>\d+),? ?(?P<text>.*)")
# What the driver says of one GPU, as far as it is bad news: it also tells serial numbers and the like in this form.
_OF_GPU = re.compile(rf"NVRM: GPU (?:at )?{_BUS}:? (?P<text>.*(?:fallen off|lost|failed|error).*)", re.IGNORECASE)
# One message over three lines, of which the first has the address. Such a loss has no Xid (NVIDIA/NVSentinel#155).
_THREE_LINES = re.compile(rf"NVRM: The NVIDIA GPU {_BUS}\s*$")
_BAD_BAR = re.compile(rf"NVRM: (?P<text>BAR\d is .*?) \(PCI:{_BUS}\)")
_PORT = re.compile(rf"pcieport {_BUS}: (?P<text>(?:AER|pciehp|DPC|PCIe Bus Error).*)")
_WHEN = re.compile(r"^(\d{4}-\d\d-\d\dT[\d:.,]+(?:[+-]\d\d:?\d\d|Z)?) ")
_LOST = re.compile(r"fallen off the bus|GPU is lost|RmInitAdapter failed|GPU has been removed", re.IGNORECASE)


@dataclass(frozen=True)
class Driver:
    """The kernel module that is loaded. `branch` is the first number of its version."""

    version: str
    open: bool

    @property
    def branch(self) -> str:
        """The release branch, as in nvidia-open-595."""
        return self.version.partition(".")[0]


@dataclass(frozen=True)
class ServedGpu:
    """A GPU as the driver reports it. Memory in MiB; None is what only `nvidia-smi` tells, where it was not there."""

    address: str
    name: str
    minor: int | None = None
    vram_mib: int | None = None
    bar1_mib: int | None = None
    idle: bool | None = None  # as the driver says; an H200 rests in P0, where a GeForce works
    utilization: int | None = None  # per cent
    max_generation: int | None = None  # of this GPU in this slot
    generation: int | None = None
    max_width: int | None = None
    width: int | None = None
    persistence: bool | None = None


@dataclass(frozen=True)
class Smi:
    """One answer of `nvidia-smi -q -x`: GPUs by address, and what it complained of instead, or besides."""

    driver: str
    gpus: tuple[ServedGpu, ...]
    problem: str = ""


@dataclass(frozen=True)
class KernelEvent:
    """A line of the kernel's about a GPU or the port above one. `address` is full where the line had a function."""

    at: str
    address: str
    text: str
    xid: int | None = None

    @property
    def lost(self) -> bool:
        """The GPU is gone, or the driver could not bring it up."""
        return self.xid == FALLEN_OFF_THE_BUS or _LOST.search(self.text) is not None


def parse_version(text: str) -> Driver | None:
    """Read /proc/driver/nvidia/version. None where it says nothing that is known."""
    match = _VERSION.search(text)
    return Driver(match["version"], "Open Kernel Module" in match["flavour"]) if match else None


def parse_information(text: str) -> ServedGpu | None:
    """Read /proc/driver/nvidia/gpus/<address>/information, which is there also without `nvidia-smi`."""
    fields = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in text.splitlines())}
    if "Bus Location" not in fields:
        return None
    minor = fields.get("Device Minor", "")
    return ServedGpu(address(fields["Bus Location"]), fields.get("Model", ""), int(minor) if minor.isdigit() else None)


def parse_smi(text: str) -> Smi:
    """Read `nvidia-smi -q -x`. A lost GPU makes it say so in plain lines, in place of the document or before it."""
    start = text.find("<?xml")
    if start < 0:
        start = text.find("<nvidia_smi_log")
    problem = " ".join((text if start < 0 else text[:start]).split())
    if start < 0:
        return Smi("", (), problem)
    try:
        # Its type declaration names a file that nobody has; without it there are no entities either.
        log = ET.fromstring(re.sub(r"<!DOCTYPE[^>]*>", "", text[start:]))  # noqa: S314
    except ET.ParseError as error:
        return Smi("", (), problem or f"not the XML of nvidia-smi: {error}")
    return Smi(_said(log, "driver_version"), tuple(_served(gpu) for gpu in log.iter("gpu") if gpu.get("id")), problem)


def _served(gpu: ET.Element) -> ServedGpu:
    minor = _said(gpu, "minor_number")
    persistence = _said(gpu, "persistence_mode")
    return ServedGpu(
        address=address(gpu.get("id", "")),
        name=_said(gpu, "product_name"),
        minor=int(minor) if minor.isdigit() else None,
        vram_mib=_number(gpu, "fb_memory_usage/total"),
        bar1_mib=_number(gpu, "bar1_memory_usage/total"),
        idle=_idle(gpu),
        utilization=_number(gpu, "utilization/gpu_util"),
        max_generation=_number(gpu, "pci/pci_gpu_link_info/pcie_gen/max_link_gen"),
        generation=_number(gpu, "pci/pci_gpu_link_info/pcie_gen/current_link_gen"),
        max_width=_number(gpu, "pci/pci_gpu_link_info/link_widths/max_link_width"),
        width=_number(gpu, "pci/pci_gpu_link_info/link_widths/current_link_width"),
        persistence={"Enabled": True, "Disabled": False}.get(persistence),
    )


def _idle(gpu: ET.Element) -> bool | None:
    """Read a field that older drivers call by another name."""
    for reasons in ("clocks_event_reasons/clocks_event_reason", "clocks_throttle_reasons/clocks_throttle_reason"):
        if said := _said(gpu, f"{reasons}_gpu_idle"):
            return said == "Active"
    return None


def _said(element: ET.Element, path: str) -> str:
    return (element.findtext(path) or "").strip()


def _number(element: ET.Element, path: str) -> int | None:
    match = re.match(r"\d+", _said(element, path))  # "97887 MiB", "16x", "0 %", "N/A"
    return int(match.group()) if match else None


def address(text: str) -> str:
    """Write an address as sysfs does: 0000:03:00.0 for `00000000:03:00.0` (nvidia-smi) and `0000:03:00` (kernel)."""
    head, _, function = text.strip().lower().partition(".")
    *domain, bus, device = head.split(":")
    return f"{int(domain[0], 16) if domain else 0:04x}:{bus}:{device}.{function or '0'}"


def parse_topology(text: str) -> dict[tuple[int, int], str]:
    """Read `nvidia-smi topo -m`: the relation (PIX, PXB, PHB, NODE, SYS, NV18 ...) of each pair of GPUs, by number."""
    relations: dict[tuple[int, int], str] = {}
    columns: list[int] = []
    for line in re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines():
        words = line.split()
        if not columns and words and re.fullmatch(r"GPU0", words[0]):
            columns = [int(word[3:]) for word in words if re.fullmatch(r"GPU\d+", word)]
        elif columns and words and re.fullmatch(r"GPU\d+", words[0]):
            row = int(words[0][3:])
            said = words[1 : len(columns) + 1]
            relations |= {(row, column): word for column, word in zip(columns, said, strict=False) if column != row}
    return relations


def parse_kernel(lines: Iterable[str]) -> tuple[KernelEvent, ...]:
    """Pick the driver's and the ports' words out of `journalctl -k` or `dmesg`, in order."""
    found: list[KernelEvent] = []
    parts: tuple[str, str, int] | None = (
        None  # time and address of a message over three lines, and how many are to come
    )
    for line in lines:
        when = _WHEN.match(line)
        at = when[1] if when else ""
        if match := _XID.search(line):
            found.append(KernelEvent(at, address(match["address"]), match["text"].strip(), int(match["xid"])))
        elif match := _THREE_LINES.search(line):
            parts = (at, address(match["address"]), 2)
        elif parts and "fallen off the bus" in line:
            found.append(KernelEvent(parts[0], parts[1], "fallen off the bus and is not responding to commands"))
            parts = None
        elif match := _OF_GPU.search(line) or _BAD_BAR.search(line) or _PORT.search(line):
            found.append(KernelEvent(at, address(match["address"]), match["text"].strip()))
        elif parts:
            parts = (*parts[:2], parts[2] - 1) if parts[2] > 1 else None
    return tuple(found)
