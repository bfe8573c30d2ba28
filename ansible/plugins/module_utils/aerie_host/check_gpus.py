"""The checks of the GPUs, of their driver, and of the paths between them."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from .finding import GIB, Finding, judged, version_of
from .missing import in_words, missing_gpus
from .nvidia import RTX_PRO_6000_BLACKWELL
from .topology import classify

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .finding import Wanted
    from .machine import Machine
    from .nvidia import ServedGpu
    from .pci import Device, Link

# Errors that a program on the GPU causes, not the GPU: NVIDIA's catalogue of Xids says to restart the program.
PROGRAM_XIDS = {13, 31, 32, 43, 45, 68, 69}
# Above so many logical CPUs the kernel needs interrupt remapping, which is the IOMMU's (x2APIC).
MOST_CPUS_WITHOUT_IOMMU = 255
GENERATIONS = {2.5: 1, 5.0: 2, 8.0: 3, 16.0: 4, 32.0: 5, 64.0: 6}
_PEERS = 2  # GPUs from which on there is traffic between them
_MOST_LINES = 4  # of the kernel's that are quoted


def gpus(machine: Machine, wanted: Wanted) -> Iterator[Finding]:
    """Count the GPUs that answer and are served, and name what is missing."""
    missing = missing_gpus(machine, wanted.gpus)
    lost = {gpu.address for gpu in missing}
    there = sum(1 for gpu in machine.gpus if gpu.address not in lost)
    if not missing:
        remedy = f"aerie_gpus is {wanted.gpus}: set it to {there} if all of them are to serve"
        yield judged(there == wanted.gpus, "gpus", str(there), str(wanted.gpus), "warn", remedy)
    elif not machine.gpus and not any(gpu.left_a_trace for gpu in missing):
        remedy = (
            "no NVIDIA GPU is on the bus. On a machine without set aerie_gpus: 0; else look at power cables, risers "
            "and, in the firmware, at Above 4G Decoding and the slots' bifurcation"
        )
        yield Finding("gpus", "none", str(wanted.gpus), "fail", remedy)
    else:
        remedy = (
            "power the machine off (a reboot seldom brings one back), reseat the card, its power cables and riser, "
            "then look again"
        )
        if not any(gpu.address for gpu in missing):
            remedy = f"set aerie_gpus: {there} if this machine has no more; else {remedy}"
        yield Finding(
            "gpus", f"{there} of {wanted.gpus}: {'; '.join(in_words(missing))}", str(wanted.gpus), "fail", remedy
        )


def gpu_model(machine: Machine, wanted: Wanted) -> Iterator[Finding]:
    """Judge the model, and whether there is one only."""
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
    yield judged(wanted.gpu_model in value, "gpu_model", value, wanted.gpu_model, "warn", remedy)


def _model(gpu: Device, machine: Machine) -> str:
    name = next((served.name for served in machine.served if served.address == gpu.address and served.name), "")
    if not name and gpu.device in RTX_PRO_6000_BLACKWELL:
        return f"NVIDIA RTX PRO 6000 Blackwell {RTX_PRO_6000_BLACKWELL[gpu.device]}"
    return name or f"NVIDIA [10de:{gpu.device:04x}]"


def driver(machine: Machine, wanted: Wanted) -> Iterator[Finding]:
    """Judge release and kind of the modules that are loaded, and whether the tools are of the same."""
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
    right = machine.driver.open and version_of(machine.driver.version) >= version_of(wanted.least_driver)
    tools = machine.smi.driver if machine.smi else ""
    if tools and tools != machine.driver.version:
        value += f"; nvidia-smi is of {tools}"
        yield Finding("driver", value, least, "fail", "module and libraries differ, as after an upgrade: reboot")
        return
    value = ", ".join(part for part in (value, others) if part)
    if right or wanted.driver_replace:
        remedy = "role nvidia_driver puts its own in that place, which takes a reboot"
        yield judged(right and not others, "driver", value, least, "role", remedy, role="nvidia_driver")
        return
    remedy = (
        "role nvidia_driver removes no driver unless told to: set nvidia_driver_replace: true, or replace it yourself"
    )
    yield Finding("driver", value, least, "fail", remedy)


def vram(machine: Machine, wanted: Wanted) -> Iterator[Finding]:
    """Judge each GPU's memory, which the driver tells."""
    if not machine.gpus:
        return
    known = {gpu.address: gpu.vram_mib for gpu in machine.served if gpu.vram_mib}
    figure = f">= {wanted.vram_gib} GiB a GPU"
    if not known:
        if not machine.driver:
            why = "known once the driver is loaded"
        else:
            why = "nvidia-smi does not answer" if machine.smi else "nvidia-smi, which tells it, is not installed"
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
    yield judged(not short, "vram", value, figure, "fail", remedy)


def pcie(machine: Machine, _: Wanted) -> Iterator[Finding]:
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
    """Tell whether a lower speed is rest: of a GPU that works at nothing. A switch's uplink does not train down."""
    return device.is_gpu and not (served and (served.utilization or served.idle is False))


def bar1(machine: Machine, _: Wanted) -> Iterator[Finding]:
    """Peers reach a GPU's memory through BAR1, so it must hold all of it."""
    good: dict[str, str] = {}
    vram = {gpu.address: (gpu.vram_mib or 0) << 20 for gpu in machine.served}
    for gpu in machine.gpus:
        if not gpu.answers:
            continue
        size = gpu.memory_bar.size if gpu.memory_bar else 0
        best = max((max(bar.sizes) for bar in gpu.resizable if bar.sizes), default=0)
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


