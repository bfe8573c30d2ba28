"""Write what a described machine shows below /sys, /proc and /dev, so that everything that reads it there can be tried.

usage: build.py MACHINE DIRECTORY [--driver]

MACHINE is a file of machines/, without its suffix. DIRECTORY gets `sys`, `proc` and `dev`, as far as GPUs and their
surroundings are concerned, and `driver/`, what the driver adds once it is loaded; with --driver that is added at once.
The program stub-machine mounts them over a container's own.

Configuration spaces are encoded here and decoded by aerie_host.pci, which is tested against lspci on the same bytes.
"""

from __future__ import annotations

import argparse
import os
import shutil
import struct
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
BOOTED = "2026-11-02T07:14:03.120045+00:00"
SPEEDS = {2.5: 1, 5.0: 2, 8.0: 3, 16.0: 4, 32.0: 5, 64.0: 6}
KINDS = {"endpoint": 0, "root port": 4, "upstream": 5, "downstream": 6}
ACS = {
    "SrcValid": 1,
    "TransBlk": 2,
    "ReqRedir": 4,
    "CmpltRedir": 8,
    "UpstreamFwd": 16,
    "EgressCtrl": 32,
    "DirectTrans": 64,
}
EXPRESS, RESIZABLE, ACS_OFFSET = 0x60, 0x134, 0x2A0


def machine(name: str) -> dict[str, Any]:
    """Read a description, and put each device's shape under what the device says itself."""
    shapes = yaml.safe_load((HERE / "shapes.yml").read_text())
    described: dict[str, Any] = yaml.safe_load((HERE / "machines" / f"{name}.yml").read_text())
    devices: list[dict[str, Any]] = []

    def descend(entries: list[dict[str, Any]], path: list[str], inherited: dict[str, Any]) -> None:
        for entry in entries:
            own = {key: value for key, value in entry.items() if key != "below"}
            below = {**inherited, **{key: own[key] for key in ("numa_node", "acs_control") if key in own}}
            device = {**shapes[entry["is"]], **below, **described.get("all", {}).get(entry["is"], {}), **own}
            device["path"] = [*path, entry["at"]]
            devices.append(device)
            descend(entry.get("below", []), device["path"], below)
            # Both ends of a link have one speed; nothing below means no link.
            if device["kind"] in ("root port", "downstream") and "link" not in own:
                child = next((other for other in devices if other["path"][:-1] == device["path"]), None)
                now = {key: child["link"][key] for key in ("speed", "width")} if child else {"speed": 2.5, "width": 0}
                device["link"] = {**device["link"], **now}

    for root, entries in described["buses"].items():
        descend(entries, [root], {})
    # As firmware does, each GPU gets a window of its own.
    for number, device in enumerate(device for device in devices if device["is"].startswith("gpu")):
        device["bars"] = [
            {**bar, "address": bar["address"] + number * bar.get("apart", 0)} for bar in device.get("bars", [])
        ]
    return {**described, "devices": devices}


# --- Configuration spaces ---------------------------------------------------------------------------------------------


def config_space(device: dict[str, Any]) -> bytes:
    """Encode the 4096 bytes of a device: header, PCI Express, and of the extended list AER, Resizable BAR, ACS."""
    if device.get("fallen"):
        return b"\xff" * 4096
    space = bytearray(4096)
    kind = device["kind"]
    bridge = kind != "endpoint"
    struct.pack_into("<HHHH", space, 0, device["vendor"], device["device"], 0x0406, 0x0010)
    space[8] = device.get("revision", 1)
    space[9:12] = device["class"].to_bytes(3, "little")
    space[0x0E] = int(bridge)
    space[0x34] = EXPRESS
    if bridge:
        space[0x18:0x1B] = bytes(device["buses"])
    for bar in [] if bridge else device.get("bars", []):
        low = (
            (bar["address"] & 0xFFFFFFF0) | (8 if bar.get("prefetchable") else 0) | (4 if bar.get("wide", True) else 0)
        )
        struct.pack_into("<I", space, 0x10 + 4 * bar["index"], low)
        if bar.get("wide", True):
            struct.pack_into("<I", space, 0x14 + 4 * bar["index"], bar["address"] >> 32)
    _express(space, device, kind)
    following = [
        offset for offset, there in ((RESIZABLE, "resizable" in device), (ACS_OFFSET, "acs" in device)) if there
    ]
    space[0x100:0x104] = struct.pack("<I", 0x0001 | 2 << 16 | (following[0] if following else 0) << 20)
    for offset, after in zip(following, [*following, 0][1:], strict=True):
        if offset == ACS_OFFSET:
            bits = [sum(ACS[name] for name in names) for names in (device["acs"], device.get("acs_control", []))]
            struct.pack_into("<IHH", space, offset, 0x000D | 1 << 16 | after << 20, bits[0], bits[1] & bits[0])
        else:
            struct.pack_into("<I", space, offset, 0x0015 | 1 << 16 | after << 20)
            for number, bar in enumerate(device["resizable"]):
                sizes = sum(1 << (mib.bit_length() - 1) + 4 for mib in bar["sizes_mib"])
                size = bar["size_mib"].bit_length() - 1
                control = bar["index"] | len(device["resizable"]) << 5 | size << 8
                struct.pack_into("<II", space, offset + 4 + 8 * number, sizes, control)
    return bytes(space)


