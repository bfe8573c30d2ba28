"""The machines that ansible/molecule/stub_gpu_host describes, and what their programs answer."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from aerie_host.machine import NOT_THERE

sys.path.insert(0, str(Path(__file__).parents[3] / "ansible/molecule/stub_gpu_host"))
from build import HERE, build

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["MACHINES", "build", "programs"]

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