def above_4g(machine: Machine, _: Wanted) -> Iterator[Finding]:
    """Tell a firmware that gives no addresses above 4 GiB: large BARs are small, low or without an address."""
    bad: dict[str, str] = {}
    seen = [gpu for gpu in machine.gpus if gpu.answers]
    for gpu in seen:
        if not gpu.bars or any(not bar.address for bar in gpu.bars):
            bad[gpu.address] = "no address for " + (
                ", ".join(f"BAR{bar.index}" for bar in gpu.bars if not bar.address) or "its BARs"
            )
        elif gpu.memory_bar and gpu.memory_bar.address < 4 * GIB:
            bad[gpu.address] = f"BAR1 lies at {gpu.memory_bar.address:#x}, below 4 GiB"
    if seen:
        value = "; ".join(f"{address}: {what}" for address, what in bad.items()) or "BARs lie above 4 GiB"
        remedy = (
            "switch Above 4G Decoding (MMIO above 4G) on in the firmware, and raise its MMIO size where it has one: "
            "eight GPUs take 1 TiB"
        )
        yield judged(not bad, "above_4g", value, "addresses above 4 GiB", "fail", remedy)


def acs(machine: Machine, _: Wanted) -> Iterator[Finding]:
    """Judge redirection at every port above a GPU."""
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
    yield judged(not redirecting, "acs", value, wanted, "role", remedy, role="pcie_fabric")


def iommu(machine: Machine, _: Wanted) -> Iterator[Finding]:
    """Judge the GPUs' IOMMU groups; without any, whether the kernel can do without."""
    if not machine.gpus:
        return
    kinds = sorted({gpu.iommu_type for gpu in machine.gpus if gpu.iommu_type})
    if not machine.iommu_present and not kinds:
        value, right = "off", machine.logical_cpus <= MOST_CPUS_WITHOUT_IOMMU
        remedy = (
            f"with {machine.logical_cpus} logical CPUs the kernel needs it for interrupts: switch it on in the firmware"
            " and use iommu=pt"
        )
        yield judged(right, "iommu", value, "off or passed through", "warn", remedy)
        return
    if not kinds:
        yield Finding("iommu", "on; the GPUs' mode is not known", "off or passed through", "unknown")
        return
    value = (
        "passed through (identity)" if kinds == ["identity"] else f"translates the GPUs' addresses ({', '.join(kinds)})"
    )
    remedy = "role pcie_fabric sets iommu=pt, and says what that costs in protection; it takes a reboot"
    yield judged(kinds == ["identity"], "iommu", value, "off or passed through", "role", remedy, role="pcie_fabric")


def numa(machine: Machine, _: Wanted) -> Iterator[Finding]:
    """Judge how GPUs and memory are spread over the nodes."""
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
    elif machine.sockets and sum(1 for node in nodes if node.cpus) > machine.sockets:  # a memory expander has none
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


def topology(machine: Machine, _: Wanted) -> Iterator[Finding]:
    """Show the matrix, and compare it with what nvidia-smi says."""
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


def gpu_errors(machine: Machine, _: Wanted) -> Iterator[Finding]:
    """Quote what the kernel has said of GPUs and of the ports above them since boot."""
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
    yield judged(not lines, "gpu_errors", value, "none since boot", "warn", remedy)


def numa_balancing(machine: Machine, _: Wanted) -> Iterator[Finding]:
    """Judge whether the kernel moves pages between nodes."""
    if machine.numa_balancing is not None and machine.gpus and len(machine.numa) > 1:
        value = "on" if machine.numa_balancing else "off"
        remedy = "role pcie_fabric switches it off: it moves pages that the GPUs' buffers are pinned beside"
        yield judged(not machine.numa_balancing, "numa_balancing", value, "off", "role", remedy, role="pcie_fabric")


def cpu_governor(machine: Machine, _: Wanted) -> Iterator[Finding]:
    """Judge the CPUs' governors."""
    if machine.governors and machine.gpus:
        value = ", ".join(machine.governors)
        remedy = "role pcie_fabric sets it"
        yield judged(value == "performance", "cpu_governor", value, "performance", "role", remedy, role="pcie_fabric")


def aspm(machine: Machine, _: Wanted) -> Iterator[Finding]:
    """Judge power management of links."""
    if not machine.gpus:
        return
    figure = "policy performance"
    if "pcie_aspm=off" in machine.command_line.split():
        remedy = (
            "remove pcie_aspm=off from the kernel's arguments: it does not switch ASPM off, it leaves each link as the "
            "firmware set it, and the policy of role pcie_fabric without effect"
        )
        yield Finding("aspm", "left to the firmware (pcie_aspm=off)", figure, "warn", remedy)
        return
    value = f"policy {machine.aspm}" if machine.aspm else "not known"
    right = machine.aspm == "performance" if machine.aspm else None
    remedy = (
        "role pcie_fabric sets pcie_aspm.policy=performance: links that go to sleep are a known cause of GPUs that "
        "drop from the bus"
    )
    yield judged(right, "aspm", value, figure, "role", remedy, role="pcie_fabric")


def _size(size: int) -> str:
    return f"{size / GIB:g} GiB" if size >= GIB else f"{size >> 20} MiB"


def _alike(values: dict[str, str]) -> str:
    """Count each kind: `8x 128 GiB`."""
    return ", ".join(f"{count}x {value}" for value, count in Counter(values.values()).items())
