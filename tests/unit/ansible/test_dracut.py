"""The script that makes each initramfs anew on a host with dracut, with a stand-in for that."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "ansible/roles/nvidia_driver/files/dracut.sh"
STAND_IN = """#!/bin/sh
echo "${0##*/} $*" >>"$LOG"
[ "${0##*/}" != "$BREAKS" ] || { echo 'No space left on device' >&2; exit 3; }
"""


class Host:
    """A host's root, below which the script finds what it looks for."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for kernel in ("6.1.0-40-amd64", "6.1.0-41-amd64", "0-rescue-1234"):
            self.path(f"boot/vmlinuz-{kernel}").touch()
        for kernel in ("6.1.0-40-amd64", "6.1.0-41-amd64", "5.10.0-1-amd64"):
            self.path(f"lib/modules/{kernel}/modules.dep")
        self.program("bin/dracut")

    def path(self, name: str) -> Path:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def program(self, name: str) -> None:
        self.path(name).write_text(STAND_IN)
        self.path(name).chmod(0o755)

    def run(self, breaks: str = "") -> tuple[int, list[str]]:
        """Its exit code, and what it ran."""
        script = SCRIPT.read_text()
        for directory in ("/boot", "/lib", "/etc"):
            script = script.replace(directory, f"{self.root}{directory}")
        log = self.root / "log"
        environment = {"PATH": f"{self.root}/bin:{os.environ['PATH']}", "LOG": str(log), "BREAKS": breaks}
        code = subprocess.run(["sh", "-c", script], env=environment, check=False).returncode
        return code, log.read_text().replace(f"{self.root}/", "/").splitlines()


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def test_each_kernel_gets_its_image_under_the_name_that_the_boot_loader_knows(host: Host) -> None:
    assert host.run() == (
        0,
        [
            "dracut --quiet --force /boot/initrd.img-6.1.0-40-amd64 6.1.0-40-amd64",
            "dracut --quiet --force /boot/initrd.img-6.1.0-41-amd64 6.1.0-41-amd64",
        ],
    )


def test_systemd_boot_gets_its_copies(host: Host) -> None:
    host.program("etc/kernel/postinst.d/zz-systemd-boot")
    code, ran = host.run()
    assert (code, ran[1::2]) == (
        0,
        [
            "zz-systemd-boot 6.1.0-40-amd64 /boot/vmlinuz-6.1.0-40-amd64",
            "zz-systemd-boot 6.1.0-41-amd64 /boot/vmlinuz-6.1.0-41-amd64",
        ],
    )


@pytest.mark.parametrize(("breaks", "ran"), [("dracut", 1), ("zz-systemd-boot", 2)])
def test_what_cannot_be_made_ends_it(host: Host, breaks: str, ran: int) -> None:
    host.program("etc/kernel/postinst.d/zz-systemd-boot")
    code, lines = host.run(breaks)
    assert (code, len(lines)) == (3, ran)
