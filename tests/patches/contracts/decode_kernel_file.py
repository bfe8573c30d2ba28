"""Inputs for vLLM's Triton MLA decode kernels, and what float64 makes of them."""

from __future__ import annotations

from typing import Any

import torch
import triton

from aerie.rehearsal.decode_kernel import Decode

# Kimi-K2.5's MLA: a cached token is a latent of 512 and a rotary key of 64 (its config.json).
LATENT, ROPE = 512, 64


def expected(step: Decode, row: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Row `row` in float64."""
    length = int(step.lengths[row])
    pages = step.cache.view(torch.uint8)[step.table[row].long()].view(step.cache.dtype)  # FP8 need not be indexable
    keys = pages.flatten(0, 2)[:length].double() * step.scale.double()
    scores = step.query[row].double() @ keys.T * step.softmax_scale
    return torch.softmax(scores, -1) @ keys[:, :LATENT], torch.logsumexp(scores, -1)


def largest_error(step: Decode, module: Any) -> float:
    """How far the kernels are from float64: as a part of a row's largest output, or of a log-sum-exp above 1."""
    output, lse = step.run(module)
    errors = []
    for row in step.lengths.nonzero().flatten().tolist():
        right, right_lse = expected(step, row)
        errors.append(((output[row] - right) / right.abs().max()).abs().max())
        errors.append(((lse[row] - right_lse) / right_lse.abs().clamp(min=1)).abs().max())
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
