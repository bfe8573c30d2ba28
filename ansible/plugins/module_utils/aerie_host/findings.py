"""What is right and what is wrong with a machine that is to serve: one line a check, judged without touching it.

A verdict is
  ok       as wanted
  role     not yet, and a role of the play sets it; `role` names it
  warn     it serves, but not at its best, or somebody should know
  fail     only a person can mend it
  unknown  it could not be found out; the value says why
"""

from __future__ import annotations

import dataclasses
import re
import textwrap
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .machine import REMOTE
from .missing import missing_gpus
from .nvidia import RTX_PRO_6000_BLACKWELL, ServedGpu
from .topology import classify

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from .machine import Machine
    from .pci import Device, Link

GIB = 1 << 30
GB = 1000**3
# Kimi-K2.5's weights, of which a start reads every byte.
MODEL_GB = 595
# Releases that the roles know.
DISTRIBUTIONS = ("Debian 12", "Debian 13", "Ubuntu 22.04", "Ubuntu 24.04")
# Errors that a program on the GPU causes, not the GPU: NVIDIA's catalogue of Xids says to restart the program.
PROGRAM_XIDS = {13, 31, 32, 43, 45, 68, 69}
# Seconds: beyond, certificates and signatures begin to look expired or not yet valid.
MOST_CLOCK_DIFFERENCE = 60
# Above so many logical CPUs the kernel needs interrupt remapping, which is the IOMMU's (x2APIC).
MOST_CPUS_WITHOUT_IOMMU = 255
_CGROUP = 2
_PEERS = 2  # GPUs from which on there is traffic between them
_MOST_LINES = 4  # of the kernel's that are quoted
GENERATIONS = {2.5: 1, 5.0: 2, 8.0: 3, 16.0: 4, 32.0: 5, 64.0: 6}
VERDICTS = ("fail", "role", "warn", "unknown", "ok")
WIDTH = 120


@dataclass(frozen=True)
class Wanted:
    """What the host is to have. Sizes in GiB or GB (1000^3 bytes) as their names say, the rate in GB/s."""

    gpus: int = 8
    gpu_model: str = "RTX PRO 6000 Blackwell"
    vram_gib: int = 94
    least_driver: str = "580.65.06"
    memory_gib: int = 128
    shm_gib: int = 16
    nofile: int = 65536
    data_free_gb: int = 700
    data_read_gb_s: float = 2.0
    least_docker: str = "25.0"
    least_compose: str = "2.24.4"
    clock: float | None = None  # the controller's, in seconds since the epoch
    accept: tuple[str, ...] = ()


@dataclass(frozen=True)
class Finding:
    """One line. `subject` is the PCI address where a check has a line a device."""

    check: str
    value: str
    wanted: str
    verdict: str
    remedy: str = ""
    role: str = ""
    subject: str = ""
    accepted: bool = False
    detail: tuple[str, ...] = ()  # lines shown as they are, below

    @property
    def name(self) -> str:
        """What an `accept` list calls this line: the check, or check:address."""
        return f"{self.check}:{self.subject}" if self.subject else self.check


def judge(machine: Machine, wanted: Wanted) -> list[Finding]:
    """Judge everything at once. ValueError: `wanted.accept` names no check."""
    unknown = [name for name in wanted.accept if name.partition(":")[0] not in CHECKS]
    if unknown:
        raise ValueError(f"no such check: {', '.join(unknown)}. There are: {', '.join(CHECKS)}")
    found = [finding for check in CHECKS.values() for finding in check(machine, wanted)]
    return [
        dataclasses.replace(finding, verdict="warn", accepted=True)
        if finding.verdict == "fail" and {finding.check, finding.name} & set(wanted.accept)
        else finding
        for finding in found
    ]


def _judged(
    right: bool | None,  # noqa: FBT001
    check: str,
    value: str,
    wanted: str,
    verdict: str,
    remedy: str,
    *,
    role: str = "",
    subject: str = "",
) -> Finding:
    """`ok` where it is right, `unknown` where that is None, else `verdict` with its remedy."""
    if right is None:
        return Finding(check, value, wanted, "unknown", subject=subject)
    if right:
        return Finding(check, value, wanted, "ok", subject=subject)
    return Finding(check, value, wanted, verdict, remedy, role, subject)


# --- The system -------------------------------------------------------------------------------------------------------


def _distribution(machine: Machine, _: Wanted) -> Iterator[Finding]:
    remedy = "install one of these releases; the roles know no other's packages"
    value = machine.distribution or "not known"
    yield _judged(value in DISTRIBUTIONS, "distribution", value, ", ".join(DISTRIBUTIONS), "fail", remedy)


def _architecture(machine: Machine, _: Wanted) -> Iterator[Finding]:
    remedy = "Aerie's image exists for x86_64 only"
    yield _judged(machine.architecture == "x86_64", "architecture", machine.architecture, "x86_64", "fail", remedy)


