"""What GRUB and systemd-boot can start, read where they themselves read it.

That is `grub.cfg`, not /etc/default/grub; the entries on the boot partition, not /etc/kernel/cmdline; and the variables
in which systemd-boot keeps what was chosen. `boot` asks what a kernel gets, `next_kernel` which one comes next.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

GRUB, SYSTEMD_BOOT = "grub", "systemd-boot"
MENU = Path("boot/grub/grub.cfg")
PARTITIONS = ("efi", "boot", "boot/efi")
"""Where the partition with systemd-boot's entries is mounted, in kernel-install's order (kernel-install(8))."""
LOADER_VARIABLE = "Loader{name}-4a67b082-0a4c-41cf-b6c7-440b29bb8c4f"
"""An EFI variable by which boot loader and system speak (systemd.io/BOOT_LOADER_INTERFACE)."""
# Of grub.cfg: what other systems are started with, and what a person wrote.
_OTHERS = re.compile(r"/\d+_(os-prober|custom) ")


@dataclass(frozen=True, slots=True)
class Start:
    """A line of grub.cfg that starts a kernel: its file, and what it gets."""

    image: str
    arguments: tuple[str, ...]

    @property
    def version(self) -> str:
        """As `uname -r` will say it; empty where the file's name does not tell."""
        return self.image.partition("vmlinuz-")[2]


@dataclass(slots=True)
class MenuEntry:
    """An entry of grub.cfg; a submenu, and the menu itself, have entries of their own."""

    title: str = ""
    identifier: str = ""
    others: bool = False
    """Of another system, or written by a person."""
    starts: list[Start] = field(default_factory=list)
    entries: list[MenuEntry] = field(default_factory=list)
    default: str = "0"
    """Of the menu: the number or title of the entry that is started, or a variable of grubenv."""

    @property
    def kernel(self) -> str:
        """The version that it starts, empty where it starts none that is known."""
        return next((start.version for start in self.starts if start.version), "")

    def all(self) -> Iterator[MenuEntry]:
        """Yield it and those below it, in their order."""
        yield self
        for entry in self.entries:
            yield from entry.all()


@dataclass(frozen=True, slots=True)
class BootEntry:
    """An entry of the Boot Loader Specification (type 1) that starts a Linux kernel, or an EFI program."""

    name: str
    title: str
    version: str
    arguments: tuple[str, ...]
    linux: bool = True
    failed: bool = False
    """Its boot counter has run out, so that it is tried last."""


def started_by(root: Path) -> str:
    """Name the loader that started this system, empty where none has told: GRUB does since 2.12, and only by UEFI."""
    told = variable(root, "Info").lower()
    return next((name for name in (GRUB, SYSTEMD_BOOT) if told.startswith(name)), "")


def variable(root: Path, name: str) -> str:
    """Read one of the interface's variables, empty where it is not there: UTF-16 after four bytes of attributes."""
    try:
        content = (root / "sys/firmware/efi/efivars" / LOADER_VARIABLE.format(name=name)).read_bytes()
    except OSError:
        return ""
    return content[4:].decode("utf-16-le", errors="replace").rstrip("\0")


def read_menu(root: Path) -> MenuEntry | None:
    """Read GRUB's menu below `root`; None where there is none."""
    menu = root / MENU
    return parse_menu(menu.read_text(errors="replace")) if menu.is_file() else None


def parse_menu(text: str) -> MenuEntry:
    """Read grub.cfg: the whole menu, as an entry without a title."""
    menu = MenuEntry()
    path = [menu]
    others = False
    for raw in text.splitlines():
        line = raw.strip()
        if default := re.match(r'set default="([^"]*)"', line):
            # grub-mkconfig writes it twice: first for `grub-reboot`, then as GRUB_DEFAULT says.
            menu.default = menu.default if "next_" in default[1] else default[1]
        elif line.startswith("### BEGIN"):
            others = _OTHERS.search(line) is not None
        elif line.startswith(("menuentry ", "submenu ")) and line.endswith("{"):
            words = _words(line)
            identifier = next(
                (words[i + 1] for i, word in enumerate(words[:-1]) if word.endswith("menuentry_id_option")), ""
            )
            entry = MenuEntry(words[1], identifier, others)
            path[-1].entries.append(entry)
            path.append(entry)
        elif line == "}" and len(path) > 1:
            path.pop()
        elif re.match(r"linux(16|efi)?\s", line):
            _, image, *arguments = [*_words(line), ""]
            if "vmlinuz" in image:
                path[-1].starts.append(Start(image, tuple(filter(None, arguments))))
    return menu


def read_entries(root: Path) -> Iterator[tuple[str, list[BootEntry]]]:
    """Yield each partition that has entries, with those, in the order of their names."""
    for partition in PARTITIONS:
        files = sorted((root / partition / "loader/entries").glob("*.conf"))
        parsed = [parse_entry(file.name, file.read_text(errors="replace")) for file in files]
        if found := [entry for entry in parsed if entry]:
            yield partition, found


def parse_entry(name: str, text: str) -> BootEntry | None:
    """Read an entry; its version, or the directory that kernel-install made for it. None where it starts nothing."""
    keys: dict[str, str] = {}
    arguments: list[str] = []
    for line in text.splitlines():
        key, value = [*line.split(None, 1), "", ""][:2]
        if key == "options":  # which add up
            arguments += _words(value)
        elif key and not key.startswith("#"):
            keys[key] = value.strip()
    image = keys.get("linux") or keys.get("efi", "")
    if not image:
        return None
    version = image.partition("vmlinuz-")[2] or keys.get("version") or Path(image).parent.name
    title = f"{keys['title']} ({name})" if keys.get("title") else name
    failed = re.search(r"\+0(-\d+)?\.conf$", name) is not None
    return BootEntry(name, title, version, tuple(arguments), "linux" in keys, failed)


def _words(line: str) -> list[str]:
    try:
        return shlex.split(line)
    except ValueError:  # a quote that GRUB closes on another line
        return line.split()
