"""A worker for `vllm serve --worker-cls speculating_cpu.Worker`: vLLM 0.16.0 speculates on a CPU.

That release's CPU runner asserts that speculation is off and loads no drafter, while the runner that it derives from
does both. Test help only; nothing of it belongs into a series.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING
from unittest import mock

import torch
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.worker import cpu_worker
from vllm.v1.worker.cpu_model_runner import CPUModelRunner, _torch_cuda_wrapper
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class ModelRunner(CPUModelRunner):
    """The CPU's runner, with the construction and the loading of the runner that a GPU has."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        with _torch_cuda_wrapper():
            GPUModelRunner.__init__(self, vllm_config, device)
        self.use_cuda_graph = False
        self.cascade_attn_enabled = False
        self._postprocess_tensors()
        self.draft_token_ids_copy_stream = mock.Mock()

    def load_model(self, *arguments: object, **options: object) -> None:
        # The platform cannot say how much memory is in use, which that load logs.
        with mock.patch.object(CpuPlatform, "get_current_memory_usage", return_value=0, create=True):
            GPUModelRunner.load_model(self, *arguments, **options)

    def _copy_draft_token_ids_to_cpu(self, *arguments: object, **options: object) -> None:
        # On a stream of its own, which only an accelerator has.
        with mock.patch.multiple(torch.cuda, current_stream=mock.Mock(), stream=lambda _: nullcontext()):
            super()._copy_draft_token_ids_to_cpu(*arguments, **options)


class Worker(cpu_worker.CPUWorker):
    """The CPU's worker with that runner."""

    def init_device(self) -> None:
        with mock.patch.object(cpu_worker, "CPUModelRunner", ModelRunner):
            super().init_device()
