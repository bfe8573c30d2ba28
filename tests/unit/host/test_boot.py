"""Boot loaders found, their arguments read where they themselves read them, conflicts told."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from aerie_host import boot
from aerie_host.boot_loader import LOADER_VARIABLE

if TYPE_CHECKING:
    from pathlib import Path

WANTED = ["iommu=pt", "pcie_aspm.policy=performance", "pcie_port_pm=off"]
VERSION = "6.1.0-40-amd64"

# Of a real update-grub (2.06), shortened.
GRUB = """\
### BEGIN /etc/grub.d/10_linux ###
menuentry 'Debian GNU/Linux' --class debian --class os $menuentry_id_option 'gnulinux-simple-1111' {
\tlinux\t/boot/vmlinuz-6.1.0-40-amd64 root=/dev/vda1 ro  quiet iommu=pt
\tinitrd\t/boot/initrd.img-6.1.0-40-amd64
}
submenu 'Advanced options for Debian GNU/Linux' $menuentry_id_option 'gnulinux-advanced-1111' {
\tmenuentry 'Debian GNU/Linux, with Linux 6.1.0-40-amd64' --class debian {
\t\tlinux\t/boot/vmlinuz-6.1.0-40-amd64 root=/dev/vda1 ro  quiet iommu=pt
\t}
\tmenuentry 'Debian GNU/Linux, with Linux 6.1.0-40-amd64 (recovery mode)' --class debian {
\t\tlinux\t/boot/vmlinuz-6.1.0-40-amd64 root=/dev/vda1 ro single
\t}
}
### END /etc/grub.d/10_linux ###
### BEGIN /etc/grub.d/30_os-prober ###
menuentry 'Another system' {
\tlinux\t/boot/vmlinuz-5.10 root=/dev/vdb1
}
menuentry "Memory test" {
\tlinux16\t/boot/memtest86+.bin console=ttyS0
}
"""
ENTRY = """\
title      Debian GNU/Linux 12 (bookworm)
version    6.1.0-40-amd64
options    root=/dev/vda2 ro quiet
# Written by Ansible
options    iommu=pt
linux      /token/6.1.0-40-amd64/linux
"""


def place(root: Path, path: str, text: str = "x") -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def with_grub(root: Path) -> None:
    place(root, "boot/grub/grub.cfg", GRUB)
    place(root, "usr/sbin/update-grub")


def with_systemd_boot(root: Path) -> None:
    place(root, "boot/efi/EFI/systemd/systemd-bootx64.efi")
    place(root, f"boot/efi/loader/entries/token-{VERSION}.conf", ENTRY)
    (root / f"lib/modules/{VERSION}").mkdir(parents=True)


def test_grub_is_found_and_what_it_passes_is_read_from_its_menu(tmp_path: Path) -> None:
    with_grub(tmp_path)
    loader = boot.choose(boot.find_loaders(tmp_path), "auto")
    assert loader == boot.Loader("grub", "/boot/grub/grub.cfg")
    entries = boot.read_entries(tmp_path, "grub")
    assert [(entry.title, entry.recovery) for entry in entries] == [
        ("Debian GNU/Linux", False),
        ("Debian GNU/Linux, with Linux 6.1.0-40-amd64", False),
        ("Debian GNU/Linux, with Linux 6.1.0-40-amd64 (recovery mode)", True),
    ]
    assert entries[0].arguments == ("root=/dev/vda1", "ro", "quiet", "iommu=pt")


def test_an_entry_that_lacks_an_argument_is_named_and_the_way_back_is_not(tmp_path: Path) -> None:
    with_grub(tmp_path)
    entries = boot.read_entries(tmp_path, "grub")
    assert boot.lacking(entries, ["iommu=pt"]) == {}
    assert boot.lacking(entries, WANTED) == {
        "Debian GNU/Linux": WANTED[1:],
        "Debian GNU/Linux, with Linux 6.1.0-40-amd64": WANTED[1:],
    }


def test_options_lines_of_an_entry_add_up(tmp_path: Path) -> None:
    with_systemd_boot(tmp_path)
    loader = boot.choose(boot.find_loaders(tmp_path), "auto")
    assert (loader.name, loader.evidence) == ("systemd-boot", "/boot/efi/EFI/systemd/systemd-bootx64.efi")
    (entry,) = boot.read_entries(tmp_path, "systemd-boot")
    assert entry.arguments == ("root=/dev/vda2", "ro", "quiet", "iommu=pt")
    assert boot.lacking([entry], WANTED) == {
        f"Debian GNU/Linux 12 (bookworm) (token-{VERSION}.conf)": ["pcie_aspm.policy=performance", "pcie_port_pm=off"]
    }


def test_entries_of_other_systems_are_left_out(tmp_path: Path) -> None:
    with_systemd_boot(tmp_path)
    place(tmp_path, "boot/efi/loader/entries/memtest.conf", "title Memtest\nefi /memtest.efi\n")
    place(tmp_path, "boot/efi/loader/entries/other-5.10.0-1-amd64.conf", ENTRY)
    assert len(boot.read_entries(tmp_path, "systemd-boot")) == 1


def test_an_entry_that_is_tried_a_few_times_counts(tmp_path: Path) -> None:
    with_systemd_boot(tmp_path)
    entries = tmp_path / "boot/efi/loader/entries"
    (entries / f"token-{VERSION}.conf").rename(entries / f"token-{VERSION}+3.conf")
    assert len(boot.read_entries(tmp_path, "systemd-boot")) == 1


@pytest.mark.parametrize("wanted", ["auto", "grub"])
def test_no_loader_is_refused_with_what_was_found(tmp_path: Path, wanted: str) -> None:
    with pytest.raises(boot.LoaderError, match=r"neither GRUB nor systemd-boot.*pcie_fabric_bootloader"):
        boot.choose(boot.find_loaders(tmp_path), wanted)


def test_two_loaders_are_refused_until_one_is_named(tmp_path: Path) -> None:
    with_grub(tmp_path)
    with_systemd_boot(tmp_path)
    found = boot.find_loaders(tmp_path)
    with pytest.raises(boot.LoaderError) as refused:
        boot.choose(found, "auto")
    assert "grub (/boot/grub/grub.cfg), systemd-boot (/boot/efi/EFI/systemd/systemd-bootx64.efi)" in str(refused.value)
    assert boot.choose(found, "systemd-boot").name == "systemd-boot"
    assert boot.choose(found, "grub").name == "grub"


@pytest.mark.parametrize(("told", "name"), [("systemd-boot 257.7", "systemd-boot"), ("GRUB 2.12-9", "grub")])
def test_of_two_loaders_the_one_counts_that_started_this_system(tmp_path: Path, told: str, name: str) -> None:
    with_grub(tmp_path)
    with_systemd_boot(tmp_path)
    info = tmp_path / "sys/firmware/efi/efivars" / LOADER_VARIABLE.format(name="Info")
    info.parent.mkdir(parents=True)
    info.write_bytes(b"\6\0\0\0" + f"{told}\0".encode("utf-16-le"))
    found = boot.find_loaders(tmp_path)
    assert boot.choose(found, "auto").name == name
    assert boot.choose(found, "grub").name == "grub"


def test_a_menu_without_its_program_is_refused(tmp_path: Path) -> None:
    place(tmp_path, "boot/grub/grub.cfg", GRUB)
    with pytest.raises(boot.LoaderError, match="update-grub is missing"):
        boot.choose(boot.find_loaders(tmp_path), "auto")


def test_unified_kernel_images_are_refused(tmp_path: Path) -> None:
    with_systemd_boot(tmp_path)
    place(tmp_path, "boot/efi/EFI/Linux/debian-6.1.efi")
    with pytest.raises(boot.LoaderError, match=r"unified kernel images \(/boot/efi/EFI/Linux/debian-6.1.efi\)"):
        boot.choose(boot.find_loaders(tmp_path), "auto")


def test_a_loader_without_an_entry_of_this_system_is_refused(tmp_path: Path) -> None:
    place(tmp_path, "efi/EFI/systemd/systemd-bootx64.efi")
    with pytest.raises(boot.LoaderError, match="no entry in loader/entries"):
        boot.choose(boot.find_loaders(tmp_path), "auto")


@pytest.mark.parametrize(
    ("site", "against"),
    [
        ("iommu=off", "iommu=pt"),
        ("iommu=off,nofullflush", "iommu=pt"),
        ("amd_iommu=off", "iommu=pt"),
        ("intel_iommu=off", "iommu=pt"),
        ("iommu=nopt", "iommu=pt"),
        ("iommu.passthrough=0", "iommu=pt"),
        ("pcie_aspm=off", "pcie_aspm.policy=performance"),
        ("pcie_aspm=force", "pcie_aspm.policy=performance"),
        ("pcie_aspm.policy=powersave", "pcie_aspm.policy=performance"),
        ("pcie_port_pm=force", "pcie_port_pm=off"),
    ],
)
def test_what_the_site_set_against_it_is_told(site: str, against: str) -> None:
    (told,) = boot.conflicts(["ro", site, "quiet", site], WANTED)
    assert told.startswith(f"{site} stands against {against}: it ")


@pytest.mark.parametrize(
    "site", ["iommu=pt", "amd_iommu=on", "iommu=pt,nofullflush", "pcie_aspm.policy=performance", "intel_iommu=on"]
)
def test_what_agrees_is_not(site: str) -> None:
    assert boot.conflicts([site], WANTED) == []


def test_off_stands_against_what_asks_for_an_iommu() -> None:
    assert len(boot.conflicts(["iommu=pt", "intel_iommu=on", "amd_iommu=off"], ["iommu=off", "amd_iommu=off"])) == 2