def _virtualisation(machine: Machine, _: Wanted) -> Iterator[Finding]:
    remedy = "links, BARs, ACS and IOMMU below are what the hypervisor shows: look for them on the host of this guest"
    right = not (machine.virtual and machine.gpus)
    value = "a virtual machine" if machine.virtual else "none"
    yield _judged(right, "virtualisation", value, "none" if machine.gpus else "any", "warn", remedy)


def _firmware(machine: Machine, wanted: Wanted) -> Iterator[Finding]:
    board = machine.board
    made = " ".join(part for part in (board.maker, board.product or board.board) if part)
    version = f"firmware {board.firmware} of {board.firmware_date}" if board.firmware else ""
    boot = {True: "UEFI", False: "legacy boot (CSM)", None: "boot mode not known"}[machine.uefi]
    value = ", ".join(part for part in (made, version, boot) if part)
    remedy = "switch CSM off and boot by UEFI: Resizable BAR does not work with CSM"
    matters = bool(wanted.gpus or machine.gpus) and not machine.virtual
    right = machine.uefi if matters else True
    yield _judged(right, "firmware", value, "UEFI" if matters else "any", "warn", remedy)


def _secure_boot(machine: Machine, wanted: Wanted) -> Iterator[Finding]:
    if machine.secure_boot is None:
        right: bool | None = None if machine.uefi else machine.uefi is False or None
        value = "none without UEFI" if right else "not known (needs root)"
    elif machine.secure_boot:
        right = bool(machine.driver)
        value = "on, and NVIDIA's module is loaded" if machine.driver else "on"
    else:
        right, value = True, "off"
    figure = "off, or the module's key enrolled"
    if not (wanted.gpus or machine.gpus):
        right, figure = True, "any"
    remedy = (
        "switch it off in the firmware, or enrol the key that signs NVIDIA's module (MOK), which somebody must "
        "confirm at the console: role nvidia_driver names the steps"
    )
    yield _judged(right, "secure_boot", value, figure, "warn", remedy)


def _kernel(machine: Machine, _: Wanted) -> Iterator[Finding]:
    newest = machine.newest_kernel
    value = machine.kernel + (
        f"; {newest} is installed too, and may be the next boot's" if newest not in ("", machine.kernel) else ""
    )
    remedy = "Ubuntu 22.04 has 5.15, Debian 12 has 6.1: install the distribution's kernel and reboot"
    yield _judged(_version(machine.kernel) >= (5, 15), "kernel", value, ">= 5.15", "fail", remedy)


def _cgroup(machine: Machine, _: Wanted) -> Iterator[Finding]:
    remedy = "remove systemd.unified_cgroup_hierarchy=0 from the kernel's arguments, by which it boots so, and reboot"
    value = f"version {machine.cgroup}" if machine.cgroup else "not known"
    right = None if machine.cgroup is None else machine.cgroup == _CGROUP
    yield _judged(right, "cgroup", value, "version 2", "warn", remedy)


def _time_sync(machine: Machine, _: Wanted) -> Iterator[Finding]:
    value = {True: "synchronized", False: "not synchronized", None: "not known (timedatectl does not answer)"}[
        machine.time_synchronized
    ]
    remedy = "set up systemd-timesyncd or chrony: timedatectl set-ntp true, then timedatectl show -p NTPSynchronized"
    yield _judged(machine.time_synchronized, "time_sync", value, "synchronized", "warn", remedy)


def _clock(machine: Machine, wanted: Wanted) -> Iterator[Finding]:
    within = f"within {MOST_CLOCK_DIFFERENCE} s of the controller's"
    if wanted.clock is None:
        yield Finding("clock", "no other clock to compare it with", within, "unknown")
        return
    difference = machine.time - wanted.clock
    near = abs(difference) <= MOST_CLOCK_DIFFERENCE
    value = (
        "with the controller's"
        if near
        else f"{abs(difference):.0f} s {'ahead of' if difference > 0 else 'behind'} the controller's"
    )
    remedy = "set one of the two clocks: packages' signatures and certificates look expired or not yet valid"
    yield _judged(near, "clock", value, within, "fail", remedy)


def _memory(machine: Machine, wanted: Wanted) -> Iterator[Finding]:
    # The firmware keeps a part of what is built in.
    right = machine.memory >= wanted.memory_gib * GIB * 0.94 if machine.memory else None
    remedy = "add memory; host_check_memory_gib is the figure wanted"
    yield _judged(right, "memory", f"{machine.memory / GIB:.0f} GiB", f">= {wanted.memory_gib} GiB", "warn", remedy)


# --- The GPUs ---------------------------------------------------------------------------------------------------------


