"""Lets vLLM's V2 model runner, the one that CUDA runs, run where there is no GPU. Test help, and no part of what ships.

Put this folder on PYTHONPATH and set VLLM_USE_V2_MODEL_RUNNER=1; without that variable nothing is changed. What it puts
in place stands only for hardware:

- Triton's kernels run in Triton's own interpreter, and a backend called "cpu" says that there is something to run on.
  PyPI's Triton has no such backend, without which vLLM's CPU platform takes Triton for absent.
- Async scheduling stays as the configuration has it. The CPU platform switches it off, since without an accelerator
  there is nothing to overlap with; CUDA has it on, and pipeline parallelism on V2 does not work without it.

No class of the model, the runner, the scheduler or the speculator is touched.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.util
import os
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from importlib.machinery import ModuleSpec
    from types import ModuleType


def add_cpu_backend(triton_backends: ModuleType) -> None:
    class Driver:
        @classmethod
        def is_active(cls) -> bool:
            return True

    triton_backends.backends["cpu"] = triton_backends.Backend(compiler=None, driver=Driver)


def keep_async_scheduling(cpu_platform: ModuleType) -> None:
    adapt = cpu_platform.CpuPlatform.check_and_update_config.__func__

    @functools.wraps(adapt)
    def check_and_update_config(cls, vllm_config) -> None:
        chosen = vllm_config.scheduler_config.async_scheduling
        adapt(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = chosen

    cpu_platform.CpuPlatform.check_and_update_config = classmethod(check_and_update_config)


class AfterImport(importlib.abc.MetaPathFinder):
    """Call a function with a module once that is imported; so nothing is imported here, in what may be no engine."""

    def __init__(self, changes: dict[str, Callable[[ModuleType], None]]) -> None:
        self.changes = changes

    def find_spec(self, fullname: str, *_: object) -> ModuleSpec | None:
        change = self.changes.pop(fullname, None)  # popped: the search below comes here again
        spec = importlib.util.find_spec(fullname) if change is not None else None
        if spec is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            change(module)

        spec.loader.exec_module = exec_module
        return spec


def run_the_one_behind() -> None:
    """Run the sitecustomize that this one hides, if there is one: Debian's Python brings its own."""
    here = Path(__file__).resolve().parent
    behind = PathFinder.find_spec("sitecustomize", [entry for entry in sys.path if Path(entry).resolve() != here])
    if behind is not None:
        behind.loader.exec_module(importlib.util.module_from_spec(behind))


if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1":
    os.environ["TRITON_INTERPRET"] = "1"
    sys.meta_path.insert(
        0, AfterImport({"triton.backends": add_cpu_backend, "vllm.platforms.cpu": keep_async_scheduling})
    )
run_the_one_behind()