def _express(space: bytearray, device: dict[str, Any], kind: str) -> None:
    link, slot = device["link"], device.get("slot")
    active = link.get("width", 0) > 0
    flags = 2 | KINDS[kind] << 4 | (0x100 if slot is not None else 0)
    struct.pack_into("<BBH", space, EXPRESS, 0x10, 0, flags)
    reporting = 0x100000 if kind in ("root port", "downstream") else 0
    capabilities = SPEEDS[link["max_speed"]] | link["max_width"] << 4 | reporting
    status = SPEEDS[link["speed"]] | link["width"] << 4 | (0x2000 if reporting and active else 0)
    struct.pack_into("<I", space, EXPRESS + 0x0C, capabilities)
    struct.pack_into("<H", space, EXPRESS + 0x12, status)
    if slot is not None:
        struct.pack_into("<I", space, EXPRESS + 0x14, slot << 19 | 0x60)
        struct.pack_into("<H", space, EXPRESS + 0x1A, 0x40 if device.get("present", active) else 0)
    struct.pack_into("<I", space, EXPRESS + 0x2C, ((1 << SPEEDS[link["max_speed"]]) - 1) << 1)


# --- The trees --------------------------------------------------------------------------------------------------------


def build(name: str, directory: Path, *, driver: bool = False) -> dict[str, Any]:
    """Write machine `name` below `directory`, which must be new or empty, and return its description."""
    described = machine(name)
    _pci(described, directory)
    _system(described, directory)
    _driver(described, directory / "driver")
    if driver:
        shutil.copytree(directory / "driver", directory, symlinks=True, dirs_exist_ok=True)
    return described


def _write(path: Path, text: str | bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode() if isinstance(text, str) else text)


