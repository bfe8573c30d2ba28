"""The checks of the system around the GPUs: releases, firmware, clocks, memory, disk, limits, containers."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from .finding import GB, GIB, Finding, judged, version_of
from .machine import REMOTE, held_by

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .finding import Wanted
    from .machine import Machine

# Kimi-K2.5's weights, of which a start reads every byte.
MODEL_GB = 595
# Releases that the roles know.
DISTRIBUTIONS = ("Debian 12", "Debian 13", "Ubuntu 22.04", "Ubuntu 24.04")
# Seconds: beyond, certificates and signatures begin to look expired or not yet valid.
MOST_CLOCK_DIFFERENCE = 60
_CGROUP = 2
_MOST_NAMES = 6  # of packages that are told
_CIRCULAR_TOOLKIT = (
    1,
    19,
    0,
)  # its unit wants to start after everything else at boot; role nvidia_container_toolkit refuses it


def distribution(machine: Machine, _: Wanted) -> Iterator[Finding]:
    """Judge the release by its name and version."""
    remedy = "install one of these releases; the roles know no other's packages"
    value = machine.distribution or "not known"
    yield judged(value in DISTRIBUTIONS, "distribution", value, ", ".join(DISTRIBUTIONS), "fail", remedy)


def architecture(machine: Machine, _: Wanted) -> Iterator[Finding]:
    """Judge the architecture."""
    remedy = "Aerie's image exists for x86_64 only"
    yield judged(machine.architecture == "x86_64", "architecture", machine.architecture, "x86_64", "fail", remedy)


def virtualisation(machine: Machine, _: Wanted) -> Iterator[Finding]:
    """Tell a guest, of whose hardware the hypervisor shows what it wants."""
    remedy = "links, BARs, ACS and IOMMU below are what the hypervisor shows: look for them on the host of this guest"
    right = not (machine.virtual and machine.gpus)
    value = "a virtual machine" if machine.virtual else "none"
    yield judged(right, "virtualisation", value, "none" if machine.gpus else "any", "warn", remedy)


def firmware(machine: Machine, wanted: Wanted) -> Iterator[Finding]:
    """Name machine and firmware, and judge how it booted."""
    board = machine.board
    made = " ".join(part for part in (board.maker, board.product or board.board) if part)
    version = f"firmware {board.firmware} of {board.firmware_date}" if board.firmware else ""
    boot = {True: "UEFI", False: "legacy boot (CSM)", None: "boot mode not known"}[machine.uefi]
    value = ", ".join(part for part in (made, version, boot) if part)
    remedy = "switch CSM off and boot by UEFI: Resizable BAR does not work with CSM"
    matters = bool(wanted.gpus or machine.gpus) and not machine.virtual
    right = machine.uefi if matters else True
    yield judged(right, "firmware", value, "UEFI" if matters else "any", "warn", remedy)


def secure_boot(machine: Machine, wanted: Wanted) -> Iterator[Finding]:
    """Judge secure boot, by which the kernel loads no module that was built on the host: it matters until one is."""
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
        "switch it off in the firmware; or set nvidia_driver_secure_boot: mok, which signs the module with a key that "
        "somebody must enrol at the console"
    )
    if wanted.mok:
        remedy = "role nvidia_driver signs the module with a key, and says when somebody must enrol it at the console"
        yield judged(right, "secure_boot", value, figure, "role", remedy, role="nvidia_driver")
    else:
        yield judged(right, "secure_boot", value, figure, "fail", remedy)


def kernel(machine: Machine, _: Wanted) -> Iterator[Finding]:
    """Judge the running kernel, and name the one that may come after the next boot."""
    newest = machine.newest_kernel
    value = machine.kernel + (
        f"; {newest} is installed too, and may be the next boot's" if newest not in ("", machine.kernel) else ""
    )
    remedy = "Ubuntu 22.04 has 5.15, Debian 12 has 6.1: install the distribution's kernel and reboot"
    yield judged(version_of(machine.kernel) >= (5, 15), "kernel", value, ">= 5.15", "fail", remedy)


def cgroup(machine: Machine, _: Wanted) -> Iterator[Finding]:
    """Judge the version of cgroups."""
    argument = re.search(r"(?<!\S)systemd\.unified_cgroup_hierarchy=\S*", machine.command_line)
    if argument:
        remedy = f"remove {argument[0]} from the kernel's arguments, by which it boots so, and reboot"
    else:
        remedy = (
            "none of the kernel's arguments asks for the old one: add systemd.unified_cgroup_hierarchy=1 to them, and "
            "reboot; in a container it is its host's"
        )
    value = f"version {machine.cgroup}" if machine.cgroup else "not known"
    right = None if machine.cgroup is None else machine.cgroup == _CGROUP
    yield judged(right, "cgroup", value, "version 2", "warn", remedy)


def time_sync(machine: Machine, _: Wanted) -> Iterator[Finding]:
    """Judge whether something keeps the clock."""
    if machine.time_synchronized is None:
        remedy = "look whether another program keeps the clock (chronyc tracking, ntpq -p): timedatectl needs systemd"
        yield Finding("time_sync", "not known (timedatectl does not answer)", "synchronized", "unknown", remedy)
        return
    value = "synchronized" if machine.time_synchronized else "not synchronized"
    remedy = "set up systemd-timesyncd or chrony: timedatectl set-ntp true, then timedatectl show -p NTPSynchronized"
    yield judged(machine.time_synchronized, "time_sync", value, "synchronized", "warn", remedy)


def clock(machine: Machine, wanted: Wanted) -> Iterator[Finding]:
    """Compare the clock with the controller's."""
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
    yield judged(near, "clock", value, within, "fail", remedy)


