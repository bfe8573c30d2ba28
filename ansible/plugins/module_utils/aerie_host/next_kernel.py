"""Which kernel the next boot will start: what the boot loader's own files say, not what is newest or runs now.

A host whose driver module is built for the running kernel alone loses its GPUs at the next reboot, if that starts
another one.
"""

from __future__ import annotations

import fnmatch
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from . import boot_loader

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from .boot_loader import BootEntry, MenuEntry


@dataclass(frozen=True, slots=True)
class NextKernel:
    """`version` as `uname -r` will say it, and `because`: what decided."""

    version: str
    because: str


def read_next_kernel(root: Path = Path("/"), running: str = "") -> NextKernel:
    """Find the next boot's kernel below `root`. Without a boot loader: /boot's newest, else the running one."""
    menu = None if boot_loader.started_by(root) == boot_loader.SYSTEMD_BOOT else boot_loader.read_menu(root)
    found = from_grub(menu, _text(root / "boot/grub/grubenv")) if menu else _from_entries(root)
    if found:
        return found
    versions = [path.name.removeprefix("vmlinuz-") for path in (root / "boot").glob("vmlinuz-*")]
    if versions:
        return NextKernel(max(versions, key=order), "it is the newest one in /boot, and no boot loader says otherwise")
    return NextKernel(running, "it is running, and /boot has no other")


def _text(path: Path) -> str:
    """Return a file's text, empty where it is not there."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def order(version: str) -> tuple[tuple[int, int | str], ...]:
    """Sort kernel versions as people read them: 6.1.0-9 before 6.1.0-18."""
    return tuple((0, int(part)) if part.isdecimal() else (1, part) for part in re.split(r"(\d+)", version) if part)


# --- GRUB -------------------------------------------------------------------------------------------------------------


def from_grub(menu: MenuEntry, environment: str) -> NextKernel | None:
    """Follow grub.cfg and grubenv as GRUB does; None where no entry starts a Linux kernel."""
    saved = dict(re.findall(r"^(next_entry|saved_entry)=(.*)$", environment, flags=re.MULTILINE))
    default = menu.default
    wanted, because = default, f"it is GRUB's default entry ({default})"
    if saved.get("next_entry"):
        wanted, because = saved["next_entry"], f"grub-reboot chose it for the next boot ({saved['next_entry']})"
    elif "saved_entry" in default:
        wanted = saved.get("saved_entry", "") or "0"
        because = f"it is the entry that GRUB has saved ({wanted})"
    # An entry that is not there is no obstacle to GRUB: it starts the first one.
    chosen = _find(menu.entries, wanted.split(">")) or _first(menu.entries)
    return NextKernel(chosen.kernel, because) if chosen and chosen.kernel else None


def _find(entries: list[MenuEntry], path: list[str]) -> MenuEntry | None:
    head, *rest = path
    if head.isdecimal():
        found = entries[int(head)] if int(head) < len(entries) else None
    else:
        found = next((entry for entry in entries if head in (entry.identifier, entry.title)), None)
    if found is None:
        return None
    return _find(found.entries, rest) if rest else found if found.kernel else _first(found.entries)


def _first(entries: Iterable[MenuEntry]) -> MenuEntry | None:
    return next((entry for entry in entries if entry.kernel), None)


# --- systemd-boot -----------------------------------------------------------------------------------------------------


def _from_entries(root: Path) -> NextKernel | None:
    for partition, entries in boot_loader.read_entries(root):
        found = [entry for entry in entries if entry.linux]
        if not found:
            continue
        settings = _text(root / partition / "loader/loader.conf")
        return from_entries(
            found,
            once=boot_loader.variable(root, "EntryOneShot"),
            default=boot_loader.variable(root, "EntryDefault"),
            configured=next(iter(re.findall(r"^default\s+(\S+)", settings, re.MULTILINE)), ""),
        )
    return None


def from_entries(
    entries: Sequence[BootEntry], *, once: str = "", default: str = "", configured: str = ""
) -> NextKernel:
    """Choose as systemd-boot does: once, as its menu kept, as loader.conf says, else the newest that has not failed."""
    for pattern, because in (
        (once, "systemd-boot was told to start it once"),
        (default, "it was chosen in systemd-boot's menu"),
        (configured, "loader.conf says so"),
    ):
        matching = [entry for entry in entries if pattern and fnmatch.fnmatchcase(entry.name, pattern)]
        if matching:
            chosen = max(matching, key=lambda entry: order(entry.version))
            return NextKernel(chosen.version, f"{because} ({chosen.name})")
    chosen = max(entries, key=lambda entry: (not entry.failed, order(entry.version)))
    return NextKernel(chosen.version, f"it is the newest of systemd-boot's entries ({chosen.name})")
