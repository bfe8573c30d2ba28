"""With speculation on a CPU, a sampled text is what the model says, also beside greedy requests.

Runs inside the image. The tiny model's next token has a probability of all but 1, so that it says the same at any usual
temperature.
"""

import sys

from vllm import LLM, SamplingParams

from aerie.checkpoint.tiny import expected_continuation

TINY = "/usr/share/aerie/tiny"
TOKENS = 48
SAMPLING = [
    SamplingParams(temperature=1.0, max_tokens=TOKENS, ignore_eos=True, seed=1),
    SamplingParams(temperature=0.7, top_k=5, top_p=0.9, max_tokens=TOKENS, ignore_eos=True),
    SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True),
]


def main() -> None:
    llm = LLM(
        f"{TINY}/target",
        max_model_len=1024,
        max_num_seqs=len(SAMPLING),
        enforce_eager=True,
        speculative_config={"method": "eagle3", "model": f"{TINY}/drafter-mla", "num_speculative_tokens": 3},
    )
    # Each alone, and at once; the plain temperature first, since without the patch a top_k may end the engine.
    for batch in ([SAMPLING[0]], [SAMPLING[1]], SAMPLING):
        outputs = llm.generate(["?"] * len(batch), batch, use_tqdm=False)
        for parameters, output in zip(batch, outputs, strict=True):
            said = output.outputs[0].text
            assert said == expected_continuation("?", TOKENS), (
                f"not what the model says, at temperature {parameters.temperature}: {said!r}"
            )


if __name__ == "__main__":
    sys.exit(main())