def memory(machine: Machine, wanted: Wanted) -> Iterator[Finding]:
    """Judge the memory; the firmware keeps a part of what is built in."""
    right = machine.memory >= wanted.memory_gib * GIB * 0.94 if machine.memory else None
    remedy = "add memory; host_check_memory_gib is the figure wanted"
    yield judged(right, "memory", f"{machine.memory / GIB:.0f} GiB", f">= {wanted.memory_gib} GiB", "warn", remedy)


def data(machine: Machine, _: Wanted) -> Iterator[Finding]:
    """Judge the models' directory: there, local, a disk."""
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
    yield judged(local and kind, "data", where, "a directory on a fast local disk", "warn", remedy)


def data_space(machine: Machine, wanted: Wanted) -> Iterator[Finding]:
    """Judge its space; models that are there need none."""
    place = machine.storage
    if place is None or not place.exists:
        return
    free, used = place.free or 0, place.used_by_models
    value = f"{free / GB:.0f} GB free" + (f", {used / GB:.0f} GB of models there" if used >= GB else "")
    figure = f">= {wanted.data_free_gb} GB, models that are there included"
    remedy = (
        f"make room or mount a larger disk: Kimi-K2.5 takes {MODEL_GB} GB, its drafter a few (host_check_data_free_gb)"
    )
    yield judged(free + used >= wanted.data_free_gb * GB, "data_space", value, figure, "fail", remedy)


def data_rate(machine: Machine, wanted: Wanted) -> Iterator[Finding]:
    """Judge its measured read rate."""
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
    yield judged(place.rate >= wanted.data_read_gb_s * GB, "data_rate", value, figure, "warn", remedy)


def shm(machine: Machine, wanted: Wanted) -> Iterator[Finding]:
    """Judge whether the container's shared memory has room in the host's memory."""
    if not wanted.gpus:
        return
    # The container has a /dev/shm of its own (compose.yaml, shm_size): a limit; what it takes is the host's memory.
    right = None if machine.shm is None else machine.memory >= 2 * wanted.shm_gib * GIB
    own = f"/dev/shm {machine.shm / GIB:.0f} GiB; " if machine.shm is not None else ""  # noqa: S108
    value = f"{own}the container's own is taken from {machine.memory / GIB:.0f} GiB of memory"
    remedy = "add memory, or lower AERIE_SHM_SIZE: running out of it is a bus error"
    yield judged(right, "shm", value, f"memory for the container's {wanted.shm_gib} GiB twice over", "warn", remedy)


