"""Kernel arguments: which boot loader passes them, what it will pass at the next boot, and which fight each other."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from . import boot_loader

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path


@dataclass(frozen=True)
class Loader:
    """A boot loader that was found: by what, and what keeps its arguments from being set (empty: nothing)."""

    name: str  # grub, systemd-boot
    evidence: str
    problem: str = ""
    started: bool = False  # this system, as the firmware was told


@dataclass(frozen=True)
class Entry:
    """One thing that can be booted, with the arguments that its kernel gets. `recovery`: a way back, left as it is."""

    title: str
    arguments: tuple[str, ...]
    recovery: bool = False


class LoaderError(Exception):
    """No boot loader whose arguments could be set; the message says what was found and what to do."""


# --- Which loader -----------------------------------------------------------------------------------------------------


def find_loaders(root: Path) -> list[Loader]:
    """Look for GRUB and systemd-boot below `root`."""
    found = []
    started = boot_loader.started_by(root)
    if (root / boot_loader.MENU).exists():
        programs = [root / place / "update-grub" for place in ("usr/sbin", "sbin")]
        there = any(program.exists() for program in programs)
        problem = "" if there else "update-grub is missing, which Debian's grub2-common brings"
        name = boot_loader.GRUB
        found.append(Loader(name, f"/{boot_loader.MENU}", problem, started == name))
    for partition in boot_loader.PARTITIONS:
        images = sorted((root / partition / "EFI/systemd").glob("systemd-boot*.efi"))
        if images:
            name = boot_loader.SYSTEMD_BOOT
            evidence = f"/{images[0].relative_to(root)}"
            found.append(Loader(name, evidence, _systemd_boot_problem(root), started == name))
            break
    return found


def _systemd_boot_problem(root: Path) -> str:
    unified = [
        image for partition in boot_loader.PARTITIONS for image in (root / partition / "EFI/Linux").glob("*.efi")
    ]
    if unified:
        image = min(unified).relative_to(root)
        return (
            f"it starts unified kernel images (/{image}), whose arguments are built in and may be signed: add them to "
            "/etc/kernel/cmdline and build the images anew"
        )
    if not read_entries(root, boot_loader.SYSTEMD_BOOT):
        return "it has no entry in loader/entries for a kernel that is installed in /lib/modules"
    return ""


def choose(loaders: Sequence[Loader], wanted: str) -> Loader:
    """Take the one that was asked for, that started this system, or that is there. LoaderError says what was found."""
    names = ", ".join(f"{loader.name} ({loader.evidence})" for loader in loaders) or "neither GRUB nor systemd-boot"
    if wanted != "auto":
        loaders = [loader for loader in loaders if loader.name == wanted]
    elif len(loaders) > 1:
        loaders = [loader for loader in loaders if loader.started] or loaders
    if not loaders:
        raise LoaderError(
            f"found {names}; set pcie_fabric_bootloader to grub or systemd-boot where one of them starts this host, "
            "or pcie_fabric_kernel_arguments: false and pass the arguments by its own means"
        )
    if len(loaders) > 1:
        raise LoaderError(f"found {names}; set pcie_fabric_bootloader to the one that starts this host")
    loader = loaders[0]
    if loader.problem:
        raise LoaderError(
            f"found {names}, and {loader.problem}; or set pcie_fabric_kernel_arguments: false and pass the arguments "
            "by other means"
        )
    return loader


# --- What it passes ---------------------------------------------------------------------------------------------------


def read_entries(root: Path, loader: str) -> list[Entry]:
    """Read what the loader will pass to the installed kernels."""
    if loader == boot_loader.GRUB:
        menu = boot_loader.read_menu(root)
        return of_menu(menu) if menu else []
    versions = {place.name for place in (root / "lib/modules").glob("*")}
    return [
        Entry(entry.title, entry.arguments)
        for _, entries in boot_loader.read_entries(root)
        for entry in entries
        if any(entry.name.endswith(f"-{version}.conf") or f"-{version}+" in entry.name for version in versions)
    ]


def of_menu(menu: boot_loader.MenuEntry) -> list[Entry]:
    """Take from GRUB's menu each line that starts a kernel of this system."""
    return [
        Entry(entry.title, start.arguments, "(recovery mode)" in entry.title or "single" in start.arguments)
        for entry in menu.all()
        if not entry.others
        for start in entry.starts
    ]


def lacking(entries: Iterable[Entry], wanted: Sequence[str]) -> dict[str, list[str]]:
    """Return what each entry lacks of the wanted arguments; recovery entries need none."""
    missing: dict[str, list[str]] = {}
    for entry in entries:
        words = [word for word in wanted if word not in entry.arguments]
        if words and not entry.recovery:
            missing.setdefault(entry.title, words)
    return missing


# --- What fights what -------------------------------------------------------------------------------------------------

# The wanted argument, what the site's looks like, and what comes of both. drivers/iommu, arch/x86/kernel/pci-dma.c and
# drivers/pci/pcie/aspm.c of Linux say which one wins.
_CONFLICTS = (
    ("iommu=pt", r"(amd_|intel_)?iommu=(\S+,)?off(,\S+)?", "switches the IOMMU off: iommu=pt has no effect"),
    ("iommu=pt", r"iommu=(\S+,)?nopt(,\S+)?|iommu\.passthrough=(0|off|n)", "turns DMA translation on again"),
    ("iommu=off", r"(amd_|intel_)?iommu=(\S+,)?(pt|on|force)(,\S+)?", "asks for an IOMMU that is switched off"),
    (
        "pcie_aspm.policy=performance",
        "pcie_aspm=off",
        "leaves link power to the firmware: the policy has no effect",
    ),
    (
        "pcie_aspm.policy=performance",
        r"pcie_aspm=force|pcie_aspm\.policy=(?!performance$).*",
        "asks for link power saving",
    ),
    ("pcie_port_pm=off", "pcie_port_pm=force", "asks for power saving of ports"),
)


def conflicts(arguments: Iterable[str], wanted: Sequence[str]) -> list[str]:
    """Say which of the arguments stand against a wanted one, and what comes of it."""
    return [
        f"{word} stands against {ours}: it {outcome}"
        for word in dict.fromkeys(arguments)
        for ours, pattern, outcome in _CONFLICTS
        if ours in wanted and word not in wanted and re.fullmatch(pattern, word)
    ]
