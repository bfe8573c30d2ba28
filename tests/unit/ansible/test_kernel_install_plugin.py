"""The plugin that gives systemd-boot's entries the kernel arguments, run on entries as kernel-install writes them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import jinja2
import pytest
import yaml

ROLE = Path(__file__).parents[3] / "ansible/roles/pcie_fabric"
VERSION = "6.1.0-40-amd64"
OURS = ["iommu=pt", "pcie_aspm.policy=performance", "pcie_port_pm=off"]
# As 90-loaderentry.install of systemd 257 has it, shortened.
ENTRY = """\
# Boot Loader Specification type#1 entry
title      Debian GNU/Linux 13 (trixie)
version    6.1.0-40-amd64
options    root=/dev/vda2 ro quiet
linux      /token/6.1.0-40-amd64/linux
"""


def plugin(arguments: list[str], site: tuple[str, ...] = ()) -> str:
    """Render the template as the role does."""
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True)  # noqa: S701  # a script
    environment.filters["comment"] = lambda text: f"# {text}"
    known = yaml.safe_load((ROLE / "vars/main.yml").read_text())["__pcie_fabric_known_arguments"]
    return environment.from_string((ROLE / "templates/kernel-install.j2").read_text()).render(
        ansible_managed="Ansible managed",
        __pcie_fabric_arguments=arguments,
        __pcie_fabric_known_arguments=known,
        __pcie_fabric_site_arguments=site,
    )


@pytest.fixture
def entry(tmp_path: Path) -> Path:
    place = tmp_path / f"boot/loader/entries/token-{VERSION}.conf"
    place.parent.mkdir(parents=True)
    place.write_text(ENTRY)
    return place


def add(entry: Path, arguments: list[str], site: tuple[str, ...] = ()) -> str:
    """Run the plugin as kernel-install does after it has written the entry, and return what it makes of it."""
    boot = entry.parents[2]
    program = boot.parent / "plugin"
    program.write_text(plugin(arguments, site))
    subprocess.run(
        ["sh", str(program), "add", VERSION, str(boot / "token" / VERSION), "/boot/vmlinuz"],
        env={
            "PATH": "/usr/bin:/bin",
            "KERNEL_INSTALL_BOOT_ROOT": str(boot),
            "KERNEL_INSTALL_CONF_ROOT": str(boot.parent),  # has no file cmdline, but where a test writes one
        },
        check=True,
    )
    return entry.read_text()


def test_the_arguments_come_as_a_line_of_their_own(entry: Path) -> None:
    after = add(entry, OURS)
    assert after.startswith(ENTRY)
    assert after.splitlines()[-1] == "options    iommu=pt pcie_aspm.policy=performance pcie_port_pm=off"


def test_a_second_run_changes_nothing(entry: Path) -> None:
    once = add(entry, OURS)
    before = entry.stat().st_ino
    assert add(entry, OURS) == once
    assert entry.stat().st_ino == before


def test_other_arguments_take_their_place(entry: Path) -> None:
    add(entry, OURS)
    assert add(entry, ["iommu=off"]).count("iommu=") == 1


def test_without_arguments_the_entry_is_as_kernel_install_wrote_it(entry: Path) -> None:
    add(entry, OURS)
    assert add(entry, []) == ENTRY


def test_what_was_copied_from_the_running_kernel_does_not_stay(entry: Path) -> None:
    entry.write_text(ENTRY.replace("quiet", f"quiet {' '.join(OURS)} console=ttyS0"))
    after = add(entry, OURS)
    assert after.count("iommu=pt") == 1
    assert add(entry, []) == ENTRY.replace("quiet", "quiet console=ttyS0")


def test_what_a_file_of_the_site_says_stays(entry: Path) -> None:
    (entry.parents[3] / "cmdline").write_text("root=/dev/vda2 ro quiet amd_iommu=off iommu=pt")
    written = ENTRY.replace("quiet", "quiet amd_iommu=off iommu=pt")
    entry.write_text(written)
    assert add(entry, OURS).startswith(written)
    assert add(entry, []) == written


def test_what_the_site_had_before_the_role_stays_where_the_running_kernels_arguments_are_copied(entry: Path) -> None:
    entry.write_text(ENTRY.replace("quiet", f"quiet {' '.join(OURS)}"))
    assert add(entry, [], ("iommu=pt",)) == ENTRY.replace("quiet", "quiet iommu=pt")


def test_an_entry_that_is_tried_a_few_times_counts_and_another_kernels_does_not(entry: Path) -> None:
    tried = entry.rename(entry.with_name(f"token-{VERSION}+3-1.conf"))
    other = entry.with_name("token-6.1.0-41-amd64.conf")
    other.write_text(ENTRY)
    entry.write_text(ENTRY)
    add(entry, OURS)
    assert "iommu=pt" in tried.read_text()
    assert other.read_text() == ENTRY


def test_older_systemd_tells_the_place_by_the_entrys_directory_alone(entry: Path) -> None:
    boot = entry.parents[2]
    program = boot.parent / "plugin"
    program.write_text(plugin(OURS))
    subprocess.run(["sh", str(program), "add", VERSION, str(boot / "token" / VERSION), "/boot/vmlinuz"], check=True)
    assert "iommu=pt" in entry.read_text()


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_shellcheck_has_nothing_to_say(tmp_path: Path) -> None:
    program = tmp_path / "plugin"
    program.write_text(plugin(OURS))
    done = subprocess.run(["shellcheck", str(program)], capture_output=True, text=True, check=False)
    assert done.stdout == ""
