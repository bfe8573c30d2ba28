"""One host, as far as serving with its GPUs depends on it: read once, then only looked at.

`read_machine` is the only part that touches the host. It changes nothing and waits for nobody for long. Where something
cannot be read (no root, no such program) the field stays None or empty, which is another thing than a bad value.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import platform
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import nvidia, reading, smbios
from .pci import Device, bridges_on_paths, gpus, read_devices

SECURE_BOOT = "sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c"
# File systems whose files are on another machine: whoever touches them may have to wait for it.
REMOTE = ("nfs", "nfs4", "cifs", "smb3", "ceph", "lustre", "beegfs", "glusterfs", "9p", "virtiofs")
_CAP_SYS_RESOURCE = 1 << 24
_MOUNT_FIELDS = 6  # before the hyphen, at least
_TURIN_FAMILY = 26  # AMD's family 1Ah: Zen 5
# By the role that holds them back: packages whose upgrade pulls a running host apart.
HELD_BY = {
    "nvidia_container_toolkit": re.compile(r"(lib)?nvidia-container-?"),
    "nvidia_driver": re.compile(
        r"linux-(image|headers|modules|generic|lowlatency|virtual|nvidia|cloud|kbuild|hwe)|cuda-drivers"
        r"|libcuda(1|debugger)|libnv(cuvid|optix)|(?!.*nvidia-cu(da|dnn)).*nvidia"
    ),
    "docker": re.compile(r"(docker\.io|docker-cli|docker-ce|docker-ce-cli|containerd|containerd\.io|runc)$"),
}

# Runs a program, and returns its exit code, or one of these, and what it printed on both outputs.
Run = Callable[[Sequence[str]], tuple[int, str]]
NOT_THERE, DID_NOT_END = 127, 124


@dataclass(frozen=True)
class NumaNode:
    """One NUMA node: its CPUs as the kernel lists them (0-31,64-95), memory in bytes, distances to all nodes.

    A socket may have several (NPS of EPYC, SNC of Xeon); one without CPUs, as a memory expander, is of none.
    """

    number: int
    cpus: str
    memory: int
    distances: tuple[int, ...] = ()
    socket: int | None = None


@dataclass(frozen=True)
class Storage:
    """The directory with the models. Sizes in bytes, the rate in bytes a second; `used_by_models` is there already."""

    path: str
    exists: bool = False
    mount: str = ""
    filesystem: str = ""
    free: int | None = None
    used_by_models: int = 0
    rate: float | None = None
    rate_of: str = ""  # the file or device that was read, or why none was


@dataclass(frozen=True)
class Limits:
    """What a container can get at most: of dockerd where it runs, else of the first process. None: unlimited."""

    of: str
    nofile: int | None
    memlock: int | None
    can_raise: bool  # CAP_SYS_RESOURCE: limits above the own


@dataclass(frozen=True)
class Docker:
    """The engine that answers. `problem` says why none does."""

    version: str = ""
    compose: str = ""
    root: str = ""
    cdi: tuple[str, ...] = ()  # the devices that the engine itself has found
    problem: str = ""
    disabled: bool = False  # by itself no boot starts it


@dataclass(frozen=True)
class Toolkit:
    """NVIDIA's container toolkit, and the CDI specification that it wrote: names such as nvidia.com/gpu=all."""

    version: str = ""
    devices: tuple[str, ...] = ()
    specification: str = ""