def nofile(machine: Machine, wanted: Wanted) -> Iterator[Finding]:
    """Judge how many files a container can have open."""
    yield _limit_of(
        machine,
        "nofile",
        machine.limits.nofile if machine.limits else 0,
        wanted.nofile,
        str(wanted.nofile),
        "every connection takes one",
    )


def memlock(machine: Machine, _: Wanted) -> Iterator[Finding]:
    """Judge how much memory a container can pin."""
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
    return judged(right, check, value, wanted, "warn", remedy)


def held(machine: Machine, wanted: Wanted) -> Iterator[Finding]:
    """Judge whether an upgrade, unattended ones too, can pull kernel, driver or engine from under the service."""
    if not wanted.gpus and not machine.gpus:
        return
    figure = "kernel, driver, toolkit and Docker held back from upgrades"
    if machine.held is None:
        yield Finding("held", "not known: no dpkg", figure, "unknown")
        return
    loose = [name for name, is_held in sorted(machine.held.items()) if not is_held]
    value = f"{len(machine.held) - len(loose)} of {len(machine.held)} packages" if machine.held else "none is installed"
    if loose:
        value += f"; not {', '.join(loose[:_MOST_NAMES])}" + (" and others" if len(loose) > _MOST_NAMES else "")
    roles = sorted({held_by(name) for name in loose})
    remedy = f"role {' and '.join(roles)} holds them (apt-mark showhold)"
    yield judged(not loose, "held", value, figure, "role", remedy, role=roles[0] if roles else "")


def docker(machine: Machine, wanted: Wanted) -> Iterator[Finding]:
    """Judge the engine that answers, and compose."""
    engine = machine.docker
    figure = f">= {wanted.least_docker} with compose >= {wanted.least_compose}"
    if not engine.version:
        yield Finding("docker", engine.problem, figure, "role", "role docker installs and starts it", role="docker")
        return
    value = f"{engine.version}, compose {engine.compose or 'none'}, data in {engine.root}"
    if version_of(engine.version) < version_of(wanted.least_docker):
        remedy = "role docker replaces no engine that works: upgrade it, or remove it, and the role installs one"
        yield Finding("docker", value, figure, "fail", remedy)
        return
    right = version_of(engine.compose) >= version_of(wanted.least_compose)
    if right and engine.disabled:
        remedy = "aerie.service starts it at a boot, for other containers nothing does: systemctl enable docker"
        yield Finding("docker", f"{value}, disabled", figure, "warn", remedy)
        return
    yield judged(right, "docker", value, figure, "role", "role docker adds what is missing", role="docker")


def toolkit(machine: Machine, wanted: Wanted) -> Iterator[Finding]:
    """Judge NVIDIA's toolkit by the CDI specification that it wrote."""
    if not wanted.gpus and not machine.gpus:
        return
    kit = machine.toolkit
    gpu_count = sum(1 for name in kit.devices if re.search(r"=\d+$", name))
    value = f"{kit.version or 'not installed'}, " + (
        f"{kit.specification} names {gpu_count} GPUs" if kit.devices else "no CDI specification"
    )
    if kit.version and (
        version_of(kit.version) < version_of(wanted.least_toolkit) or version_of(kit.version)[:3] == _CIRCULAR_TOOLKIT
    ):
        remedy = (
            "role nvidia_container_toolkit replaces none that works: upgrade nvidia-container-toolkit-base to 1.19.1 "
            "or later (running containers stay), or remove it"
        )
        yield Finding("toolkit", value, f">= {wanted.least_toolkit}, and not 1.19.0", "fail", remedy)
        return
    right = bool(kit.version) and "nvidia.com/gpu=all" in kit.devices and gpu_count >= wanted.gpus
    remedy = "role nvidia_container_toolkit installs it and writes the specification anew"
    figure = f"a CDI specification with {wanted.gpus} GPUs and nvidia.com/gpu=all"
    yield judged(right, "toolkit", value, figure, "role", remedy, role="nvidia_container_toolkit")
