"""The described machines, built below a temporary directory and read back."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import pytest
from aerie_host.machine import Machine, read_machine
from described import build, programs

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def raised(name: str, place: Path, *, driver: bool) -> Path:
    """A machine's trees, with a system and a disk that nothing is wrong with."""
    build(name, place, driver=driver)
    for file, text in {
        "etc/os-release": 'NAME="Debian GNU/Linux"\nVERSION_ID="13"\n',
        "sys/fs/cgroup/cgroup.controllers": "cpu memory pids\n",
        "proc/1/limits": "Max open files            1024                 524288               files\n"
        "Max locked memory         8388608              8388608              bytes\n",
        "proc/1/status": "CapEff:\t000001ffffffffff\n",
        "proc/self/mountinfo": "29 1 259:2 / / rw - ext4 /dev/nvme0n1p2 rw\n40 29 9:0 / /data rw - xfs /dev/md0 rw\n",
        "boot/vmlinuz-6.12.48+deb13-amd64": "",
    }.items():
        (place / file).parent.mkdir(parents=True, exist_ok=True)
        (place / file).write_text(text)
    (place / "data/models").mkdir(parents=True)
    (place / "dev/shm").mkdir(parents=True)
    return place


@pytest.fixture
def tree(tmp_path: Path) -> Callable[..., Path]:
    """Trees to change."""
    return lambda name, driver=True: raised(name, tmp_path / name, driver=driver)


@pytest.fixture(scope="session")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Machine]:
    """A described machine as it is read; it cannot be changed, so it is read once. Without a driver it is bare."""

    @functools.cache
    def make(name: str, *, driver: bool = True) -> Machine:
        place = raised(name, tmp_path_factory.mktemp(name) / "machine", driver=driver)
        return read_machine(place, run=programs(place, driver=driver))

    return make
