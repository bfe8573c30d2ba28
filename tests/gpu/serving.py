"""Speculation serves, and changes nothing, on the paths that an 8-GPU host takes: FP8 cache, TRITON_MLA, several ranks.

The checks are those of `contracts/speculation.py`, with other options for the engine. bfloat16 and CUDA graphs; the
tiny pair's weights leave a wide margin, also for FP8. Runs on one GPU, tensor parallelism on two.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[1] / "patches" / "contracts"))

import speculation
from verdict import contract, main
from vllm import LLM

if TYPE_CHECKING:
    from collections.abc import Iterator

# Engines may share a GPU here, so that none may measure what is free on it.
COMMON = {"kv_cache_memory_bytes": 2**30}


@contextlib.contextmanager
def engines(of_drafter: dict | None = None, **options: object) -> Iterator[None]:
    """Let the engines of `speculation` have these options, and their drafters those."""

    def engine(*args: object, **given: object) -> LLM:
        if "speculative_config" in given:
            given["speculative_config"] |= of_drafter or {}
        return LLM(*args, **given | COMMON | options)

    speculation.said.cache_clear()
    with mock.patch.object(speculation, "LLM", engine):
        yield


def equal_to_none(drafter: str, **options: object) -> str:
    """Start one engine with the drafter and one without, and compare what they say."""
    with engines(**options):
        return speculation.equal_to_none(drafter)


# What sm_120 gets for Kimi-K2.5; other chips choose something else unless they are told.
TRITON = {"attention_backend": "TRITON_MLA"}


@contract("fp8-kv-serves")
def fp8() -> str:
    """An FP8 KV cache on TRITON_MLA, with an MLA drafter that shares the target's type of cache."""
    return equal_to_none("mla", kv_cache_dtype="fp8", of_drafter=TRITON, **TRITON)


@contract("fp8-kv-serves-llama-drafter")
def fp8_llama() -> str:
    """The same with a Llama-type drafter, whose own cache stays bfloat16: FLASH_ATTN takes no FP8 on sm_120."""
    drafter = {"kv_cache_dtype": "bfloat16", "attention_backend": "FLASH_ATTN"}
    return equal_to_none("llama", kv_cache_dtype="fp8", of_drafter=drafter, **TRITON)


@contract("tensor-parallel-serves")
def tensor_parallel() -> str:
    """Two tensor-parallel ranks on TRITON_MLA, with an MLA drafter."""
    return equal_to_none("mla", tensor_parallel_size=2, of_drafter=TRITON, **TRITON)


@contract("pipeline-parallel-serves")
def pipeline_parallel() -> str:
    """Two pipeline stages on TRITON_MLA, with an MLA drafter."""
    return equal_to_none("mla", pipeline_parallel_size=2, of_drafter=TRITON, **TRITON)


DCP = {"tensor_parallel_size": 2, "decode_context_parallel_size": 2}


@contract("context-parallel-serves")
def context_parallel() -> str:
    """Two ranks that share the KV cache of each request while decoding (DCP), on TRITON_MLA, with an MLA drafter."""
    return equal_to_none("mla", of_drafter=TRITON, **DCP, **TRITON)


@contract("context-parallel-llama-drafter")
def context_parallel_llama() -> str:
    """Under DCP, no fewer of a Llama drafter's tokens are accepted than with tensor parallelism alone.

    The series refuses such a drafter, since this does not hold.
    """
    accepted, texts = [], []
    for ranks in ({"tensor_parallel_size": 2}, DCP):
        # Graphs of whole steps are another contract's matter.
        options = {**TRITON, **ranks, "compilation_config": {"cudagraph_mode": "PIECEWISE"}}
        with engines(of_drafter={"attention_backend": "FLASH_ATTN"}, **options):
            said = speculation.said("llama")
        accepted.append(said.accepted / said.drafts)
        texts.append(said.greedy)
    assert texts[0] == texts[1], "the texts differ, so that acceptance says nothing"
    alone, shared = accepted
    figures = f"{shared:.2f} tokens of a draft accepted with DCP, {alone:.2f} without"
    assert shared > 0.95 * alone, figures
    return figures


if __name__ == "__main__":
    main()
