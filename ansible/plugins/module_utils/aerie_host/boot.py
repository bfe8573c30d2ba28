"""Kernel arguments: which boot loader passes them, what it will pass at the next boot, and which fight each other.

What decides is read where the loader itself reads it: `grub.cfg`, not /etc/default/grub; the entries on the boot
partition, not /etc/kernel/cmdline.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

# Where systemd-boot's partition is mounted, in the order in which kernel-install looks (kernel-install(8)).
_PARTITIONS = ("efi", "boot", "boot/efi")
# Of grub.cfg: what other systems are started with, and what a person wrote.
_OTHERS = re.compile(r"/\d+_(os-prober|custom) ")


@dataclass(frozen=True)
class Loader:
    """A boot loader that was found: by what, and what keeps its arguments from being set (empty: nothing)."""

    name: str  # grub, systemd-boot
    evidence: str
    problem: str = ""


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
    menu = root / "boot/grub/grub.cfg"
    if menu.exists():
        programs = [root / place / "update-grub" for place in ("usr/sbin", "sbin")]
        problem = "" if any(map(_exists, programs)) else "update-grub is missing, which Debian's grub2-common brings"
        found.append(Loader("grub", "/boot/grub/grub.cfg", problem))
    for partition in _PARTITIONS:
        images = sorted((root / partition / "EFI/systemd").glob("systemd-boot*.efi"))
        if images:
            found.append(Loader("systemd-boot", f"/{images[0].relative_to(root)}", _systemd_boot_problem(root)))
            break
    return found


def _exists(path: Path) -> bool:
    return path.exists()


def _systemd_boot_problem(root: Path) -> str:
    unified = [image for partition in _PARTITIONS for image in (root / partition / "EFI/Linux").glob("*.efi")]
    if unified:
        image = min(unified).relative_to(root)
        return (
            f"it starts unified kernel images (/{image}), whose arguments are built in and may be signed: add them to "
            "/etc/kernel/cmdline and build the images anew"
        )
    if not read_entries(root, "systemd-boot"):
        return "it has no entry in loader/entries for a kernel that is installed in /lib/modules"
    return ""


def choose(loaders: Sequence[Loader], wanted: str) -> Loader:
    """Take the one loader that is there, or the one that was asked for. LoaderError says what was found instead."""
    names = ", ".join(f"{loader.name} ({loader.evidence})" for loader in loaders) or "neither GRUB nor systemd-boot"
    if wanted != "auto":
        loaders = [loader for loader in loaders if loader.name == wanted]
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
    if loader == "grub":
        return parse_grub((root / "boot/grub/grub.cfg").read_text(errors="replace"))
    versions = {place.name for place in (root / "lib/modules").glob("*")}
    found = []
    for partition in _PARTITIONS:
        for entry in sorted((root / partition / "loader/entries").glob("*.conf")):
            parsed = parse_entry(entry.name, entry.read_text(errors="replace"))
            ours = any(entry.name.endswith(f"-{version}.conf") or f"-{version}+" in entry.name for version in versions)
            if parsed and ours:
                found.append(parsed)
    return found


def parse_grub(text: str) -> list[Entry]:
    """Read grub.cfg: each line that starts a vmlinuz of this system, under the title of its menu entry."""
    entries = []
    title = section = ""
    for raw in text.splitlines():
        line = raw.strip()
        if line.startswith("### BEGIN"):
            section = line
        elif line.startswith(("menuentry ", "submenu ")):
            title = _words(line)[1]
        elif re.match(r"linux(16|efi)?\s", line) and not _OTHERS.search(section):
            words = _words(line)
            if "vmlinuz" in words[1]:
                entries.append(Entry(title, tuple(words[2:]), "(recovery mode)" in title or "single" in words))
    return entries


def parse_entry(name: str, text: str) -> Entry | None:
    """Read an entry of the Boot Loader Specification, whose `options` add up. None where it starts no Linux kernel."""
    title, kernel, arguments = name, False, []
    for line in text.splitlines():
        key, _, value = line.strip().partition(" ")
        if key == "options":
            arguments += _words(value)
        elif key in {"linux", "efi"}:
            kernel = True
        elif key == "title":
            title = f"{value.strip()} ({name})"
    return Entry(title, tuple(arguments)) if kernel else None


def _words(line: str) -> list[str]:
    try:
        return shlex.split(line)
    except ValueError:  # a quote that GRUB closes on another line
        return line.split()


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
