"""Proves on two GPUs what takes several ranks: pipeline stages, tensor and context parallel decoding.

    python tests/gpu/two_gpus.py --out results           # where vLLM 0.32.0's CUDA wheel is installed, patched or not
    python tests/gpu/two_gpus.py --out results --env-file config/nccl-pcie.env      # GPUs on PCIe, as the service runs

As `one_gpu.py`, whose docstring says the rest; it takes under ten minutes too.
"""

from __future__ import annotations

import sys

from items import CONTRACTS, Item, run

# The service's GPUs have no NVLink, so what multicasts over it stays off where there is some.
MULTICAST = ("ALLREDUCE_USE_SYMM_MEM", "USE_DIRECT_DCP_A2A", "USE_DIRECT_DCP_Q_GATHER", "USE_DIRECT_DCP_KV_GATHER")
PCIE = {f"VLLM_{name}": "0" for name in MULTICAST}

SERVING = "tests/gpu/serving.py"

ITEMS = [
    # It measures what memory is free.
    Item("pipeline", f"{CONTRACTS}/pipeline.py", gpus=2, alone=True, seconds=300, environment=PCIE),
    Item("pipeline_serving", SERVING, ("pipeline-parallel-serves",), gpus=2, environment=PCIE),
    Item("tensor_parallel", SERVING, ("tensor-parallel-serves",), gpus=2, environment=PCIE),
    Item("context_parallel", SERVING, ("context-parallel-serves",), gpus=2, environment=PCIE),
    Item(
        "pipeline_serving_unpatched",
        SERVING,
        gpus=2,
        environment=PCIE,
        unpatched={"pipeline-parallel-serves": "does not support eagle3 with pipeline parallelism"},
    ),
    Item(
        "context_parallel_unpatched",
        SERVING,
        gpus=2,
        environment=PCIE,
        unpatched={"context-parallel-serves": "assert m.max_query_len <= self.reorder_batch_threshold"},
    ),
    # With the series it is refused.
    Item(
        "context_parallel_llama_unpatched",
        SERVING,
        gpus=2,
        environment=PCIE,
        unpatched={"context-parallel-llama-drafter": "tokens of a draft accepted with DCP"},
    ),
]

if __name__ == "__main__":
    sys.exit(run(__doc__, ITEMS))
