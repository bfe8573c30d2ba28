"""The next boot's kernel, from what GRUB and systemd-boot will read."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from aerie_host.boot_loader import LOADER_VARIABLE, parse_menu
from aerie_host.next_kernel import from_grub, order, read_next_kernel

if TYPE_CHECKING:
    from pathlib import Path

OLD, NEW = "6.12.9-amd64", "6.12.18-amd64"
# As grub-mkconfig of Debian 13 writes it, shortened: the newest kernel on top, all of them in a submenu.
MENU = """
if [ "${{next_entry}}" ] ; then
   set default="${{next_entry}}"
   set next_entry=
   save_env next_entry
   set boot_once=true
else
   set default="{default}"
fi
function load_video {{
  insmod all_video
}}
menuentry 'Debian GNU/Linux' --class debian --class os $menuentry_id_option 'gnulinux-simple-1234' {{
 load_video
 if [ x$feature = xy ]; then
   search --no-floppy --fs-uuid --set=root 1234
 fi
  linux /boot/vmlinuz-6.12.18-amd64 root=UUID=1234 ro quiet
 initrd /boot/initrd.img-6.12.18-amd64
}}
submenu 'Advanced options for Debian GNU/Linux' $menuentry_id_option 'gnulinux-advanced-1234' {{
  menuentry 'Debian GNU/Linux, with Linux 6.12.18-amd64' $menuentry_id_option 'gnulinux-6.12.18-amd64-advanced-1' {{
     linux /boot/vmlinuz-6.12.18-amd64 root=UUID=1234 ro quiet
 }}
  menuentry 'Debian GNU/Linux, with Linux 6.12.9-amd64' $menuentry_id_option 'gnulinux-6.12.9-amd64-advanced-1234' {{
     linux /boot/vmlinuz-6.12.9-amd64 root=UUID=1234 ro quiet
 }}
}}
menuentry 'UEFI Firmware Settings' $menuentry_id_option 'uefi-firmware' {{
 fwsetup --is-supported
}}
"""


def grub(default: str = "0", environment: str = "") -> tuple[str, str]:
    found = from_grub(parse_menu(MENU.format(default=default)), environment)
    assert found is not None
    return found.version, found.because


@pytest.mark.parametrize(
    ("default", "environment", "version"),
    [
        ("0", "", NEW),
        ("1>1", "", OLD),
        ("1>Debian GNU/Linux, with Linux 6.12.9-amd64", "", OLD),
        ("gnulinux-advanced-1234>gnulinux-6.12.9-amd64-advanced-1234", "", OLD),
        ("${saved_entry}", "saved_entry=gnulinux-advanced-1234>gnulinux-6.12.9-amd64-advanced-1234\n", OLD),
        ("${saved_entry}", "# GRUB Environment Block\n####", NEW),
        ("0", "saved_entry=1>1\n", NEW),
        ("0", "next_entry=1>1\n", OLD),
        # An entry that is gone: GRUB starts the first.
        ("1>Debian GNU/Linux, with Linux 5.10.0-1-amd64", "", NEW),
        ("7", "", NEW),
        # A submenu alone means its first entry.
        ("1", "", NEW),
    ],
)
def test_grub_starts_what_its_files_say(default: str, environment: str, version: str) -> None:
    assert grub(default, environment)[0] == version


def test_it_says_what_decided() -> None:
    assert grub()[1] == "it is GRUB's default entry (0)"
    assert "grub-reboot" in grub(environment="next_entry=1>1\n")[1]
    assert "saved" in grub("${saved_entry}", "saved_entry=1>1\n")[1]


def test_a_menu_without_a_kernel_says_nothing() -> None:
    assert from_grub(parse_menu("menuentry 'UEFI Firmware Settings' {\n\tfwsetup\n}\n"), "") is None


def test_versions_are_in_the_order_of_people() -> None:
    versions = ["6.1.0-9-amd64", "6.1.0-18-amd64", "6.12.0-1-amd64", "5.10.0-40-amd64"]
    assert sorted(versions, key=order) == [versions[3], versions[0], versions[1], versions[2]]


def entry(root: Path, name: str, version: str, directory: str = "boot/efi") -> None:
    folder = root / directory / "loader/entries"
    folder.mkdir(parents=True, exist_ok=True)
    folder.joinpath(name).write_text(
        f"# Boot Loader Specification type#1 entry\ntitle      Debian\nversion    {version}\nmachine-id 1234\n"
        f"options    root=UUID=1234 quiet\nlinux      /1234/{version}/linux\ninitrd     /1234/{version}/initrd.img\n"
    )


def variable(root: Path, name: str, value: str) -> None:
    path = root / "sys/firmware/efi/efivars" / LOADER_VARIABLE.format(name=name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"\6\0\0\0" + f"{value}\0".encode("utf-16-le"))


def test_systemd_boot_starts_the_newest(tmp_path: Path) -> None:
    entry(tmp_path, "1234-6.12.9-amd64.conf", OLD)
    entry(tmp_path, "1234-6.12.18-amd64.conf", NEW)
    assert read_next_kernel(tmp_path).version == NEW


def test_systemd_boot_passes_by_an_entry_whose_tries_are_used_up(tmp_path: Path) -> None:
    entry(tmp_path, "1234-6.12.9-amd64.conf", OLD)
    entry(tmp_path, "1234-6.12.18-amd64+0-3.conf", NEW)
    assert read_next_kernel(tmp_path).version == OLD


def test_loader_conf_chooses(tmp_path: Path) -> None:
    entry(tmp_path, "1234-6.12.9-amd64.conf", OLD)
    entry(tmp_path, "1234-6.12.18-amd64.conf", NEW)
    (tmp_path / "boot/efi/loader/loader.conf").write_text("timeout 3\ndefault 1234-6.12.9-*\n")
    found = read_next_kernel(tmp_path)
    assert found.version == OLD
    assert "loader.conf" in found.because


def test_the_menus_choice_goes_before_loader_conf_and_once_before_both(tmp_path: Path) -> None:
    entry(tmp_path, "1234-6.12.9-amd64.conf", OLD)
    entry(tmp_path, "1234-6.12.18-amd64.conf", NEW)
    (tmp_path / "boot/efi/loader/loader.conf").write_text("default 1234-6.12.9-*\n")
    variable(tmp_path, "EntryDefault", "1234-6.12.18-amd64.conf")
    assert read_next_kernel(tmp_path).version == NEW
    variable(tmp_path, "EntryOneShot", "1234-6.12.9-amd64.conf")
    assert read_next_kernel(tmp_path).version == OLD


def test_an_entry_that_starts_no_linux_is_passed_by(tmp_path: Path) -> None:
    entry(tmp_path, "1234-6.12.9-amd64.conf", OLD)
    (tmp_path / "boot/efi/loader/entries/zz.conf").write_text("title Memtest\nefi /EFI/memtest.efi\n")
    assert read_next_kernel(tmp_path).version == OLD


def test_a_menu_of_grub_is_left_aside_where_systemd_boot_started_the_host(tmp_path: Path) -> None:
    (tmp_path / "boot/grub").mkdir(parents=True)
    (tmp_path / "boot/grub/grub.cfg").write_text(MENU.format(default="0"))
    entry(tmp_path, "1234-6.12.9-amd64.conf", OLD)
    assert read_next_kernel(tmp_path).version == NEW
    variable(tmp_path, "Info", "systemd-boot 257.7")
    assert read_next_kernel(tmp_path).version == OLD


def test_without_a_boot_loader_it_is_the_newest_in_boot_or_the_running_one(tmp_path: Path) -> None:
    assert read_next_kernel(tmp_path, OLD).version == OLD
    (tmp_path / "boot").mkdir()
    for version in (OLD, NEW):
        (tmp_path / "boot" / f"vmlinuz-{version}").touch()
    assert read_next_kernel(tmp_path, OLD).version == NEW
