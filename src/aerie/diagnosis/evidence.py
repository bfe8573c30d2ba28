"""What stands outside an engine's output, the kernel's lines above all, and what it means."""

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from datetime import datetime

from aerie.diagnosis.signatures import Kind

BEFORE = 600.0
"""Seconds before an end within which the kernel's lines are taken to belong to it: as long as NCCL waits for a peer."""
AFTER = 60.0
"""Seconds after an end: a clock may run apart a little, and the kernel's line may be written late."""


@dataclass(frozen=True)
class Evidence:
    """One observation. `source` is kernel, cgroup or supervisor; `at` is in seconds since the epoch."""

    source: str
    at: float | None
    text: str
    pci: str | None = None
    """The device it speaks of, as `pci_address` writes it."""
    pid: int | None = None
    """As the host numbers its processes, not the container."""
    kind: Kind | None = None
    """What it would explain; None where it only belongs to the picture."""
    meaning: str = ""

    def __str__(self) -> str:
        moment = f" {datetime.fromtimestamp(self.at).astimezone():%H:%M:%S}" if self.at is not None else ""
        return f"{self.source}{moment}: {self.text}" + (f" ({self.meaning})" if self.meaning else "")


# NVIDIA's "XID Errors" (docs.nvidia.com/deploy/xid-errors, r580). HARDWARE is what the device, the bus or the driver
# did; what a program's own bad access can raise as well explains nothing by itself.
_XIDS: dict[int, tuple[Kind | None, str]] = {
    13: (None, "the kernel that ran on the GPU failed, mostly by an access out of bounds"),
    31: (None, "a memory access to a page that is not there, mostly a program's error"),
    32: (Kind.HARDWARE, "the driver's command buffer was corrupted on its way: PCIe"),
    38: (Kind.HARDWARE, "a firmware error of the driver"),
    43: (None, "the GPU stopped a program that had failed; the GPU itself is well"),
    45: (None, "a program's channels were removed, as after a kill; the first Xid before it tells the cause"),
    46: (Kind.HARDWARE, "the GPU stopped processing"),
    48: (Kind.HARDWARE, "memory error of two bits (ECC), which cannot be corrected"),
    61: (Kind.HARDWARE, "the GPU's own controller stopped"),
    62: (Kind.HARDWARE, "the GPU's own controller halted"),
    63: (None, "a memory row or page was retired; takes effect at the next reset"),
    64: (Kind.HARDWARE, "a memory row or page could not be retired: replace the GPU"),
    69: (None, "the graphics engine's class failed, mostly a program's error"),
    74: (Kind.HARDWARE, "an NVLink error"),
    79: (Kind.HARDWARE, "the GPU fell off the bus: power, cooling, riser or slot"),
    92: (Kind.HARDWARE, "many correctable memory errors: watch the GPU"),
    94: (Kind.HARDWARE, "an uncorrectable memory error that ended the program it hit"),
    95: (Kind.HARDWARE, "an uncorrectable memory error that may have hit any program: reset the GPU"),
    109: (Kind.HARDWARE, "a context switch did not end in time"),
    110: (Kind.HARDWARE, "a security fault of the GPU's controller"),
    119: (Kind.HARDWARE, "the GPU's system processor (GSP) did not answer in time"),
    120: (Kind.HARDWARE, "the GPU's system processor (GSP) failed"),
    136: (Kind.HARDWARE, "a link of the GPU's fabric failed"),
    140: (Kind.HARDWARE, "memory errors that were not contained: reset the GPU"),
    143: (Kind.HARDWARE, "the GPU could not be initialised"),
    154: (Kind.HARDWARE, "the GPU needs what the line says, a reset or a reboot, before it can be used again"),
}

