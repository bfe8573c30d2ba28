"""vLLM's Triton MLA decode kernels: their file loaded alone, for a chip that need not be there, and compiled for it.

Only torch and Triton are needed, so the kernels can be compiled and run without an engine, and by a Triton that the
engine is not pinned to. Set TRITON_INTERPRET=1 before the first import of Triton to run them on a CPU.

As a program it compiles one decode step and prints what each kernel needs as JSON: `aerie.rehearsal.kernels` runs it in
a process of its own, since Triton keeps the driver that stands in for the chip's.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import types
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget

from aerie.rehearsal.kernels import CHIPS, DecodeShape

if TYPE_CHECKING:
    from collections.abc import Callable

    from aerie.rehearsal.kernels import Chip

KERNEL_FILE = "v1/attention/ops/triton_decode_attention.py"
_CACHES = {False: torch.bfloat16, True: torch.float8_e4m3fn}


def installed() -> Path:
    """Return where the installed vLLM has the file; vLLM itself is not imported. Raises ModuleNotFoundError."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("vLLM is not installed here; put its parent directory on PYTHONPATH")
    return Path(spec.submodule_search_locations[0]) / KERNEL_FILE


def load(chip: Chip, path: Path | None = None) -> Any:
    """Import the file as if `chip` were the device: a stand-in for what vLLM's platform layer says of the hardware."""
    capability = divmod(chip.capability, 10)
    vllm: dict[str, dict[str, Any]] = {
        "platforms": {
            "current_platform": types.SimpleNamespace(
                is_rocm=lambda: False,
                is_cuda=lambda: True,
                is_cuda_alike=lambda: True,
                get_device_capability=lambda _device=0: capability,
                has_device_capability=lambda wanted, _device=0: chip.capability >= wanted,
                is_device_capability=lambda wanted, _device=0: chip.capability == wanted,
                is_device_capability_family=lambda wanted, _device=0: chip.capability // 10 == wanted // 10,
            )
        },
        "triton_utils": {"tl": tl, "triton": triton},
        "utils": {},
        "utils.mem_utils": {"get_max_shared_memory_bytes": lambda _gpu=0: chip.shared_memory},
    }
    modules = {"vllm": types.ModuleType("vllm")}
    for name, attributes in vllm.items():
        modules[f"vllm.{name}"] = types.ModuleType(f"vllm.{name}")
        vars(modules[f"vllm.{name}"]).update(attributes)
    spec = importlib.util.spec_from_file_location(f"decode_attention_{chip.name}", path or installed())
    if spec is None or spec.loader is None:
        raise ModuleNotFoundError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    with mock.patch.dict(sys.modules, modules):
        spec.loader.exec_module(module)
    return module


class StandInDriver:
    """What Triton asks of a driver before it compiles; nothing can be launched with it."""

    def __init__(self, chip: Chip) -> None:
        self._chip = chip

    def get_current_target(self) -> Any:
        """Return what is compiled for."""
        return GPUTarget("cuda", self._chip.capability, 32)

    def get_current_device(self) -> int:
        """Return a number of the chip's own, by which Triton keeps what it compiled."""
        return self._chip.capability

    def get_current_stream(self, _device: int) -> int:
        """Return a stream."""
        return 0


@dataclass
class Launch:
    """One launch of a kernel: its name, the constants that the launcher chose, the shared memory it needs in bytes."""

    kernel: str
    constants: dict[str, Any]
    shared: int


def compile_ahead(module: Any, chip: Chip, call: Callable[[], Any]) -> list[Launch]:
    """Run `call`, which launches kernels of `module`; compile each launch for `chip` instead of running it."""
    launches = []

    class Ahead:
        def __init__(self, kernel: Any) -> None:
            self._kernel = kernel

        def __getitem__(self, grid: Any) -> Any:
            def compile_only(*arguments: Any, **constants: Any) -> None:
                compiled = self._kernel.warmup(*arguments, grid=grid, **constants)
                launches.append(Launch(self._kernel.__name__, constants, compiled.metadata.shared))

            return compile_only

    kernels = {name: Ahead(value) for name, value in vars(module).items() if name.endswith(("_stage1", "_stage2"))}
    triton.runtime.driver.set_active(StandInDriver(chip))
    with mock.patch.dict(vars(module), kernels):
        call()
    return launches


@dataclass
class Decode:
    """A decode step's inputs, shaped as TritonMLAImpl.forward_mqa shapes them: one row of queries for each length."""

    query: torch.Tensor
    """[rows, heads, latent + rope]"""
    cache: torch.Tensor
    """[pages, page size, 1, latent + rope]"""
    table: torch.Tensor
    """[rows, pages of the longest row]"""
    lengths: torch.Tensor
    """[rows]"""
    logits: torch.Tensor
    """[rows, heads, splits, latent + 1] float32: each split's output and its log-sum-exp"""
    scale: torch.Tensor
    """The cache's, one float32."""
    softmax_scale: float = (128 + 64) ** -0.5
    """By the width of a query head before absorption; here Kimi-K2.5's (its qk_nope_head_dim and qk_rope_head_dim)."""

    @property
    def latent(self) -> int:
        """Elements of an output."""
        return int(self.logits.shape[3]) - 1

    def run(self, module: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the kernels' output [rows, heads, latent] and log-sum-exp [rows, heads], both of the query's type."""
        rows, heads, _ = self.query.shape
        output = self.query.new_zeros(rows, heads, self.latent)
        lse = self.query.new_zeros(rows, heads)
        module.decode_attention_fwd(
            self.query,
            self.cache,
            self.cache[..., : self.latent],
            output,
            lse,
            self.table,
            self.lengths,
            self.logits,
            self.logits.shape[2],
            self.softmax_scale,
            self.cache.shape[1],
            k_scale=self.scale,
            v_scale=self.scale,
            is_mla=True,
        )
        return output, lse


def launches_of(shape: DecodeShape, chip: Chip) -> list[Launch]:
    """Compile the installed kernels for one decode step. Shared memory depends on types, strides and constants only."""
    pages, width = -(-shape.longest // shape.page), shape.latent + shape.rope
    with torch.device("meta"):
        step = Decode(
            query=torch.empty(1, shape.heads, width, dtype=torch.bfloat16),
            cache=torch.empty(pages, shape.page, 1, width, dtype=_CACHES[shape.has_fp8_cache]),
            table=torch.empty(1, pages, dtype=torch.int32),
            lengths=torch.empty(1, dtype=torch.int32),
            logits=torch.empty(1, shape.heads, shape.splits, shape.latent + 1),
            scale=torch.empty(()),
        )
    module = load(chip)
    return compile_ahead(module, chip, lambda: step.run(module))


def main() -> None:
    """Compile the shape that the command line has as JSON for the chip it names; print each kernel's bytes as JSON."""
    chip, shape = sys.argv[1:]
    launches = launches_of(DecodeShape(**json.loads(shape)), CHIPS[chip])
    print(json.dumps({launch.kernel: launch.shared for launch in launches}))


if __name__ == "__main__":
    main()
