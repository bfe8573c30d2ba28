"""The tiny pair's configuration and models inside this process: the engine's real classes, without the engine."""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed.parallel_state import ensure_model_parallel_initialized, init_distributed_environment
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import get_model
from vllm.model_executor.models import registry
from vllm.platforms import current_platform

if TYPE_CHECKING:
    from collections.abc import Iterator

TINY = Path(os.environ.get("AERIE_TINY", "/usr/share/aerie/tiny"))
DEVICE = torch.device(current_platform.device_type)

# The engine looks at each model's class in a process of its own, so that CUDA is not started in this one. Here models
# are loaded in this one anyway; and a process that imports the engine anew takes many seconds, for each class.
registry._run_in_subprocess = lambda function: function()


def engine_config(drafter: Path | str | None = None, target: Path = TINY / "target", **options: object) -> VllmConfig:
    """The engine's configuration as `vllm serve` builds it; a drafter by its folder or its name in the tiny pair."""
    arguments = {"max_model_len": 512, "max_num_seqs": 4, "enforce_eager": True}
    if drafter is not None:
        arguments["speculative_config"] = {
            "method": "eagle3",
            "model": str(TINY / drafter),
            "num_speculative_tokens": 3,
        }
    return EngineArgs(model=str(target), **arguments | options).create_engine_config()


def known_drafters() -> list[str]:
    """The pair's drafters whose architecture the release has: 0.16.0 has no MLA drafter."""
    architectures = {"drafter-llama": "LlamaForCausalLMEagle3", "drafter-mla": "Eagle3DeepseekV2ForCausalLM"}
    known = registry.ModelRegistry.get_supported_archs()
    return [drafter for drafter, architecture in architectures.items() if architecture in known]


@functools.cache
def _one_rank() -> None:
    """Be the only rank; without an accelerator its cache is nothing to empty, as the CPU's worker has it."""
    if not torch.accelerator.is_available():
        torch.accelerator.empty_cache = lambda: None
    folder = tempfile.mkdtemp(prefix="aerie-rank-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    backend = getattr(current_platform, "dist_backend", "") or "gloo"
    init_distributed_environment(1, 0, f"file://{folder}/rendezvous", 0, backend)
    ensure_model_parallel_initialized(1, 1)


@contextmanager
def serving(config: VllmConfig) -> Iterator[None]:
    """What a worker sees: its configuration, and groups of one rank."""
    with set_current_vllm_config(config):
        _one_rank()
        yield


def target_model(config: VllmConfig) -> nn.Module:
    """The target as a worker loads it; inside `serving`."""
    return get_model(vllm_config=config)
