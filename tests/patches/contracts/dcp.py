"""DCP with speculation on TRITON_MLA, the one attention backend that Kimi-K2.5 has on sm_120.

Under DCP a request with more than one new token, as each one is that verifies drafts, is no decode to this backend.
The engine's own rules choose the graph mode, and the backend's own metadata builder is asked; only the attention layer
that the builder reads its sizes from is a stand-in. What the kernels then compute needs two GPUs: see tests/gpu.
"""

from __future__ import annotations

import copy
from itertools import accumulate
from types import SimpleNamespace
from unittest import mock

import torch
from in_process import DEVICE, engine_config, serving
from verdict import contract, main
from vllm.config import CompilationConfig, CompilationMode, CUDAGraphMode, VllmConfig
from vllm.v1.attention.backend import AttentionMetadataBuilder, CommonAttentionMetadata
from vllm.v1.attention.backends.mla.triton_mla import TritonMLABackend
from vllm.v1.kv_cache_interface import MLAAttentionSpec

LAYER = "model.layers.0.self_attn.attn"
REQUESTS = 2


def configured(dcp: int, tokens: int) -> VllmConfig:
    """One rank's configuration with full and piecewise graphs; `tokens` a request and step, 1 without speculation."""
    config = copy.copy(engine_config("drafter-mla" if tokens > 1 else None))
    config.parallel_config = copy.copy(config.parallel_config)
    config.parallel_config.decode_context_parallel_size = dcp
    text = config.model_config.hf_text_config
    layer = SimpleNamespace(prefill_backend=mock.MagicMock(), num_heads=text.num_attention_heads)
    for size in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"):
        setattr(layer, size, getattr(text, size))
    config.compilation_config = CompilationConfig(
        mode=CompilationMode.VLLM_COMPILE,
        cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE,
        splitting_ops=list(CompilationConfig._attention_ops),
        cudagraph_capture_sizes=[tokens, REQUESTS * tokens],
        max_cudagraph_capture_size=REQUESTS * tokens,
    )
    config.compilation_config.static_forward_context[LAYER] = layer
    return config


def chosen_mode(config: VllmConfig, tokens: int) -> CUDAGraphMode:
    """The mode that the V2 runner chooses, from what the backend says that it supports."""
    support = TritonMLABackend.get_builder_cls().get_cudagraph_support(config, spec_of(config))
    return config.compilation_config.resolve_cudagraph_mode_and_sizes(
        support, "TRITON_MLA", tokens, use_v2_model_runner=True
    )


def builder_of(config: VllmConfig) -> AttentionMetadataBuilder:
    """The backend's metadata builder for the stand-in layer."""
    with serving(config):
        return TritonMLABackend.get_builder_cls()(spec_of(config), [LAYER], config, DEVICE)


def spec_of(config: VllmConfig) -> MLAAttentionSpec:
    """The KV cache of the stand-in layer."""
    return MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=576, dtype=config.model_config.dtype)


def batch_of(query_lens: list[int], seq_lens: list[int], **more: object) -> CommonAttentionMetadata:
    """A batch of requests, each with so many new tokens, and so many in all."""
    starts = torch.tensor([0, *accumulate(query_lens)], dtype=torch.int32)
    return CommonAttentionMetadata(
        query_start_loc=starts.to(DEVICE),
        query_start_loc_cpu=starts,
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=DEVICE),
        num_reqs=len(query_lens),
        num_actual_tokens=sum(query_lens),
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
        block_table_tensor=torch.zeros(len(query_lens), 16, dtype=torch.int32, device=DEVICE),
        slot_mapping=torch.zeros(sum(query_lens), dtype=torch.int64, device=DEVICE),
        **more,
    )


def capture(config: VllmConfig, tokens: int) -> None:
    """Ask the builder for the metadata of a full graph of decoding requests, each of as many tokens."""
    builder = builder_of(config)
    with mock.patch.object(type(builder), "build"):
        builder.build_for_cudagraph_capture(batch_of([tokens] * REQUESTS, [64] * REQUESTS))


@contract("dcp-with-speculation")
def dcp_with_speculation() -> str:
    """With DCP and speculation the engine takes piecewise graphs, which TRITON_MLA can capture; otherwise full ones."""
    expected = {
        (1, 1): CUDAGraphMode.FULL_AND_PIECEWISE,
        (1, 4): CUDAGraphMode.FULL_AND_PIECEWISE,
        (2, 1): CUDAGraphMode.FULL_AND_PIECEWISE,
        (2, 4): CUDAGraphMode.PIECEWISE,
    }
    for (dcp, tokens), mode in expected.items():
        config = configured(dcp, tokens)
        chosen = chosen_mode(config, tokens)
        if chosen.decode_mode() == CUDAGraphMode.FULL:
            try:
                capture(config, tokens)
            except AssertionError as error:
                raise AssertionError(
                    f"DCP {dcp}, {tokens} tokens a request: {chosen.name} is chosen, whose capture the builder refuses"
                ) from error
        assert chosen == mode, f"DCP {dcp}, {tokens} tokens a request: {chosen.name} is chosen, not {mode.name}"
    return ", ".join(f"DCP {dcp} x {tokens} tokens: {mode.name}" for (dcp, tokens), mode in expected.items())


@contract("verification-context")
def verification_context() -> str:
    """A request that verifies drafts attends to the context that it has, also where it is no decode to the backend.

    With async scheduling the host's count of its tokens takes each draft for accepted until the target has spoken.
    """
    config = configured(dcp=2, tokens=4)
    config.scheduler_config = copy.copy(config.scheduler_config)
    config.scheduler_config.async_scheduling = True
    # Two that verify three drafts each, none and two of the last ones rejected; and the rest of a prompt.
    query_lens, seq_lens, rejected = [4, 4, 20], [54, 44, 120], [0, 2, 0]
    batch = batch_of(
        query_lens,
        seq_lens,
        seq_lens_cpu_upper_bound=torch.tensor(seq_lens, dtype=torch.int32) + torch.tensor(rejected, dtype=torch.int32),
        is_prefilling=torch.tensor([False, False, True]),
    )
    metadata = builder_of(config).build(0, batch)
    assert metadata.num_prefills == len(query_lens), f"under DCP, {metadata.num_decodes} of these are decodes"
    got = metadata.prefill.chunked_context.context_lens_list
    expected = [total - new for total, new in zip(seq_lens, query_lens, strict=True)]
    assert got == expected, f"the requests have {expected} tokens of context, and attend to {got}"
    return f"{expected} tokens of context, where the host counts {rejected} more"


if __name__ == "__main__":
    main()
