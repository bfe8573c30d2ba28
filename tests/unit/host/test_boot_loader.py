"""GRUB's menu and the entries of systemd-boot, as both readers of them need it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aerie_host.boot_loader import BootEntry, Start, parse_entry, parse_menu, read_entries

if TYPE_CHECKING:
    from pathlib import Path


def test_a_menu_has_its_tree_with_titles_identifiers_and_what_each_starts() -> None:
    menu = parse_menu(
        'set default="${saved_entry}"\n'
        "menuentry 'Debian' --class os $menuentry_id_option 'simple' {\n"
        "  linux /boot/vmlinuz-6.12.9-amd64 root=UUID=1 ro\n}\n"
        "submenu 'Advanced' $menuentry_id_option 'advanced' {\n"
        " menuentry 'Debian, with 6.12.9-amd64' {\n  linux\t/boot/vmlinuz-6.12.9-amd64 ro single\n }\n}\n"
        "### BEGIN /etc/grub.d/40_custom ###\nmenuentry 'Mine' {\n linux /vmlinuz ro\n}\n"
    )
    assert menu.default == "${saved_entry}"
    assert [(entry.title, entry.identifier, entry.kernel, entry.others) for entry in menu.all()] == [
        ("", "", "", False),
        ("Debian", "simple", "6.12.9-amd64", False),
        ("Advanced", "advanced", "", False),
        ("Debian, with 6.12.9-amd64", "", "6.12.9-amd64", False),
        ("Mine", "", "", True),
    ]
    assert menu.entries[0].starts == [Start("/boot/vmlinuz-6.12.9-amd64", ("root=UUID=1", "ro"))]


def test_a_line_outside_of_all_entries_is_the_menus_own() -> None:
    assert parse_menu("linux /vmlinuz-6.1 ro\nboot\n").starts == [Start("/vmlinuz-6.1", ("ro",))]


def test_a_quote_that_is_not_closed_is_no_crash() -> None:
    menu = parse_menu("menuentry 'x' {\n linux /vmlinuz ro dyndbg=\"file a\n}")
    assert menu.entries[0].starts[0].arguments[0] == "ro"


def test_an_entry_tells_version_and_arguments_and_whether_its_tries_are_used_up() -> None:
    text = (
        "# made by kernel-install\ntitle\tDebian\noptions\troot=/dev/a ro\noptions quiet\nlinux /1/6.12.9-amd64/linux\n"
    )
    assert parse_entry("1234-6.12.9-amd64+0-3.conf", text) == BootEntry(
        "1234-6.12.9-amd64+0-3.conf",
        "Debian (1234-6.12.9-amd64+0-3.conf)",
        "6.12.9-amd64",
        ("root=/dev/a", "ro", "quiet"),
        failed=True,
    )
    assert parse_entry("x.conf", "version 6.1\nlinux /vmlinuz-6.2-amd64\n") == BootEntry(
        "x.conf", "x.conf", "6.2-amd64", ()
    )


def test_an_efi_program_is_no_linux_and_a_file_without_either_no_entry(tmp_path: Path) -> None:
    memtest = parse_entry("memtest.conf", "title Memtest\nefi /EFI/memtest.efi\n")
    assert memtest
    assert not memtest.linux
    assert parse_entry("empty.conf", "title Nothing\n") is None
    assert list(read_entries(tmp_path)) == []