def _gpus(machine: Machine, wanted: Wanted) -> Iterator[Finding]:
    missing = missing_gpus(machine, wanted.gpus)
    lost = {gpu.address for gpu in missing}
    there = sum(1 for gpu in machine.gpus if gpu.address not in lost)
    traced = [gpu for gpu in missing if gpu.address or gpu.port]
    if not missing:
        remedy = f"aerie_gpus is {wanted.gpus}: set it to {there} if all of them are to serve"
        yield _judged(there == wanted.gpus, "gpus", str(there), str(wanted.gpus), "warn", remedy)
    elif not machine.gpus and not traced:
        remedy = (
            "no NVIDIA GPU is on the bus. On a machine without set aerie_gpus: 0; else look at power cables, risers "
            "and, in the firmware, at Above 4G Decoding and the slots' bifurcation"
        )
        yield Finding("gpus", "none", str(wanted.gpus), "fail", remedy)
    else:
        rest = len(missing) - len(traced)
        told = [*map(str, traced), *([f"{rest} left no trace"] if rest else [])]
        remedy = (
            "power the machine off (a reboot seldom brings one back), reseat the card, its power cables and riser, "
            "then look again"
        )
        if not any(gpu.address for gpu in missing):
            remedy = f"set aerie_gpus: {there} if this machine has no more; else {remedy}"
        yield Finding("gpus", f"{there} of {wanted.gpus}: {'; '.join(told)}", str(wanted.gpus), "fail", remedy)


def _gpu_model(machine: Machine, wanted: Wanted) -> Iterator[Finding]:
    if not machine.gpus:
        return
    names = Counter(_model(gpu, machine) for gpu in machine.gpus if gpu.answers)
    value = ", ".join(f"{count}x {name}" for name, count in sorted(names.items()))
    if len(names) > 1:
        yield Finding(
            "gpu_model",
            value,
            f"all {wanted.gpu_model}",
            "warn",
            "use GPUs of one model: the slowest and smallest decides",
        )
        return
    remedy = f"config/kimi-k2.5.yaml is reckoned for {wanted.gpu_model}: reckon anew, then set host_check_gpu_model"
    yield _judged(wanted.gpu_model in value, "gpu_model", value, wanted.gpu_model, "warn", remedy)


def _model(gpu: Device, machine: Machine) -> str:
    name = next((served.name for served in machine.served if served.address == gpu.address and served.name), "")
    if not name and gpu.device in RTX_PRO_6000_BLACKWELL:
        return f"NVIDIA RTX PRO 6000 Blackwell {RTX_PRO_6000_BLACKWELL[gpu.device]}"
    return name or f"NVIDIA [10de:{gpu.device:04x}]"


def _driver(machine: Machine, wanted: Wanted) -> Iterator[Finding]:
    if not machine.gpus and not wanted.gpus:
        return
    least = f">= {wanted.least_driver}, open modules"
    bound = Counter(gpu.driver for gpu in machine.gpus if gpu.driver and gpu.driver != "nvidia")
    others = ", ".join(f"{name} holds {count} of the GPUs" for name, count in sorted(bound.items()))
    if not machine.driver:
        value = ", ".join(part for part in ("not loaded", others) if part)
        yield Finding("driver", value, least, "role", "role nvidia_driver installs it", role="nvidia_driver")
        return
    kind = "open" if machine.driver.open else "proprietary"
    value = f"{machine.driver.version} (branch {machine.driver.branch}), {kind} modules"
    remedy = "role nvidia_driver installs it, and names what it would have to replace"
    right = machine.driver.open and _version(machine.driver.version) >= _version(wanted.least_driver) and not others
    tools = machine.smi.driver if machine.smi else ""
    if tools and tools != machine.driver.version:
        value += f"; nvidia-smi is of {tools}"
        yield Finding("driver", value, least, "fail", "module and libraries differ, as after an upgrade: reboot")
        return
    value = ", ".join(part for part in (value, others) if part)
    yield _judged(right, "driver", value, least, "role", remedy, role="nvidia_driver")


def _vram(machine: Machine, wanted: Wanted) -> Iterator[Finding]:
    if not machine.gpus:
        return
    known = {gpu.address: gpu.vram_mib for gpu in machine.served if gpu.vram_mib}
    figure = f">= {wanted.vram_gib} GiB a GPU"
    if not known:
        why = "known once the driver is loaded" if not machine.driver else "nvidia-smi does not answer"
        problem = machine.smi.problem if machine.driver and machine.smi else ""
        verdict = "unknown" if machine.driver else "role"
        yield Finding(
            "vram",
            why + (f": {problem}" if problem else ""),
            figure,
            verdict,
            role="" if machine.driver else "nvidia_driver",
        )
        return
    short = {address: mib for address, mib in known.items() if mib < wanted.vram_gib << 10}
    value = _alike({address: f"{mib / 1024:.1f} GiB" for address, mib in known.items()})
    remedy = f"{', '.join(short)}: less than the configuration is reckoned for (host_check_vram_gib)"
    yield _judged(not short, "vram", value, figure, "fail", remedy)


