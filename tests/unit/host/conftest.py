"""The described machines, built below a temporary directory and read back."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from aerie_host.machine import NOT_THERE, Machine, read_machine

sys.path.insert(0, str(Path(__file__).parents[3] / "ansible/molecule/stub_gpu_host"))
from build import HERE, build

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

MACHINES = sorted(path.stem for path in (HERE / "machines").glob("*.yml"))


def programs(tree: Path, *, driver: bool) -> Callable[[Sequence[str]], tuple[int, str]]:
    """What the stand-ins for nvidia-smi and journalctl answer; no other program is there."""

    def run(arguments: Sequence[str]) -> tuple[int, str]:
        if arguments[0] == "journalctl":
            return 0, (tree / ("kernel_log_before" if "--boot=-1" in arguments else "kernel_log")).read_text()
        if arguments[0] == "nvidia-smi" and driver:
            return 0, (tree / "driver/nvidia-smi" / {"-q": "q.xml", "topo": "topo"}[arguments[1]]).read_text()
        return NOT_THERE, ""

    return run


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