_PCI = r"(?:[0-9A-Fa-f]{4,8}:)?[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}(?:\.[0-7])?"
_PREFIX = re.compile(
    r"(?P<at>\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?:Z|[+-]\d\d:?\d\d)?) (?:\S{1,253} kernel: )?"
    r"|[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d(?:\.\d{1,6})? \S{1,253} kernel: "
    r"|\[ {0,9}\d{1,9}\.\d{6}\] |\[[A-Z][a-z]{2} [A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d \d{4}\] |kernel: "
)
# What a line of the kernel's begins with that names no host, as dmesg writes it, or with no time either.
_BARE = re.compile(rf"{_PREFIX.pattern.replace('?P<at>', '')}|(?:Memory cgroup o|O)ut of memory: Killed |oom-kill:")
_XID = re.compile(rf"NVRM: Xid \((?:PCI:)?({_PCI})\): (\d{{1,4}})\b(?:,.*?\bpid='?(\d+))?")
_OOM_KILLED = re.compile(r"(?:Out of memory|Memory cgroup out of memory): Killed process (\d+) \(([^)]*)\)")
_OOM_KILL = re.compile(r"oom-kill:.*constraint=(\w+).*\btask=([^,]*),pid=(\d+)")
_SEGFAULT = re.compile(
    r"([^\[\]]{1,64})\[(\d+)\](?:: segfault at | general protection)|traps: ([^\[\]]{1,64})\[(\d+)\]"
)
# Names that the kernel gives an engine's processes, cut to 15 characters.
_OURS = re.compile(r"VLLM|vllm|python|pt_|EngineCore|Worker|ray::|uvloop")


@dataclass(frozen=True)
class _Other:
    """A kernel line that is known by its words alone; its PCI address stands anywhere in it."""

    pattern: re.Pattern[str]
    kind: Kind | None
    meaning: str


_OTHERS = (
    _Other(re.compile(r"NVRM: .*fallen off the bus"), Kind.HARDWARE, _XIDS[79][1]),
    _Other(
        re.compile(r"NVRM: API mismatch"),
        Kind.HARDWARE,
        "the driver's module and its libraries are of different releases",
    ),
    _Other(
        re.compile(r"RmInitAdapter failed|Cannot initialize GSP firmware"),
        Kind.HARDWARE,
        "the driver could not initialise the GPU",
    ),
    _Other(
        re.compile(r"requires use of the NVIDIA open kernel modules"),
        Kind.HARDWARE,
        "the proprietary module does not drive this GPU",
    ),
    _Other(re.compile(r"Surprise (?:Link )?Down|SDES\b"), Kind.HARDWARE, "a PCIe link broke without notice"),
    _Other(re.compile(r"pciehp.*(?:Link Down|Card not present)"), Kind.HARDWARE, "a PCIe slot lost its card"),
    _Other(re.compile(r"DPC: containment event"), Kind.HARDWARE, "a PCIe port cut its device off after an error"),
    _Other(
        re.compile(r"severity=Uncorrect(?:ed|able)|AER: .*Uncorrect(?:ed|able)"),
        Kind.HARDWARE,
        "PCIe error, not corrected",
    ),
    _Other(re.compile(r"severity=Correct(?:ed|able)|AER: .*Correct(?:ed|able)"), None, "PCIe error, corrected"),
    _Other(re.compile(r"AER: .*device recovery (?:failed|successful)|can't recover"), None, "PCIe error recovery"),
    _Other(re.compile(r"invoked oom-killer"), None, "asked for the memory that was not there"),
)
# A line without any of these is none of the above; most are.
_TELLING = (
    "NVRM",
    "PCIe",
    "AER",
    "DPC",
    "pci",
    "SDES",
    "Link",
    "oom",
    "emory",
    "segfault",
    "protection",
    "GSP",
    "modules",
    "Init",
)
_ANY_PCI = re.compile(rf"(?<![\w:.])({_PCI})(?!:?\w)")


def pci_address(text: str) -> str:
    """Return `0000:41:00` for any way of writing it: with a function, without a domain, with NVML's eight digits."""
    parts = text.strip().lower().split(".")[0].split(":")
    domain = parts[0] if len(parts) > 2 else "0"  # noqa: PLR2004 - domain:bus:device
    return ":".join((f"{int(domain, 16):04x}", *parts[-2:]))


def parse_kernel(text: str) -> list[Evidence]:
    """Read lines of the kernel's log, as journalctl (`-k -o short-iso-precise`), dmesg or syslog write them.

    What says nothing about GPUs, PCIe or memory is left out, and so is a line that cannot be read.
    """
    lines = (line for line in re.split(r"[\r\n]", text) if any(word in line for word in _TELLING))
    found = map(_read, lines)
    return [evidence for evidence in found if evidence]