def _pcie(machine: Machine, _: Wanted) -> Iterator[Finding]:
    """Both ends of every link on the paths: what it is against what its two ends can be."""
    good: dict[str, str] = {}
    for device in [*(port for port in machine.bridges if port.kind == "upstream"), *machine.gpus]:
        if not device.answers:
            continue
        parent = machine.devices.get(device.parent or "")
        if not device.link or not device.whole:
            yield Finding("pcie", "not known (needs root)", "the slot's best", "unknown", subject=device.address)
            continue
        finding = _judge_link(machine, device, device.link, parent)
        if finding.verdict == "ok":
            good[device.address] = finding.value
        else:
            yield finding
    if good:
        yield Finding("pcie", _alike(good), "the slot's best", "ok")


def _judge_link(machine: Machine, device: Device, link: Link, parent: Device | None) -> Finding:
    above = parent.link if parent and parent.link else link
    width = min(link.max_width, above.max_width)
    speed = min(link.max_speed or 0, above.max_speed or 0)
    served = next((gpu for gpu in machine.served if gpu.address == device.address), None)
    best = f"PCIe {GENERATIONS.get(speed, '?')}.0 x{width}"
    slot = machine.slot(device.address)
    place = f" ({slot})" if slot else ""
    if link.width < width:
        value = (
            f"x{link.width} of x{width}{place}, at {link.speed:g} GT/s"
            if link.speed
            else f"x{link.width} of x{width}{place}"
        )
        remedy = "a lane is bad, and its bandwidth lost: reseat card and riser, clean the contacts, swap slots"
        return Finding("pcie", value, best, "fail", remedy, subject=device.address)
    if (link.speed or 0) < speed and not _may_idle(device, served):
        why = "under load" if served and served.utilization else "not by idling"
        value = f"{link.speed or 0:g} of {speed:g} GT/s{place}, {why}"
        remedy = "the link does not train to its best: reseat card and riser, look for a speed set in the firmware"
        return Finding("pcie", value, best, "warn", remedy, subject=device.address)
    if width < link.max_width or speed < (link.max_speed or 0):
        could = f"PCIe {GENERATIONS.get(link.max_speed or 0, '?')}.0 x{link.max_width}"
        value = f"{best}, all that the slot has{place}; the card could do {could}"
        remedy = "another slot, or the slot's bifurcation and speed in the firmware"
        return Finding("pcie", value, could, "warn", remedy, subject=device.address)
    # The width stays at rest; the speed that an idle link shows says nothing of what it does under load.
    now = "" if link.speed == speed else f" (now at {link.speed or 0:g} GT/s: idle)"
    return Finding("pcie", best + now, best, "ok", subject=device.address)


def _may_idle(device: Device, served: ServedGpu | None) -> bool:
    """Whether a lower speed is rest: a GPU's that works at nothing. A switch's uplink does not train down for that."""
    if not device.is_gpu:
        return False
    return not (served and (served.utilization or served.state in ("P0", "P1")))


def _bar1(machine: Machine, _: Wanted) -> Iterator[Finding]:
    """Peers reach a GPU's memory through BAR1, so it must hold all of it."""
    good: dict[str, str] = {}
    vram = {gpu.address: (gpu.vram_mib or 0) << 20 for gpu in machine.served}
    for gpu in machine.gpus:
        if not gpu.answers:
            continue
        size = next((bar.size for bar in gpu.bars if bar.index == 1), 0)
        best = max((max(bar.sizes) for bar in gpu.resizable if bar.index == 1 and bar.sizes), default=0)
        value = _size(size) if size else "none"
        # A power of two that holds the memory: 128 GiB for 96 GB.
        need = 1 << (vram.get(gpu.address, 0) - 1).bit_length() if vram.get(gpu.address) else best
        if need and size >= need:
            good[gpu.address] = value
        elif not need:
            reason = (
                "the GPU's capability is not readable without root"
                if not gpu.whole
                else "the GPU shows no Resizable BAR"
            )
            yield Finding("bar1", f"{value}; {reason}", "as large as the GPU's memory", "unknown", subject=gpu.address)
        else:
            remedy = "switch Above 4G Decoding and Resizable BAR on in the firmware"
            if not best or best < need:
                remedy += (
                    "; where that is done, the card itself offers no more: put it into its mode without display "
                    "(NVIDIA's displaymodeselector, --gpumode physical_display_disabled)"
                )
            value += f" of {_size(max(best, size))} that the card offers" if best else ", and the card offers no other"
            yield Finding("bar1", value, _size(need), "fail", remedy, subject=gpu.address)
    if good:
        yield Finding("bar1", _alike(good), "as large as the GPU's memory", "ok")