def _link(path: Path, target: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(os.path.relpath(target, path.parent))


def _pci(described: dict[str, Any], directory: Path) -> None:
    bus = directory / "sys/bus/pci"
    groups = directory / "sys/kernel/iommu_groups"
    (bus / "devices").mkdir(parents=True)
    groups.mkdir(parents=True)
    (directory / "sys/class/iommu").mkdir(parents=True)
    if described.get("iommu"):
        _write(directory / "sys/class/iommu/ivhd0/amd-iommu/cap", "0\n")
    for number, device in enumerate(described["devices"]):
        # On a real host it is below /sys/devices, which takes no new directories; the last parts are the same.
        place = bus / "tree" / "/".join(device["path"])
        _buses(device, described["devices"])
        _write(place / "config", config_space(device))
        for name, value in (("vendor", device["vendor"]), ("device", device["device"])):
            _write(place / name, f"0x{value:04x}\n")
        _write(place / "class", f"0x{device['class']:06x}\n")
        _write(place / "numa_node", f"{device.get('numa_node', -1)}\n")
        _write(place / "irq", "0\n")
        _write(place / "resource", _resource(device))
        if device["kind"] != "endpoint":
            _write(bus / "drivers/pcieport/bind", "")
            _link(place / "driver", bus / "drivers/pcieport")
        elif "driver" in device:
            _write(bus / "drivers" / device["driver"] / "bind", "")
            _link(place / "driver", bus / "drivers" / device["driver"])
        if described.get("iommu"):
            _write(groups / str(number) / "type", described["iommu"] + "\n")
            _link(place / "iommu_group", groups / str(number))
        _link(bus / "devices" / device["at"], place)
        if "slot" in device:
            domain, secondary = device["at"][:4], device["buses"][1]
            _write(bus / "slots" / str(device["slot"]) / "address", f"{domain}:{secondary:02x}:00\n")


def _buses(device: dict[str, Any], devices: list[dict[str, Any]]) -> None:
    """Give a bridge its bus numbers, by what is below it."""
    own = int(device["at"].split(":")[1], 16)
    below = [int(other["at"].split(":")[1], 16) for other in devices if device["at"] in other["path"][:-1]]
    device.setdefault("buses", [own, min(below, default=device.get("secondary", 0)), max(below, default=0)])


def _resource(device: dict[str, Any]) -> str:
    lines = ["0x0000000000000000 0x0000000000000000 0x0000000000000000"] * 7
    for bar in device.get("bars", []):
        flags = 0x200 | (0x142000 if bar.get("prefetchable") else 0x40000) | (0x100000 if bar.get("wide", True) else 0)
        if not bar["address"]:
            flags |= 0x20000000
        last = bar["address"] + (bar["size_mib"] << 20) - 1
        lines[bar["index"]] = f"0x{bar['address']:016x} 0x{last:016x} 0x{flags:016x}"
    return "\n".join(lines) + "\n"


def _system(described: dict[str, Any], directory: Path) -> None:
    _write(directory / "proc/cmdline", described["command_line"] + "\n")
    _write(directory / "proc/cpuinfo", _cpuinfo(described["cpu"]))
    nodes = described["numa"]
    _write(directory / "proc/meminfo", _meminfo(sum(node["gib"] for node in nodes)))
    for number, node in enumerate(nodes):
        place = directory / f"sys/devices/system/node/node{number}"
        _write(place / "cpulist", node["cpus"] + "\n")
        _write(place / "meminfo", f"Node {number} MemTotal:       {node['gib'] << 20} kB\n")
        _write(place / "distance", " ".join("10" if number == other else "32" for other in range(len(nodes))) + "\n")
    _write(directory / "sys/devices/system/node/online", f"0-{len(nodes) - 1}\n" if len(nodes) > 1 else "0\n")
    _write(directory / "proc/sys/kernel/numa_balancing", f"{int(len(nodes) > 1)}\n")
    _write(directory / "sys/module/pcie_aspm/parameters/policy", "[default] performance powersave powersupersave \n")
    if "secure_boot" in described:
        variable = b"\x06\0\0\0" + bytes([described["secure_boot"]])
        _write(directory / "sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c", variable)
    _write(directory / "sys/firmware/dmi/tables/DMI", _smbios(described["board"]))
    for name in ("kernel_log", "kernel_log_before"):
        # A kernel that has booted has said something.
        lines = [f"{BOOTED} kernel: Command line: {described['command_line']}", *described.get(name, [])]
        _write(directory / f"{name}", "".join(line + "\n" for line in lines))


def _smbios(board: dict[str, Any]) -> bytes:
    """Encode the structures 0 (firmware), 1 (system), 2 (board), 9 (slots) and 127 (end) of DMTF DSP0134."""

    def structure(kind: int, body: bytes, *strings: str) -> bytes:
        text = b"".join(string.encode() + b"\0" for string in strings) or b"\0"
        return struct.pack("<BBH", kind, 4 + len(body), 0) + body + text + b"\0"

    table = structure(
        0, b"\x01\x02\0\0\x03" + bytes(9), board["maker"], board["bios"]["version"], board["bios"]["date"]
    )
    table += structure(1, b"\x01\x02" + bytes(21), board["maker"], board["product"])
    table += structure(2, b"\x01\x02" + bytes(9), board["maker"], board["product"] + " board")
    for address, name in board.get("slots", {}).items():
        segment, bus, place = address.split(":")
        device, function = place.split(".")
        at = struct.pack("<HBB", int(segment, 16), int(bus, 16), int(device, 16) << 3 | int(function))
        table += structure(9, b"\x01\xb6\x0d\x04\x04\0\0\x0c\x01" + at, name)
    return table + structure(127, b"")


def _cpuinfo(cpu: dict[str, Any]) -> str:
    return "".join(
        f"processor\t: {number}\nvendor_id\t: {cpu['vendor']}\nmodel name\t: {cpu['model']}\n"
        f"cpu family\t: {cpu['family']}\n"
        f"physical id\t: {number % (cpu['sockets'] * cpu['cores']) // cpu['cores']}\ncpu cores\t: {cpu['cores']}\n\n"
        for number in range(cpu["sockets"] * cpu["cores"] * cpu["threads"])
    )


def _meminfo(gib: int) -> str:
    total = gib << 20
    return f"MemTotal:       {total} kB\nMemFree:        {total // 2} kB\nMemAvailable:   {total * 9 // 10} kB\n"


def _driver(described: dict[str, Any], directory: Path) -> None:
    """Write what appears with the driver: /proc/driver/nvidia, its name at each GPU, nodes, nvidia-smi's words."""
    directory.mkdir()
    driver, model = described["driver"], described["gpu"]
    flavour = "NVIDIA UNIX Open Kernel Module for x86_64" if driver["open"] else "NVIDIA UNIX x86_64 Kernel Module"
    _write(
        directory / "proc/driver/nvidia/version",
        f"NVRM version: {flavour}  {driver['version']}  Release Build  (builder@host)\n"
        "GCC version:  gcc version 12.2.0\n",
    )
    _write(directory / "sys/bus/pci/drivers/nvidia/bind", "")
    (directory / "proc/driver/nvidia/gpus").mkdir()
    gpus = [device for device in described["devices"] if device["is"].startswith("gpu")]
    for minor, device in enumerate(gpus):
        place = directory / "sys/bus/pci/tree" / "/".join(device["path"])
        _link(place / "driver", directory / "sys/bus/pci/drivers/nvidia")
        _write(
            directory / "proc/driver/nvidia/gpus" / device["at"] / "information",
            f"Model: \t\t {model['name']}\nIRQ:   \t\t {100 + minor}\n"
            f"GPU UUID: \t GPU-00000000-0000-0000-0000-{minor:012d}\nVideo BIOS: \t {model['vbios']}\n"
            f"Bus Type: \t PCIe\nBus Location: \t {device['at']}\nDevice Minor: \t {minor}\n",
        )
        _write(directory / f"dev/nvidia{minor}", "")
    for name in ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools"):
        _write(directory / "dev" / name, "")
    lost = [device["at"] for device in gpus if device.get("fallen")]
    document = (
        f"Unable to determine the device handle for GPU{lost[0]}: Unknown Error\n" if lost else _smi(described, gpus)
    )
    names = "".join(
        f"GPU {minor}: {model['name']} (UUID: GPU-00000000-0000-0000-0000-{minor:012d})\n" for minor in range(len(gpus))
    )
    _write(directory / "nvidia-smi/q.xml", document)
    _write(directory / "nvidia-smi/list", document if lost else names)
    rows = [row.split() for row in described.get("topology", [])]
    header = (
        "\t" + "\t".join(f"GPU{number}" for number in range(len(rows))) + "\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\n"
    )
    matrix = "".join(f"GPU{number}\t" + "\t".join(row) + "\t0-127\t0\t\tN/A\n" for number, row in enumerate(rows))
    _write(directory / "nvidia-smi/topo", header + matrix)


def _smi(described: dict[str, Any], gpus: list[dict[str, Any]]) -> str:
    """`nvidia-smi -q -x`, as far as anybody reads it."""
    model = described["gpu"]
    entries = "".join(
        f"""\t<gpu id="0000{device["at"].upper()}">
\t\t<product_name>{model["name"]}</product_name>
\t\t<product_architecture>Blackwell</product_architecture>
\t\t<persistence_mode>Enabled</persistence_mode>
\t\t<uuid>GPU-00000000-0000-0000-0000-{minor:012d}</uuid>
\t\t<minor_number>{minor}</minor_number>
\t\t<vbios_version>{model["vbios"]}</vbios_version>
\t\t<pci>
\t\t\t<pci_gpu_link_info>
\t\t\t\t<pcie_gen>
\t\t\t\t\t<max_link_gen>{SPEEDS[device["link"]["max_speed"]]}</max_link_gen>
\t\t\t\t\t<current_link_gen>{SPEEDS[device["link"]["speed"]]}</current_link_gen>
\t\t\t\t</pcie_gen>
\t\t\t\t<link_widths>
\t\t\t\t\t<max_link_width>{device["link"]["max_width"]}x</max_link_width>
\t\t\t\t\t<current_link_width>{device["link"]["width"]}x</current_link_width>
\t\t\t\t</link_widths>
\t\t\t</pci_gpu_link_info>
\t\t</pci>
\t\t<performance_state>{device.get("state", "P8")}</performance_state>
\t\t<clocks_event_reasons>
\t\t\t<clocks_event_reason_gpu_idle>{device.get("idle", "Active")}</clocks_event_reason_gpu_idle>
\t\t</clocks_event_reasons>
\t\t<fb_memory_usage>
\t\t\t<total>{model["vram_mib"]} MiB</total>
\t\t</fb_memory_usage>
\t\t<bar1_memory_usage>
\t\t\t<total>{next((bar["size_mib"] for bar in device["bars"] if bar["index"] == 1), 0)} MiB</total>
\t\t</bar1_memory_usage>
\t\t<utilization>
\t\t\t<gpu_util>{device.get("utilization", 0)} %</gpu_util>
\t\t</utilization>
\t</gpu>
"""
        for minor, device in enumerate(gpus)
    )
    return f"""<?xml version="1.0" ?>
<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v13.dtd">
<nvidia_smi_log>
\t<driver_version>{described["driver"]["version"]}</driver_version>
\t<cuda_version>13.2</cuda_version>
\t<attached_gpus>{len(gpus)}</attached_gpus>
{entries}</nvidia_smi_log>
"""


def main() -> None:
    """Build as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("machine", choices=sorted(path.stem for path in (HERE / "machines").glob("*.yml")))
    parser.add_argument("directory", type=Path)
    parser.add_argument("--driver", action="store_true")
    arguments = parser.parse_args()
    build(arguments.machine, arguments.directory, driver=arguments.driver)


if __name__ == "__main__":
    main()
