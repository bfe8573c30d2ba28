"""Speculation changes the speed of the text and nothing else: greedy and sampled, with both types of drafter.

Runs where vLLM is installed, a GPU or none. On a CPU in fp32, where greedy decoding has no ties to break; on a GPU,
whose MLA kernels know no fp32, in bfloat16 and with CUDA graphs: the tiny pair's weights leave a wide margin.
"""

from __future__ import annotations

import os
from functools import cache
from typing import NamedTuple

import torch
from verdict import contract, main
from vllm import LLM, SamplingParams

from aerie.checkpoint.tiny import expected_continuation

TINY = os.environ.get("AERIE_TINY", "/usr/share/aerie/tiny")
# Of different lengths, so that sequences end inside, at and just behind a block of 16 tokens.
PROMPTS = ["a", "The quick brown fox", "0123456789abcdef", "0123456789abcdef0", "Kimi " * 9]
# Triton's interpreter, in which V2 runs on a CPU, is slow.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
TOKENS = 16 if INTERPRETED else 40
GREEDY = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
# The tiny model's next token has a probability of all but 1, so that it says the same at any usual temperature.
# The interpreter cannot run V2's kernel for top_k and top_p (its loop index is no tensor there).
TRUNCATED = {} if INTERPRETED else {"top_k": 5, "top_p": 0.9}
SAMPLED = [
    SamplingParams(temperature=1.0, max_tokens=TOKENS, ignore_eos=True, seed=1),
    SamplingParams(temperature=0.7, max_tokens=TOKENS, ignore_eos=True, **TRUNCATED),
    GREEDY,
]


class Said(NamedTuple):
    """What one engine said: tokens of each greedy prompt, sampled texts, and the counters of speculation."""

    greedy: list[list[int]]
    sampled: list[tuple[SamplingParams, str]]
    drafts: int
    accepted: int


@cache
def said(drafter: str | None) -> Said:
    """Start an engine with a drafter of the tiny pair, or none, and ask it everything."""
    gpu = torch.cuda.is_available()
    options: dict[str, object] = {}
    if drafter:
        options["speculative_config"] = {
            "method": "eagle3",
            "model": f"{TINY}/drafter-{drafter}",
            "num_speculative_tokens": 3,
        }
    llm = LLM(
        f"{TINY}/target",
        dtype="bfloat16" if gpu else "float32",
        max_model_len=1024,
        max_num_seqs=len(PROMPTS),
        enforce_eager=not gpu,
        kv_cache_memory_bytes=2**30,  # not what is free: other engines may share the GPU
        disable_log_stats=False,
        seed=0,
        **options,
    )
    greedy = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    counters = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
    drafts, accepted = (int(counters.get(f"vllm:spec_decode_num_{what}", 0)) for what in ("drafts", "accepted_tokens"))
    tokens = [list(output.outputs[0].token_ids) for output in greedy]
    return Said(tokens, sample(llm) if drafter else [], drafts, accepted)


def sample(llm: LLM) -> list[tuple[SamplingParams, str]]:
    """Ask with each sampling alone, and all at once; an engine that says nonsense may not live through the next."""
    texts: list[tuple[SamplingParams, str]] = []
    for batch in (*([parameters] for parameters in SAMPLED), SAMPLED):
        try:
            outputs = llm.generate(["?"] * len(batch), batch, use_tqdm=False)
        except Exception as error:  # noqa: BLE001 - what an engine dies of is what it said
            texts.append((batch[0], f"{type(error).__name__}: {error}"))
            break
        texts += [(parameters, output.outputs[0].text) for parameters, output in zip(batch, outputs, strict=True)]
        if any(text != expected_continuation("?", TOKENS) for _, text in texts):
            break
    return texts


def equal_to_none(drafter: str) -> str:
    with_drafter, without = said(drafter), said(None)
    assert with_drafter.drafts > 0, "the drafter never drafted"
    assert with_drafter.accepted > 0, "not one drafted token was accepted"
    for prompt, expected, got in zip(PROMPTS, without.greedy, with_drafter.greedy, strict=True):
        assert got == expected, f"{prompt!r}: with speculation {got}, without {expected}"
    return f"{with_drafter.accepted} of {3 * with_drafter.drafts} drafted tokens accepted, texts equal"


@contract("speculation-equals-none")
def mla_drafter() -> str:
    """An MLA drafter: each prompt gives the very tokens that it gives without speculation."""
    return equal_to_none("mla")


@contract("llama-drafter")
def llama_drafter() -> str:
    """A Llama-type drafter serves beside the MLA target, drafts, and does not change the text either."""
    return equal_to_none("llama")


@contract("sampled-speculation")
def sampled() -> str:
    """A sampled text is what the model says, also beside greedy requests."""
    assert said("mla").drafts > 0, "the drafter never drafted"
    for parameters, text in said("mla").sampled:
        assert text == expected_continuation("?", TOKENS), (
            f"not what the model says, at temperature {parameters.temperature}: {text!r}"
        )
    return f"temperatures {', '.join(str(parameters.temperature) for parameters in SAMPLED)}; {TRUNCATED or 'no top_k'}"


if __name__ == "__main__":
    main()