def _above_4g(machine: Machine, _: Wanted) -> Iterator[Finding]:
    """Tell a firmware that gives no addresses above 4 GiB: large BARs are small, low or without an address."""
    bad: dict[str, str] = {}
    seen = [gpu for gpu in machine.gpus if gpu.answers]
    for gpu in seen:
        if not gpu.bars or any(not bar.address for bar in gpu.bars):
            bad[gpu.address] = "no address for " + (
                ", ".join(f"BAR{bar.index}" for bar in gpu.bars if not bar.address) or "its BARs"
            )
        elif low := [bar for bar in gpu.bars if bar.prefetchable and bar.index == 1 and bar.address < 4 * GIB]:
            bad[gpu.address] = f"BAR1 lies at {low[0].address:#x}, below 4 GiB"
    if seen:
        value = "; ".join(f"{address}: {what}" for address, what in bad.items()) or "BARs lie above 4 GiB"
        remedy = (
            "switch Above 4G Decoding (MMIO above 4G) on in the firmware, and raise its MMIO size where it has one: "
            "eight GPUs take 1 TiB"
        )
        yield _judged(not bad, "above_4g", value, "addresses above 4 GiB", "fail", remedy)


def _acs(machine: Machine, _: Wanted) -> Iterator[Finding]:
    ports = machine.bridges
    if len(machine.gpus) < _PEERS or not ports:
        return
    wanted = "no redirection above the GPUs"
    hidden = [port.address for port in ports if not port.whole]
    if hidden:
        yield Finding(
            "acs", f"{len(hidden)} ports not readable without root", wanted, "unknown", "run as root (become: true)"
        )
        return
    redirecting = [port.address for port in ports if port.acs and port.acs.redirects]
    value = f"{len(redirecting)} of {len(ports)} ports redirect" + (
        f": {', '.join(redirecting)}" if redirecting else ""
    )
    remedy = "role pcie_fabric switches it off at each boot: with it, peers' traffic goes by the root complex, or hangs"
    yield _judged(not redirecting, "acs", value, wanted, "role", remedy, role="pcie_fabric")


def _iommu(machine: Machine, _: Wanted) -> Iterator[Finding]:
    if not machine.gpus:
        return
    kinds = sorted({gpu.iommu_type for gpu in machine.gpus if gpu.iommu_type})
    if not machine.iommu_present and not kinds:
        value, right = "off", machine.logical_cpus <= MOST_CPUS_WITHOUT_IOMMU
        remedy = (
            f"with {machine.logical_cpus} logical CPUs the kernel needs it for interrupts: switch it on in the firmware"
            " and use iommu=pt"
        )
        yield _judged(right, "iommu", value, "off or passed through", "warn", remedy)
        return
    if not kinds:
        yield Finding("iommu", "on; the GPUs' mode is not known", "off or passed through", "unknown")
        return
    value = (
        "passed through (identity)" if kinds == ["identity"] else f"translates the GPUs' addresses ({', '.join(kinds)})"
    )
    remedy = "role pcie_fabric sets iommu=pt, and says what that costs in protection; it takes a reboot"
    yield _judged(kinds == ["identity"], "iommu", value, "off or passed through", "role", remedy, role="pcie_fabric")


def _numa(machine: Machine, _: Wanted) -> Iterator[Finding]:
    nodes = machine.numa
    if not nodes:
        yield Finding("numa", "not known", "GPUs spread evenly", "unknown")
        return
    groups = {node: len(found) for node, found in classify(machine).groups.items()}
    sockets = f"{machine.sockets} socket{'s' if machine.sockets != 1 else ''}"
    spread = " + ".join(str(groups.get(node.number, 0)) for node in nodes)
    value = f"{len(nodes)} node{'s' if len(nodes) > 1 else ''}, {sockets}" + (f", GPUs {spread}" if groups else "")
    verdict, remedy = "ok", ""
    if groups and -1 in groups and len(nodes) > 1:
        verdict = "warn"
        remedy = "the firmware does not say which node some GPUs belong to: update it, or look for ACPI SRAT settings"
    elif machine.sockets and len(nodes) > machine.sockets:
        verdict, remedy = (
            "warn",
            "one node a socket (NPS1 on EPYC, SNC off on Xeon) keeps a GPU's buffers on its socket's whole memory",
        )
    elif any(not node.memory and groups.get(node.number) for node in nodes):
        verdict, remedy = "warn", "GPUs sit on a node without memory: fill that socket's memory channels"
    elif len({groups.get(node.number, 0) for node in nodes}) > 1 and len(nodes) == machine.sockets:
        verdict, remedy = (
            "warn",
            "the GPUs are not spread evenly over the sockets: it works, but one link between them carries more",
        )
    yield Finding(
        "numa", value, "GPUs spread evenly, one node a socket" if groups else "one node a socket", verdict, remedy
    )


