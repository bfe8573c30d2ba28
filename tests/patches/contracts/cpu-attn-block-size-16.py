"""A Llama-type drafter serves beside the MLA target on a CPU, drafts, and does not change the text.

Runs inside the image. In fp32, where greedy decoding has no ties to break: with speculation, each prompt must give the
very tokens that it gives without.
"""

import sys

from vllm import LLM, SamplingParams

TINY = "/usr/share/aerie/tiny"
# Of different lengths, so that sequences end inside, at and just behind a block of 16 tokens.
PROMPTS = ["a", "The quick brown fox", "0123456789abcdef", "0123456789abcdef0", "Kimi " * 9]


def generate(**options: object) -> tuple[list[list[int]], dict[str, float]]:
    """Tokens of each prompt, and vLLM's counters."""
    llm = LLM(
        f"{TINY}/target",
        dtype="float32",
        max_model_len=1024,
        max_num_seqs=len(PROMPTS),
        enforce_eager=True,
        disable_log_stats=False,
        seed=0,
        **options,
    )
    outputs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=48, ignore_eos=True), use_tqdm=False)
    counters = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
    return [list(output.outputs[0].token_ids) for output in outputs], counters


def main() -> None:
    drafter = {"method": "eagle3", "model": f"{TINY}/drafter-llama", "num_speculative_tokens": 3}
    with_drafter, counters = generate(speculative_config=drafter)
    drafts, accepted = (counters[f"vllm:spec_decode_num_{what}"] for what in ("drafts", "accepted_tokens"))
    print(f"drafts={drafts:.0f} accepted={accepted:.0f}")
    assert drafts > 0, "the drafter never drafted"
    assert accepted > 0, "not one drafted token was accepted"
    without, _ = generate()
    for prompt, expected, got in zip(PROMPTS, without, with_drafter, strict=True):
        assert got == expected, f"{prompt!r}: with speculation {got}, without {expected}"


if __name__ == "__main__":
    sys.exit(main())
