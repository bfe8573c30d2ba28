"""Which kernel the next boot will start: what the boot loader's own files say, not what is newest or runs now.

A host whose driver module is built for the running kernel alone loses its GPUs at the next reboot, if that starts
another one.
"""

from __future__ import annotations

import fnmatch
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

LOADER_VARIABLE = "Loader{name}-4a67b082-0a4c-41cf-b6c7-440b29bb8c4f"
"""An EFI variable in which systemd-boot keeps what was chosen (systemd.io/BOOT_LOADER_INTERFACE)."""
PARTITIONS = ("efi", "boot", "boot/efi")
"""Where the partition with systemd-boot's entries is mounted, in kernel-install's order (kernel-install(8))."""


@dataclass(frozen=True, slots=True)
class NextKernel:
    """`version` as `uname -r` will say it, and `because`: what decided."""

    version: str
    because: str


@dataclass(slots=True)
class MenuEntry:
    """One entry of grub.cfg; a submenu has entries of its own, and no kernel."""

    title: str
    identifier: str = ""
    kernel: str = ""
    entries: list[MenuEntry] = field(default_factory=list)


def read_next_kernel(root: Path = Path("/"), running: str = "") -> NextKernel:
    """Find the next boot's kernel below `root`. Without a boot loader: /boot's newest, else the running one."""
    boots_itself = _text(root, "sys/firmware/efi/efivars/" + LOADER_VARIABLE.format(name="Info"), efi=True)
    menu = root / "boot/grub/grub.cfg"
    if boots_itself.startswith("systemd-boot") or not menu.is_file():
        found = _from_entries(root)
    else:
        found = from_grub(menu.read_text(errors="replace"), _text(root, "boot/grub/grubenv"))
    if found:
        return found
    versions = [path.name.removeprefix("vmlinuz-") for path in (root / "boot").glob("vmlinuz-*")]
    if versions:
        return NextKernel(max(versions, key=order), "it is the newest one in /boot, and no boot loader says otherwise")
    return NextKernel(running, "it is running, and /boot has no other")


def _text(root: Path, name: str, *, efi: bool = False) -> str:
    """Return a file's text, empty where it is not there. An EFI variable is UTF-16 after four bytes of attributes."""
    try:
        content = (root / name).read_bytes()
    except OSError:
        return ""
    return content[4:].decode("utf-16-le", errors="replace").rstrip("\0") if efi else content.decode(errors="replace")


def order(version: str) -> tuple[tuple[int, int | str], ...]:
    """Sort kernel versions as people read them: 6.1.0-9 before 6.1.0-18."""
    return tuple((0, int(part)) if part.isdecimal() else (1, part) for part in re.split(r"(\d+)", version) if part)


# --- GRUB -------------------------------------------------------------------------------------------------------------


def from_grub(menu: str, environment: str) -> NextKernel | None:
    """Follow grub.cfg and grubenv as GRUB does; None where no entry starts a Linux kernel."""
    saved = dict(re.findall(r"^(next_entry|saved_entry)=(.*)$", environment, flags=re.MULTILINE))
    # grub-mkconfig writes the default twice: first for `grub-reboot`, then as GRUB_DEFAULT says.
    defaults = [
        value for value in re.findall(r'^\s*set default="([^"]*)"', menu, flags=re.MULTILINE) if "next_" not in value
    ]
    default = defaults[-1] if defaults else "0"
    wanted, because = default, f"it is GRUB's default entry ({default})"
    if saved.get("next_entry"):
        wanted, because = saved["next_entry"], f"grub-reboot chose it for the next boot ({saved['next_entry']})"
    elif "saved_entry" in default:
        wanted = saved.get("saved_entry", "") or "0"
        because = f"it is the entry that GRUB has saved ({wanted})"
    entries = parse_menu(menu)
    # An entry that is not there is no obstacle to GRUB: it starts the first one.
    chosen = _find(entries, wanted.split(">")) or _first(entries)
    return NextKernel(chosen.kernel, because) if chosen and chosen.kernel else None


def parse_menu(text: str) -> list[MenuEntry]:
    """Read the entries of grub.cfg, submenus with theirs."""
    top: list[MenuEntry] = []
    open_lists = [top]
    for raw in text.splitlines():
        line = raw.strip()
        if line.startswith(("menuentry ", "submenu ")) and line.endswith("{"):
            words = _words(line)
            identifier = next(
                (words[i + 1] for i, word in enumerate(words[:-1]) if word.endswith("menuentry_id_option")), ""
            )
            entry = MenuEntry(words[1], identifier)
            open_lists[-1].append(entry)
            open_lists.append(entry.entries)
        elif line == "}" and len(open_lists) > 1:
            open_lists.pop()
        elif re.match(r"linux(16|efi)?\s", line) and len(open_lists) > 1:
            kernel = re.search(r"/vmlinuz-(\S+)", line)
            entry = open_lists[-2][-1]
            if kernel and not entry.kernel:
                entry.kernel = kernel[1]
    return top


def _words(line: str) -> list[str]:
    try:
        return shlex.split(line)
    except ValueError:
        return line.split()


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


@dataclass(frozen=True, slots=True)
class BootEntry:
    """An entry of the Boot Loader Specification that starts a Linux kernel."""

    name: str
    version: str
    failed: bool = False
    """Its boot counter has run out, so that it is tried last."""


def _from_entries(root: Path) -> NextKernel | None:
    for partition in PARTITIONS:
        found = [
            entry
            for path in (root / partition / "loader/entries").glob("*.conf")
            if (entry := parse_entry(path.name, path.read_text(errors="replace")))
        ]
        if not found:
            continue
        variables = "sys/firmware/efi/efivars/" + LOADER_VARIABLE
        return from_entries(
            found,
            once=_text(root, variables.format(name="EntryOneShot"), efi=True),
            default=_text(root, variables.format(name="EntryDefault"), efi=True),
            configured=next(
                iter(re.findall(r"^default\s+(\S+)", _text(root, f"{partition}/loader/loader.conf"), re.MULTILINE)), ""
            ),
        )
    return None


def parse_entry(name: str, text: str) -> BootEntry | None:
    """Read an entry; its version, or the directory that kernel-install made for it. None where it starts no Linux."""
    keys = dict(re.findall(r"^\s*(\S+)[ \t]+(\S.*?)\s*$", text, flags=re.MULTILINE))
    linux = keys.get("linux", "")
    if not linux:
        return None
    version = keys.get("version") or Path(linux).parent.name
    if "vmlinuz-" in linux:
        version = linux.split("vmlinuz-")[-1]
    return BootEntry(name, version, bool(re.search(r"\+0(-\d+)?\.conf$", name)))


def from_entries(entries: list[BootEntry], *, once: str = "", default: str = "", configured: str = "") -> NextKernel:
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