def _topology(machine: Machine, _: Wanted) -> Iterator[Finding]:
    shape = classify(machine)
    if not shape.gpus:
        return
    said = Counter(shape.relations[pair] for pair in shape.relations)
    value = f"{shape.name}" + (
        f" ({', '.join(f'{count // 2}x {name}' for name, count in sorted(said.items()))})" if said else ""
    )
    order = [gpu.address for gpu in machine.served]
    differ = [
        f"{order[a]} and {order[b]}: {word} to nvidia-smi, {shape.relations[order[a], order[b]]} by the PCI tree"
        for (a, b), word in sorted(machine.driver_topology.items())
        if a < b < len(order)
        and (order[a], order[b]) in shape.relations
        and not _agree(word, shape.relations[order[a], order[b]])
    ]
    node = {address: number for number, group in shape.groups.items() for address in group}
    matrix = tuple(
        f"{address}  {' '.join(f'{word:<4}' for word in row)}  "
        f"node {node[address] if node[address] >= 0 else 'not known'}"
        for address, row in zip(shape.gpus, shape.matrix(), strict=True)
    )
    yield Finding(
        "topology",
        "; ".join([value, *differ[:1]]),
        "any",
        "warn" if differ else "ok",
        "believe nvidia-smi, which knows more than the tree, and please report the machine" if differ else "",
        detail=matrix,
    )


def _agree(said: str, seen: str) -> bool:
    """Compare two words for a path: NVLink is not in the tree, and drivers draw some of the lines in another place."""
    return said == seen or said.startswith("NV") or {said, seen} <= {"PHB", "NODE"} or {said, seen} <= {"PIX", "PXB"}


def _gpu_errors(machine: Machine, _: Wanted) -> Iterator[Finding]:
    if not machine.gpus and not (machine.events or machine.events_before):
        return
    if machine.events is None:
        yield Finding(
            "gpu_errors", "the kernel's log is not readable", "none since boot", "unknown", "run as root (become: true)"
        )
        return
    above = {port.address for port in machine.bridges}
    own = [
        event
        for event in machine.events
        if event.xid not in PROGRAM_XIDS and (event.xid is not None or event.lost or event.address in above)
    ]
    lines = Counter(
        f"{event.address}{f' ({slot})' if (slot := machine.slot(event.address)) else ''}: "
        + (f"Xid {event.xid}, {event.text}" if event.xid is not None else event.text)
        for event in own
    )
    told = [line + (f" ({count} times)" if count > 1 else "") for line, count in lines.most_common(_MOST_LINES)]
    value = (
        "; ".join(told) + (f"; and {len(lines) - _MOST_LINES} others" if len(lines) > _MOST_LINES else "")
        if lines
        else "none"
    )
    remedy = (
        "journalctl -k -g 'NVRM|AER|pciehp' has them all; docs.nvidia.com/deploy/xid-errors says what each Xid asks for"
    )
    yield _judged(not lines, "gpu_errors", value, "none since boot", "warn", remedy)


def _numa_balancing(machine: Machine, _: Wanted) -> Iterator[Finding]:
    if machine.numa_balancing is not None and machine.gpus and len(machine.numa) > 1:
        value = "on" if machine.numa_balancing else "off"
        remedy = "role pcie_fabric switches it off: it moves pages that the GPUs' buffers are pinned beside"
        yield _judged(not machine.numa_balancing, "numa_balancing", value, "off", "role", remedy, role="pcie_fabric")


def _cpu_governor(machine: Machine, _: Wanted) -> Iterator[Finding]:
    if machine.governors and machine.gpus:
        value = ", ".join(machine.governors)
        remedy = "role pcie_fabric sets it"
        yield _judged(value == "performance", "cpu_governor", value, "performance", "role", remedy, role="pcie_fabric")


def _aspm(machine: Machine, _: Wanted) -> Iterator[Finding]:
    if not machine.gpus:
        return
    off = "pcie_aspm=off" in machine.command_line.split()
    value = "off" if off else f"policy {machine.aspm}" if machine.aspm else "not known"
    right = True if off or machine.aspm == "performance" else None if not machine.aspm else False
    remedy = (
        "role pcie_fabric sets pcie_aspm=off: links that go to sleep are a known cause of GPUs that drop from the bus"
    )
    yield _judged(right, "aspm", value, "off", "role", remedy, role="pcie_fabric")


# --- Storage, limits, containers --------------------------------------------------------------------------------------


def _data(machine: Machine, _: Wanted) -> Iterator[Finding]:
    place = machine.storage
    if place is None:
        return
    path = place.path
    if not place.exists:
        value = place.rate_of or "is not there"
        remedy = f"mount the disk for the models at {path}, and put them below {path}/models"
        if place.rate_of:
            remedy = f"look what keeps {path} from answering: a dead disk, or a server that is gone"
        yield Finding("data", f"{path} {value}", "a directory on a fast local disk", "fail", remedy)
        return
    where = f"{path}: {place.filesystem} at {place.mount}" if place.filesystem else path
    local = place.filesystem not in REMOTE
    remedy = "keep the models on a local disk: a start waits for the network, and a lost server hangs it"
    kind = place.filesystem not in ("tmpfs", "ramfs", "overlay")
    if not kind:
        remedy = "this is memory or a container's layer: mount a disk there"
    yield _judged(local and kind, "data", where, "a directory on a fast local disk", "warn", remedy)


