"""Real failures of a start on a GPU: what `aerie serve --once` makes of each, its exit code and its diagnosis.

Each contract's engine fails for a reason that only a GPU has: its memory, its driver, its kernels. The engine's output
goes to the log, between lines of dashes.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parents[1] / "patches" / "contracts"))

from supervising import TINY, Supervisor, occupied, serving
from verdict import contract, main

if TYPE_CHECKING:
    from collections.abc import Mapping

# Exit codes of `aerie serve --once`.
CONFIGURATION, MEMORY, HARDWARE, CRASH = 2, 3, 4, 5
ALONE = {"speculative-config": None, "load-format": "dummy", "skip-mm-profiling": True}
# Kimi-K2.5's own sizes, in BF16: the first GPU is full after five of its layers.
REAL = {
    "hidden_size": 7168, "num_attention_heads": 64, "num_key_value_heads": 64, "q_lora_rank": 1536,
    "intermediate_size": 18432, "moe_intermediate_size": 2048, "vocab_size": 163840,
}  # fmt: skip


def failed(
    code: int,
    cause: str,
    overrides: Mapping[str, object] | None = None,
    environment: Mapping[str, str | None] | None = None,
) -> str:
    """Serve once; AssertionError unless it ends with this code and a known diagnosis whose root cause has `cause`."""
    with serving(overrides, environment, ["--once"]) as supervisor:
        return check(supervisor, code, cause)


def check(supervisor: Supervisor, code: int, cause: str) -> str:
    """Wait for the end; AssertionError unless it is that with this code and cause."""
    while (ended := supervisor.process.poll()) is None:
        assert supervisor.status().get("phase") != "ready", "it serves"
        time.sleep(0.2)
    diagnosis = json.loads((supervisor.folder / "state" / "state.json").read_text())["diagnosis"] or {}
    root = diagnosis.get("root") or {}
    found = f"exit code {ended}, {diagnosis.get('signature')}: {root.get('text', '')[:150]}"
    assert ended == code, found
    assert diagnosis.get("known"), found
    assert cause in root.get("text", ""), found
    assert diagnosis["title"] in supervisor.said()[-3000:], "the diagnosis is not the last thing that was printed"
    return found


def target(folder: str, **sizes: object) -> str:
    """Return a copy of the tiny target whose language model has other sizes; without weights."""
    path = Path(folder) / "target"
    shutil.copytree(TINY / "target", path, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((path / "config.json").read_text())
    config["text_config"] |= sizes
    (path / "config.json").write_text(json.dumps(config))
    return str(path)


@contract("no-gpu")
def no_gpu() -> str:
    """No GPU is visible."""
    return failed(HARDWARE, "0 devices", environment={"CUDA_VISIBLE_DEVICES": ""})


@contract("no-such-gpu")
def no_such_gpu() -> str:
    """A GPU that is not there."""
    return failed(HARDWARE, "NVMLError_InvalidArgument", environment={"CUDA_VISIBLE_DEVICES": "7"})


@contract("fewer-gpus-than-ranks")
def fewer_gpus() -> str:
    """More ranks than GPUs."""
    return failed(CONFIGURATION, "ParallelConfig", {"tensor-parallel-size": 4})


@contract("backend-not-of-this-chip")
def backend() -> str:
    """An attention backend of another chip."""
    return failed(CONFIGURATION, "compute capability not supported", {"attention-backend": "CUTLASS_MLA"})


@contract("no-compiler")
def no_compiler() -> str:
    """Nothing to compile a Triton launcher with."""
    with tempfile.TemporaryDirectory() as folder:
        caches = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "VLLM_CACHE_ROOT")
        changes = {"PATH": folder, "CC": None, **dict.fromkeys(caches, folder)}
        return failed(CONFIGURATION, "C compiler", environment=changes)


@contract("no-memory-for-the-cache")
def no_memory_for_cache() -> str:
    """The share of the GPU is used up before the KV cache gets any."""
    return failed(MEMORY, "No available memory for the cache blocks", {"gpu-memory-utilization": 0.003})


@contract("cache-for-no-request")
def cache_for_no_request() -> str:
    """There is memory for a cache, and not for one request of the longest kind."""
    return failed(MEMORY, "KV cache is needed", {"kv-cache-memory-bytes": 2_000_000})


@contract("gpu-taken")
def gpu_taken() -> str:
    """Another process has most of the GPU."""
    with occupied(leave=20_000):
        return failed(MEMORY, "desired GPU memory utilization", {"gpu-memory-utilization": 0.9})


@contract("out-of-memory-at-the-context")
def no_context() -> str:
    """Another process has so much of the GPU that not even a context fits."""
    with occupied(leave=150):
        return failed(MEMORY, "out of memory", {"gpu-memory-utilization": 0.001})


@contract("out-of-memory-loading")
def loading() -> str:
    """The weights are more than the GPU has."""
    with tempfile.TemporaryDirectory() as folder:
        model = target(folder, **REAL, num_hidden_layers=61, n_routed_experts=384, num_experts_per_tok=8)
        return failed(MEMORY, "CUDA out of memory", {**ALONE, "model": model, "gpu-memory-utilization": 0.9})


@contract("out-of-memory-profiling")
def profiling() -> str:
    """The weights fit, and a step of so many tokens does not."""
    with tempfile.TemporaryDirectory() as folder:
        model = target(folder, **REAL, num_hidden_layers=2, n_routed_experts=64, num_experts_per_tok=8)
        step = {"max-num-batched-tokens": 1_048_576, "gpu-memory-utilization": 0.9, "enforce-eager": True}
        return failed(MEMORY, "CUDA out of memory", {**ALONE, "model": model, **step})


@contract("out-of-memory-serving")
def while_serving() -> str:
    """Another process takes what was free, and a request needs more than any did in the profile."""
    with tempfile.TemporaryDirectory() as folder:
        options = {**ALONE, "model": target(folder, vocab_size=163840), "gpu-memory-utilization": 0.03}
        with serving(options, options=["--once"]) as supervisor:
            # No dummy weights answer the supervisor's question, so it never gets ready.
            supervisor.until(lambda status: status.get("phase") in {"checking", "ready"}, 150)
            with occupied(leave=64):
                try:
                    answer = str(supervisor.complete([5] * 4000, max_tokens=1, prompt_logprobs=1))
                except OSError as error:
                    answer = str(error)
                assert "CUDA out of memory" in supervisor.said(), f"it was not out of memory: {answer[:200]}"
                return check(supervisor, MEMORY, "OutOfMemoryError")


@contract("device-side-assert")
def device_side_assert() -> str:
    """A drafter whose tokens lie outside the target's vocabulary."""
    import torch  # noqa: PLC0415 - the other contracts do not need it
    from safetensors.torch import load_file, save_file  # noqa: PLC0415

    with tempfile.TemporaryDirectory() as folder:
        drafter = Path(folder) / "drafter"
        shutil.copytree(TINY / "drafter-llama", drafter)
        weights = load_file(drafter / "model.safetensors")
        weights["d2t"] = torch.full_like(weights["d2t"], 10**6)
        save_file(weights, drafter / "model.safetensors")
        speculation = {"method": "eagle3", "model": str(drafter), "num_speculative_tokens": 3}
        return failed(CRASH, "CUDA error", {"speculative-config": speculation})


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