def parse_bare(text: str) -> list[Evidence]:
    """Read a line that nothing but its words shows to be the kernel's: no host stands before it."""
    return parse_kernel(text) if _BARE.match(text) else []


def _read(line: str) -> Evidence | None:
    at: float | None = None
    message = line.strip()
    while prefix := _PREFIX.match(message):
        at = _epoch(prefix["at"]) if prefix["at"] else at
        message = message[prefix.end() :]
    message = message[:1000]
    if xid := _XID.search(message):
        kind, meaning = _XIDS.get(int(xid[2]), (None, "see NVIDIA's list of Xid errors"))
        pid = int(xid[3]) if xid[3] else None
        return Evidence("kernel", at, message, pci_address(xid[1]), pid, kind, f"Xid {xid[2]}: {meaning}")
    if killed := _OOM_KILLED.search(message):
        return _out_of_memory(at, message, killed[2], int(killed[1]))
    if killed := _OOM_KILL.search(message):
        return _out_of_memory(at, message, killed[2], int(killed[3]))
    for other in _OTHERS:
        if other.pattern.search(message):
            pci = _ANY_PCI.search(message)
            return Evidence("kernel", at, message, pci and pci_address(pci[1]), None, other.kind, other.meaning)
    if fault := _SEGFAULT.search(message):
        name, pid = fault[1] or fault[3], int(fault[2] or fault[4])
        if _OURS.search(name):
            return Evidence("kernel", at, message, None, pid, Kind.CRASH, "a process was ended by a bad memory access")
    return None


def _out_of_memory(at: float | None, message: str, name: str, pid: int) -> Evidence:
    ours = bool(_OURS.search(name))
    meaning = "the kernel killed it to free memory" if ours else "the kernel killed another program to free memory"
    return Evidence("kernel", at, message, None, pid, Kind.MEMORY if ours else None, meaning)


def _epoch(text: str) -> float | None:
    try:
        moment = datetime.fromisoformat(text.replace(",", "."))
    except ValueError:
        return None
    return moment.timestamp() if moment.tzinfo else moment.astimezone().timestamp()


def relevant(
    evidence: Iterable[Evidence], at: float, devices: Collection[str] = (), since: float | None = None
) -> list[Evidence]:
    """Return what may belong to an end at `at` (seconds since the epoch), in the order of time.

    That is what happened from `BEFORE` seconds before to `AFTER` seconds after it, or at an unknown time; where
    `devices` lists the engine's own GPUs and the ports above them by PCI address, nothing about other devices; and no
    lack of memory from before `since`, when the engine was started.
    """
    near = [
        one
        for one in evidence
        if (one.at is None or -BEFORE <= one.at - at <= AFTER)
        if not (one.kind is Kind.MEMORY and since is not None and one.at is not None and one.at < since)
        if _concerns(one, devices)
    ]
    return sorted(near, key=lambda one: at if one.at is None else one.at)


def seconds_between(earlier: str, later: str) -> float:
    """Return the time between two of vLLM's clocks ("11-29 13:34:58"), which have no year; 0.0 where one is none."""
    try:  # in a leap year, which has every day
        first, last = (datetime.strptime(f"2024-{clock}", "%Y-%m-%d %H:%M:%S") for clock in (earlier, later))  # noqa: DTZ007
    except ValueError:
        return 0.0
    return (last - first).total_seconds() % (366 * 86400)


def _concerns(evidence: Evidence, devices: Collection[str]) -> bool:
    """Tell whether it may concern one of the devices: a port above a GPU reports errors of the link between them."""
    if not devices or evidence.pci is None:
        return True
    named = [evidence.pci] if "NVRM" in evidence.text else _ANY_PCI.findall(evidence.text) or [evidence.pci]
    return any(_is_same(one, device) for one in named for device in devices)


def _is_same(one: str, other: str) -> bool:
    """Tell whether two addresses are one device's, and one function's of it where both name one: each port is one."""
    functions = {function for address in (one, other) if (function := address.strip().partition(".")[2])}
    return pci_address(one) == pci_address(other) and len(functions) <= 1