def _data_space(machine: Machine, wanted: Wanted) -> Iterator[Finding]:
    place = machine.storage
    if place is None or not place.exists:
        return
    free, used = place.free or 0, place.used_by_models
    value = f"{free / GB:.0f} GB free" + (f", {used / GB:.0f} GB of models there" if used >= GB else "")
    figure = f">= {wanted.data_free_gb} GB, models that are there included"
    remedy = (
        f"make room or mount a larger disk: Kimi-K2.5 takes {MODEL_GB} GB, its drafter a few (host_check_data_free_gb)"
    )
    yield _judged(free + used >= wanted.data_free_gb * GB, "data_space", value, figure, "fail", remedy)


def _data_rate(machine: Machine, wanted: Wanted) -> Iterator[Finding]:
    place = machine.storage
    if place is None or not place.exists:
        return
    figure = f">= {wanted.data_read_gb_s:g} GB/s"
    if place.rate is None:
        yield Finding("data_rate", place.rate_of or "not measured", figure, "unknown")
        return
    minutes = MODEL_GB / (place.rate / GB) / 60
    value = f"{place.rate / GB:.2f} GB/s ({place.rate_of}): {MODEL_GB} GB in {minutes:.0f} min"
    remedy = "NVMe disks, several of them striped, read several GB/s; a start reads everything once"
    yield _judged(place.rate >= wanted.data_read_gb_s * GB, "data_rate", value, figure, "warn", remedy)


def _shm(machine: Machine, wanted: Wanted) -> Iterator[Finding]:
    if not wanted.gpus:
        return
    # The container has a /dev/shm of its own (compose.yaml, shm_size): a limit; what it takes is the host's memory.
    right = None if machine.shm is None else machine.memory >= 2 * wanted.shm_gib * GIB
    own = f"/dev/shm {machine.shm / GIB:.0f} GiB; " if machine.shm is not None else ""  # noqa: S108
    value = f"{own}the container's own is taken from {machine.memory / GIB:.0f} GiB of memory"
    remedy = "add memory, or lower AERIE_SHM_SIZE: running out of it is a bus error"
    yield _judged(right, "shm", value, f"memory for the container's {wanted.shm_gib} GiB twice over", "warn", remedy)


def _nofile(machine: Machine, wanted: Wanted) -> Iterator[Finding]:
    yield _limit_of(
        machine,
        "nofile",
        machine.limits.nofile if machine.limits else 0,
        wanted.nofile,
        str(wanted.nofile),
        "every connection takes one",
    )


def _memlock(machine: Machine, _: Wanted) -> Iterator[Finding]:
    yield _limit_of(
        machine, "memlock", machine.limits.memlock if machine.limits else 0, None, "unlimited", "NCCL pins host memory"
    )


def _limit_of(machine: Machine, check: str, has: int | None, need: int | None, wanted: str, why: str) -> Finding:
    """Judge whether a container gets what compose.yaml says: whoever starts it has as much or may raise it."""
    if machine.limits is None:
        return Finding(check, "not known", wanted, "unknown")
    right = machine.limits.can_raise or has is None or (need is not None and has >= need)
    value = f"{'unlimited' if has is None else has}, of {machine.limits.of}" + (
        ", which may raise it" if machine.limits.can_raise else ""
    )
    remedy = (
        f"role vllm gives the container no more than that, and {why}: give docker.service Limit{check.upper()} and "
        "CAP_SYS_RESOURCE, which it has wherever root is not confined"
    )
    return _judged(right, check, value, wanted, "warn", remedy)


def _docker(machine: Machine, wanted: Wanted) -> Iterator[Finding]:
    engine = machine.docker
    figure = f">= {wanted.least_docker} with compose >= {wanted.least_compose}"
    if not engine.version:
        yield Finding("docker", engine.problem, figure, "role", "role docker installs and starts it", role="docker")
        return
    value = f"{engine.version}, compose {engine.compose or 'none'}, data in {engine.root}"
    remedy = (
        "role docker adds what is missing; it replaces nothing that works, so an older engine must be removed first"
    )
    right = _version(engine.version) >= _version(wanted.least_docker) and _version(engine.compose) >= _version(
        wanted.least_compose
    )
    yield _judged(right, "docker", value, figure, "role", remedy, role="docker")


def _toolkit(machine: Machine, wanted: Wanted) -> Iterator[Finding]:
    if not wanted.gpus and not machine.gpus:
        return
    kit = machine.toolkit
    gpu_count = sum(1 for name in kit.devices if re.search(r"=\d+$", name))
    value = f"{kit.version or 'not installed'}, " + (
        f"{kit.specification} names {gpu_count} GPUs" if kit.devices else "no CDI specification"
    )
    right = bool(kit.version) and "nvidia.com/gpu=all" in kit.devices and gpu_count >= wanted.gpus
    remedy = "role nvidia_container_toolkit installs it and writes the specification anew"
    figure = f"a CDI specification with {wanted.gpus} GPUs and nvidia.com/gpu=all"
    yield _judged(right, "toolkit", value, figure, "role", remedy, role="nvidia_container_toolkit")


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text)[:4])


