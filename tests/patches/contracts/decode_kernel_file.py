"""The file of vLLM's Triton MLA decode kernels, loaded alone for a chip that need not be there, and what to feed it.

Only torch and Triton are needed, so the kernels can be compiled and run without an engine, and by a Triton that the
engine is not pinned to. Set TRITON_INTERPRET=1 before the first import of Triton to run them on a CPU.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget

KERNEL_FILE = "v1/attention/ops/triton_decode_attention.py"
# Kimi-K2.5's MLA: a cached token is a latent of 512 and a rotary key of 64; scores are scaled by the width of a query
# head before absorption, 128 + 64 (its config.json: kv_lora_rank, qk_rope_head_dim, qk_nope_head_dim).
LATENT, ROPE = 512, 64
SCALE = (128 + 64) ** -0.5


@dataclass(frozen=True)
class Chip:
    """A compute capability, and the bytes of shared memory that one thread block of it can have.

    CUDA C++ Programming Guide, "Technical Specifications per Compute Capability": 227 KB for 9.0 and 10.0, 99 KB for
    8.6, 8.9 and 12.0.
    """

    capability: int
    shared_memory: int

    @property
    def target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)


SM_90 = Chip(90, 227 * 1024)
SM_100 = Chip(100, 227 * 1024)
SM_120 = Chip(120, 99 * 1024)


def installed() -> Path:
    """Where the installed vLLM has the file; vLLM itself is not imported."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("vLLM is not installed here; put its parent directory on PYTHONPATH")
    return Path(spec.submodule_search_locations[0]) / KERNEL_FILE


def load(chip: Chip, path: Path | None = None) -> Any:
    """Import the file as if `chip` were the device: a stand-in for what vLLM's platform layer says of the hardware."""
    capability = divmod(chip.capability, 10)
    vllm = {
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
    spec = importlib.util.spec_from_file_location(f"decode_attention_sm_{chip.capability}", path or installed())
    module = importlib.util.module_from_spec(spec)
    with mock.patch.dict(sys.modules, modules):
        spec.loader.exec_module(module)
    return module


class StandInDriver:
    """What Triton asks of a driver before it compiles; nothing can be launched with it."""

    def __init__(self, chip: Chip) -> None:
        self._chip = chip

    def get_current_target(self) -> GPUTarget:
        return self._chip.target

    def get_current_device(self) -> int:
        return self._chip.capability  # Triton caches by device

    def get_current_stream(self, _device: int) -> int:
        return 0


@dataclass
class Launch:
    """One launch of a kernel: its name, the constants that the launcher chose, the shared memory it needs in bytes."""

    kernel: str
    constants: dict[str, Any]
    shared: int


def compile_ahead(module: Any, chip: Chip, call: Any) -> list[Launch]:
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
    with mock.patch.multiple(module, **kernels):
        call()
    return launches


@dataclass
class Decode:
    """A decode step's inputs, shaped as TritonMLAImpl.forward_mqa shapes them: one row of queries for each length."""

    query: torch.Tensor  # [rows, heads, 576]
    cache: torch.Tensor  # [pages, page size, 1, 576]
    table: torch.Tensor  # [rows, pages of the longest row]
    lengths: torch.Tensor  # [rows]
    logits: torch.Tensor  # [rows, heads, splits, 513] float32: each split's output and its log-sum-exp
    scale: torch.Tensor  # the cache's, one float32

    @property
    def page(self) -> int:
        return self.cache.shape[1]

    def run(self, module: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """The kernels' output [rows, heads, 512] and log-sum-exp [rows, heads], both of the query's type."""
        rows, heads, _ = self.query.shape
        output = self.query.new_zeros(rows, heads, LATENT)
        lse = self.query.new_zeros(rows, heads)
        module.decode_attention_fwd(
            self.query,
            self.cache,
            self.cache[..., :LATENT],
            output,
            lse,
            self.table,
            self.lengths,
            self.logits,
            self.logits.shape[2],
            SCALE,
            self.page,
            k_scale=self.scale,
            v_scale=self.scale,
            is_mla=True,
        )
        return output, lse

    def expected(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Row `row` in float64."""
        length = int(self.lengths[row])
        pages = self.cache.view(torch.uint8)[self.table[row].long()].view(self.cache.dtype)  # FP8 need not be indexable
        keys = pages.flatten(0, 2)[:length].double() * self.scale.double()
        scores = self.query[row].double() @ keys.T * SCALE
        return torch.softmax(scores, -1) @ keys[:, :LATENT], torch.logsumexp(scores, -1)

    def largest_error(self, module: Any) -> float:
        """How far the kernels are from float64: as a part of a row's largest output, or of a log-sum-exp above 1."""
        output, lse = self.run(module)
        errors = []
        for row in self.lengths.nonzero().flatten().tolist():
            expected, expected_lse = self.expected(row)
            errors.append(((output[row] - expected) / expected.abs().max()).abs().max())
            errors.append(((lse[row] - expected_lse) / expected_lse.abs().clamp(min=1)).abs().max())
        return float(torch.stack(errors).max())


def decode(
    lengths: list[int],
    heads: int,
    page: int,
    splits: int,
    query_type: torch.dtype = torch.bfloat16,
    cache_type: torch.dtype = torch.bfloat16,
    device: str = "cpu",
    scale: float = 1.0,
) -> Decode:
    """A decode step over random contexts of these lengths, each in its own pages, which lie in random order."""
    torch.manual_seed(0)
    pages = triton.cdiv(max(lengths), page)
    cache = torch.randn(len(lengths) * pages, page, 1, LATENT + ROPE, device=device, dtype=query_type) * 0.5
    return Decode(
        query=torch.randn(len(lengths), heads, LATENT + ROPE, device=device, dtype=query_type),
        cache=cache.to(cache_type),
        table=torch.randperm(len(lengths) * pages, device=device, dtype=torch.int32).view(len(lengths), pages),
        lengths=torch.tensor(lengths, device=device, dtype=torch.int32),
        logits=torch.empty(len(lengths), heads, splits, LATENT + 1, device=device),
        scale=torch.tensor(scale, device=device),
    )