@dataclass(frozen=True)
class Machine:
    """What the findings, the topology and the units need to know. Fields that could not be read are None or empty."""

    hostname: str = ""
    distribution: str = ""  # "Debian 12", "Ubuntu 24.04"
    architecture: str = ""
    kernel: str = ""
    newest_kernel: str = ""  # of those in /boot
    command_line: str = ""
    virtual: bool = False  # a guest, to which the hypervisor shows what it wants
    uefi: bool | None = None
    secure_boot: bool | None = None
    board: smbios.Smbios = field(default_factory=smbios.Smbios)
    root: bool = False  # read as root
    cpu_vendor: str = ""
    cpu_model: str = ""
    cpu_family: int = 0
    logical_cpus: int = 0
    sockets: int = 0
    numa: tuple[NumaNode, ...] = ()
    memory: int = 0
    devices: dict[str, Device] = field(default_factory=dict)
    driver: nvidia.Driver | None = None
    smi: nvidia.Smi | None = None
    served: tuple[nvidia.ServedGpu, ...] = ()  # by `nvidia-smi`, else by /proc/driver/nvidia
    driver_topology: dict[tuple[int, int], str] = field(default_factory=dict)
    events: tuple[nvidia.KernelEvent, ...] | None = None  # since this boot; None: the log could not be read
    events_before: tuple[nvidia.KernelEvent, ...] = ()  # of the boot before
    iommu_present: bool = False
    numa_balancing: bool | None = None
    governors: tuple[str, ...] = ()
    aspm: str = ""
    cgroup: int | None = None
    shm: int | None = None
    limits: Limits | None = None
    time: float = 0.0  # seconds since the epoch
    time_synchronized: bool | None = None
    storage: Storage | None = None
    held: dict[str, bool] | None = None  # of the installed packages of HELD_BY; None without dpkg
    docker: Docker = field(default_factory=Docker)
    toolkit: Toolkit = field(default_factory=Toolkit)

    @property
    def gpus(self) -> list[Device]:
        """The NVIDIA GPUs on the PCI bus, whether or not a driver serves them."""
        return gpus(self.devices)

    @property
    def bridges(self) -> list[Device]:
        """Every port on the GPUs' paths."""
        return bridges_on_paths(self.devices, self.gpus)

    @property
    def turin(self) -> bool:
        """An EPYC of the Turin generation (9005), whose root complexes need a ring of their own (NVIDIA/nccl#2127)."""
        return self.cpu_vendor == "AuthenticAMD" and self.cpu_family == _TURIN_FAMILY and "EPYC" in self.cpu_model

    def slot(self, address: str) -> str:
        """Name what somebody looks for: the slot's name on the board, and its number; empty if unknown."""
        bus = int(address.split(":")[1], 16)
        ports = [
            port
            for port in self.devices.values()
            if port.buses and port.buses[1] == bus and port.address[:4] == address[:4]
        ]
        parent = self.devices[address].parent if address in self.devices else None
        place = [address, *([parent] if parent else []), *(port.address for port in ports)]
        name = next((self.board.slots[at] for at in place if self.board.slots.get(at)), "")
        number = next((self.devices[at].slot for at in place if at in self.devices and self.devices[at].slot), None)
        return " ".join(part for part in (name, f"slot {number.number}" if number and number.number else "") if part)

    def to_json(self) -> dict[str, Any]:
        """Plain values for JSON; a pair of GPUs becomes `0-1`."""
        plain = {item.name: _plain(getattr(self, item.name)) for item in dataclasses.fields(self)}
        return plain | {"driver_topology": {f"{a}-{b}": said for (a, b), said in self.driver_topology.items()}}


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {item.name: _plain(getattr(value, item.name)) for item in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


def run(arguments: Sequence[str], seconds: float = 20) -> tuple[int, str]:
    """Run a program in the C locale, for no longer than `seconds`: `nvidia-smi` can wait for a lost GPU for ever."""
    environment = {**os.environ, "LC_ALL": "C.UTF-8"}
    with tempfile.TemporaryFile() as output:
        try:
            process = subprocess.Popen(
                list(arguments), stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=environment
            )
        except OSError:
            return NOT_THERE, ""
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # what hangs in the driver does not end
                process.wait(1)
            return DID_NOT_END, f"{arguments[0]} did not answer in {seconds:g} s"
        output.seek(0)
        return code, output.read().decode(errors="replace")


def read_machine(root: Path = Path("/"), run: Run = run, data: str = "/data", read_seconds: float = 0) -> Machine:
    """Read the host below `root`. `read_seconds`: how long to measure the read rate of `data` (0: not at all)."""
    cpuinfo = _text(root / "proc/cpuinfo")
    cpu = _cpu(cpuinfo)
    code, answer = run(["nvidia-smi", "-q", "-x"])
    smi = nvidia.parse_smi(answer) if code != NOT_THERE else None
    events, before = _kernel_log(run)
    release = dict(re.findall(r'^(\w+)="?(.*?)"?$', _text(root / "etc/os-release"), re.MULTILINE))
    sys = root / "sys"
    return Machine(
        hostname=platform.node(),
        distribution=f"{release.get('NAME', '').partition(' ')[0]} {release.get('VERSION_ID', '')}".strip(),
        architecture=platform.machine(),
        kernel=platform.release(),
        newest_kernel=max(
            (path.name.partition("-")[2] for path in (root / "boot").glob("vmlinuz-*")), key=_ordered, default=""
        ),
        command_line=_text(root / "proc/cmdline"),
        virtual="hypervisor" in cpu["flags"].split(),
        uefi=(sys / "firmware/efi").is_dir() if (sys / "firmware").is_dir() else None,
        secure_boot=_secure_boot(root / SECURE_BOOT),
        board=smbios.parse(_bytes(sys / "firmware/dmi/tables/DMI")),
        root=os.geteuid() == 0,
        cpu_vendor=cpu["vendor_id"],
        cpu_model=cpu["model name"],
        cpu_family=int(cpu["cpu family"] or 0),
        logical_cpus=int(cpu["count"]),
        sockets=int(cpu["sockets"]),
        numa=_numa(sys / "devices/system/node", _sockets(cpuinfo)),
        memory=_kib(_text(root / "proc/meminfo"), "MemTotal"),
        devices=read_devices(sys),
        driver=nvidia.parse_version(_text(root / "proc/driver/nvidia/version")),
        smi=smi,
        served=smi.gpus if smi and smi.gpus else _served(root / "proc/driver/nvidia/gpus"),
        driver_topology=nvidia.parse_topology(run(["nvidia-smi", "topo", "-m"])[1]) if smi and smi.gpus else {},
        events=events,
        events_before=before,
        iommu_present=any((sys / "class/iommu").glob("*")),
        numa_balancing=_flag(_text(root / "proc/sys/kernel/numa_balancing")),
        governors=tuple(
            sorted({_text(path) for path in (sys / "devices/system/cpu").glob("cpu[0-9]*/cpufreq/scaling_governor")})
        ),
        aspm=_aspm(_text(sys / "module/pcie_aspm/parameters/policy")),
        cgroup=2 if (sys / "fs/cgroup/cgroup.controllers").exists() else 1 if (sys / "fs/cgroup").is_dir() else None,
        shm=_size(root / "dev/shm"),
        limits=_limits(root / "proc"),
        time=time.time(),
        time_synchronized={"yes": True, "no": False}.get(
            run(["timedatectl", "show", "-p", "NTPSynchronized", "--value"])[1].strip()
        ),
        storage=_storage(root, data, read_seconds) if data else None,
        held=_held(_text(root / "var/lib/dpkg/status")),
        docker=_docker(run),
        toolkit=_toolkit(root, run),
    )


def _text(path: Path) -> str:
    return _bytes(path).decode(errors="replace").strip()


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def _flag(text: str) -> bool | None:
    return text != "0" if text.isdigit() else None


def _ordered(version: str) -> tuple[tuple[int, str], ...]:
    """6.1.0-9 comes before 6.1.0-10."""
    return tuple((int(part), "") if part.isdigit() else (-1, part) for part in re.findall(r"\d+|[a-z]+", version))


def _secure_boot(path: Path) -> bool | None:
    """Read the one byte that comes after four of attributes. None: no UEFI, or no permission."""
    content = _bytes(path)
    return content[4:5] == b"\x01" if content[4:] else None


def _cpu(text: str) -> dict[str, str]:
    found = dict.fromkeys(("vendor_id", "model name", "cpu family", "flags"), "")
    packages = set(re.findall(r"^physical id\s*: *(\d+)", text, re.MULTILINE))
    for line in text.partition("\n\n")[0].splitlines():
        name, _, value = line.partition(":")
        if name.strip() in found:
            found[name.strip()] = value.strip()
    count = len(re.findall(r"^processor\s*:", text, re.MULTILINE))
    return found | {"count": str(count), "sockets": str(len(packages) or min(count, 1))}


def _kib(text: str, name: str) -> int:
    match = re.search(rf"{name}: +(\d+) kB", text)
    return int(match[1]) << 10 if match else 0


def _sockets(cpuinfo: str) -> dict[int, int]:
    """Tell the socket of each logical CPU."""
    found = re.findall(r"^processor\s*: *(\d+)$(?:\n.+)*?\nphysical id\s*: *(\d+)$", cpuinfo, re.MULTILINE)
    return {int(cpu): int(socket) for cpu, socket in found}


def _numa(directory: Path, sockets: dict[int, int]) -> tuple[NumaNode, ...]:
    nodes = []
    for place in directory.glob("node[0-9]*"):
        cpus = _text(place / "cpulist")
        first = re.match(r"\d+", cpus)
        nodes.append(
            NumaNode(
                int(place.name[4:]),
                cpus,
                _kib(_text(place / "meminfo"), "MemTotal"),
                tuple(int(word) for word in _text(place / "distance").split()),
                sockets.get(int(first[0])) if first else None,
            )
        )
    return tuple(sorted(nodes, key=lambda node: node.number))


def _aspm(policy: str) -> str:
    match = re.search(r"\[(\w+)\]", policy)
    return match[1] if match else ""


def _size(path: Path) -> int | None:
    try:
        found = os.statvfs(path)
    except OSError:
        return None
    return found.f_frsize * found.f_blocks


def _served(directory: Path) -> tuple[nvidia.ServedGpu, ...]:
    found = [nvidia.parse_information(_text(place / "information")) for place in sorted(directory.glob("*"))]
    return tuple(gpu for gpu in found if gpu)


def _kernel_log(run: Run) -> tuple[tuple[nvidia.KernelEvent, ...] | None, tuple[nvidia.KernelEvent, ...]]:
    """Of this boot, else from the kernel's own buffer; and of the boot before, in which a GPU may have been lost."""
    journal = ["journalctl", "--dmesg", "--no-pager", "--quiet", "--output=short-iso-precise", "--utc"]
    code, text = run(journal)
    if code or not text.strip():
        code, text = run(["dmesg"])
        return (None if code or not text.strip() else nvidia.parse_kernel(text.splitlines())), ()
    code, earlier = run([*journal, "--boot=-1"])
    return nvidia.parse_kernel(text.splitlines()), nvidia.parse_kernel([] if code else earlier.splitlines())


def _limits(proc: Path) -> Limits | None:
    place = next((path.parent for path in proc.glob("[0-9]*/comm") if _text(path) == "dockerd"), proc / "1")
    text = _text(place / "limits")
    if not text:
        return None
    values = {
        name: match[1]
        for name in ("open files", "locked memory")
        if (match := re.search(rf"Max {name} +\S+ +(\S+)", text))
    }
    effective = re.search(r"^CapEff:\s*([0-9a-f]+)", _text(place / "status"), re.MULTILINE)
    return Limits(
        of="dockerd" if place.name != "1" else "the first process",
        nofile=_limit(values.get("open files", "")),
        memlock=_limit(values.get("locked memory", "")),
        can_raise=bool(effective and int(effective[1], 16) & _CAP_SYS_RESOURCE),
    )


def _limit(text: str) -> int | None:
    return int(text) if text.isdigit() else None


def _storage(root: Path, data: str, seconds: float) -> Storage:
    place = root / data.lstrip("/")
    mount, filesystem, device = _mount(_text(root / "proc/self/mountinfo"), data)
    try:
        looked = reading.within(8 + seconds, lambda: _look(root, place, filesystem, device, seconds))
    except (TimeoutError, reading.Unmeasurable) as error:
        return Storage(data, mount=mount, filesystem=filesystem, rate_of=str(error))
    return Storage(path=data, mount=mount, filesystem=filesystem, **looked)


def _look(  # noqa: PLR0911  # each reason to have no rate ends it
    root: Path, place: Path, filesystem: str, device: str, seconds: float
) -> dict[str, Any]:
    """Run in a process of its own: see `reading.within`."""
    if not place.is_dir():
        return {"exists": False}
    space = os.statvfs(place)
    found: dict[str, Any] = {
        "exists": True,
        "free": space.f_frsize * space.f_bavail,
        "used_by_models": reading.size_of(place / "models"),
    }
    if not seconds:
        return found | {"rate_of": "not measured (host_check_data_read_seconds is 0)"}
    if filesystem in ("tmpfs", "ramfs"):
        return found | {"rate_of": "it is memory"}
    if filesystem == "zfs":
        return found | {"rate_of": "ZFS answers from its own cache"}
    name = re.search(r"^DEVNAME=(.+)$", _text(root / "sys/dev/block" / device / "uevent"), re.MULTILINE)
    source = reading.largest_file(place) or (root / "dev" / name[1] if name else None)
    if source is None or not source.exists():
        return found | {"rate_of": f"nothing of {reading.LEAST_FILE >> 20} MiB there to read, and no disk to be seen"}
    try:
        return found | {"rate": reading.read_rate(source, seconds), "rate_of": str(source)}
    except reading.Unmeasurable as error:
        return found | {"rate_of": str(error)}


def _mount(mountinfo: str, path: str) -> tuple[str, str, str]:
    """Find the mount that `path` is in: its place, file system and device numbers (proc(5), /proc/pid/mountinfo)."""
    best = ("", "", "")
    for line in mountinfo.splitlines():
        own, _, rest = line.partition(" - ")
        fields = own.split()
        if not rest or len(fields) < _MOUNT_FIELDS:
            continue
        place = fields[4]
        if (path + "/").startswith(place.rstrip("/") + "/") and len(place) >= len(best[0]):
            best = (place, rest.split()[0], fields[2])
    return best


def _held(status: str) -> dict[str, bool] | None:
    """Read dpkg's own record: which packages are there, and whether they are held back from upgrades."""
    found = {}
    for paragraph in status.split("\n\n"):
        name = re.search(r"^Package: (\S+)$", paragraph, re.MULTILINE)
        state = re.search(r"^Status: (\S+) \S+ installed$", paragraph, re.MULTILINE)
        if name and state and held_by(name[1]):
            found[name[1]] = state[1] == "hold"
    return found if status else None


def held_by(package: str) -> str:
    """Name the role that holds a package back, empty where none does."""
    return next((role for role, names in HELD_BY.items() if names.match(package)), "")


def _docker(run: Run) -> Docker:
    code, answer = run(["docker", "info", "--format", "{{json .}}"])
    if code == NOT_THERE:
        return Docker(problem="not installed")
    try:
        info = json.loads(answer.strip().splitlines()[-1])
    except (ValueError, IndexError):
        info = {}
    if not isinstance(info, dict) or not info.get("ServerVersion"):
        errors = info.get("ServerErrors") if isinstance(info, dict) else None
        return Docker(problem=" ".join((errors[0] if errors else answer).split())[:200] or "does not answer")
    return Docker(
        version=str(info["ServerVersion"]),
        compose=run(["docker", "compose", "version", "--short"])[1].strip().lstrip("v"),
        root=str(info.get("DockerRootDir", "")),
        cdi=tuple(str(device.get("ID")) for device in info.get("DiscoveredDevices") or []),
        disabled=run(["systemctl", "is-enabled", "docker.service"])[1].strip() == "disabled",
    )


def _toolkit(root: Path, run: Run) -> Toolkit:
    code, answer = run(["nvidia-ctk", "--version"])
    match = re.search(r"version (\d+[\w.~+-]*)", answer)
    for directory in ("etc/cdi", "var/run/cdi", "run/cdi"):
        for path in sorted((root / directory).glob("*")):
            text = _text(path)
            if path.suffix in (".yaml", ".json") and re.search(r"""\bkind"?: *["']?nvidia\.com/gpu\b""", text):
                names = re.findall(r"""^[ -]*"?name"?: *["']?([\w:.-]+)""", text, re.MULTILINE)
                return Toolkit(
                    match[1] if match and not code else "",
                    tuple(f"nvidia.com/gpu={name}" for name in dict.fromkeys(names)),
                    f"/{path.relative_to(root)}",
                )
    return Toolkit(match[1] if match and not code else "")