def _size(size: int) -> str:
    return f"{size / GIB:g} GiB" if size >= GIB else f"{size >> 20} MiB"


def _alike(values: dict[str, str]) -> str:
    """Count each kind: `8x 128 GiB`."""
    return ", ".join(f"{count}x {value}" for value, count in Counter(values.values()).items())


# In the order in which the table shows them.
CHECKS: dict[str, Callable[[Machine, Wanted], Iterable[Finding]]] = {
    "distribution": _distribution,
    "architecture": _architecture,
    "kernel": _kernel,
    "virtualisation": _virtualisation,
    "firmware": _firmware,
    "secure_boot": _secure_boot,
    "gpus": _gpus,
    "gpu_model": _gpu_model,
    "gpu_errors": _gpu_errors,
    "driver": _driver,
    "vram": _vram,
    "pcie": _pcie,
    "bar1": _bar1,
    "above_4g": _above_4g,
    "acs": _acs,
    "iommu": _iommu,
    "aspm": _aspm,
    "numa": _numa,
    "topology": _topology,
    "numa_balancing": _numa_balancing,
    "cpu_governor": _cpu_governor,
    "memory": _memory,
    "data": _data,
    "data_space": _data_space,
    "data_rate": _data_rate,
    "shm": _shm,
    "nofile": _nofile,
    "memlock": _memlock,
    "cgroup": _cgroup,
    "time_sync": _time_sync,
    "clock": _clock,
    "docker": _docker,
    "toolkit": _toolkit,
}


# --- How it is shown --------------------------------------------------------------------------------------------------


def table(findings: list[Finding]) -> str:
    """Lay the lines out for a person: columns, each remedy below its line, and last how many there are of each verdict.

    Devices of which a check says the same share a line.
    """
    lines = [_row("VERDICT", "CHECK", "VALUE", "WANTED")]
    for finding, subjects in _together(findings):
        verdict = "accepted" if finding.accepted else finding.verdict
        value = f"{', '.join(subjects)}: {finding.value}" if subjects else finding.value
        shown = verdict.upper() if verdict == "fail" else verdict
        lines.append(_row(shown, finding.check.replace("_", " "), value, finding.wanted))
        lines += [_INDENT + line for line in finding.detail]
        if finding.remedy and finding.verdict != "ok":
            lines.append(
                textwrap.fill(f"-> {finding.remedy}", WIDTH, initial_indent=_INDENT, subsequent_indent=_INDENT + "   ")
            )
    return "\n".join([*lines, "", summary(findings)])


_COLUMNS = (9, 16, 56, 37)  # characters, of which the last of each stays free
_INDENT = " " * sum(_COLUMNS[:2])


def _row(*cells: str) -> str:
    wrapped = [
        textwrap.wrap(cell, width - 1, break_on_hyphens=False) or [""]
        for cell, width in zip(cells, _COLUMNS, strict=True)
    ]
    height = max(len(cell) for cell in wrapped)
    rows = [[cell[at] if at < len(cell) else "" for cell in wrapped] for at in range(height)]
    return "\n".join(
        "".join(f"{cell:<{width}}" for cell, width in zip(row, _COLUMNS, strict=True)).rstrip() for row in rows
    )


def _together(findings: list[Finding]) -> list[tuple[Finding, list[str]]]:
    alike: dict[Finding, list[str]] = {}
    for finding in findings:
        alike.setdefault(dataclasses.replace(finding, subject=""), []).extend(
            [finding.subject] if finding.subject else []
        )
    return list(alike.items())


def summary(findings: list[Finding]) -> str:
    """Count the verdicts, and name the roles that have something to do."""
    counts = Counter(finding.verdict for finding in findings)
    roles = sorted({finding.role for finding in findings if finding.verdict == "role"})
    said = [
        f"{counts[verdict]} {verdict}" + (f" ({', '.join(roles)})" if verdict == "role" else "")
        for verdict in VERDICTS
        if counts[verdict]
    ]
    return ", ".join(said)


def to_json(machine: Machine, findings: list[Finding]) -> dict[str, Any]:
    """Everything: the lines, the matrix, and the machine as it was read."""
    shape = classify(machine)
    return {
        "schema": 1,
        "host": machine.hostname,
        "verdict": next(
            (verdict for verdict in VERDICTS if any(finding.verdict == verdict for finding in findings)), "ok"
        ),
        "findings": [dataclasses.asdict(finding) for finding in findings],
        "topology": {
            "name": shape.name,
            "gpus": list(shape.gpus),
            "matrix": shape.matrix(),
            "numa": {str(k): list(v) for k, v in shape.groups.items()},
        },
        "machine": machine.to_json(),
    }
