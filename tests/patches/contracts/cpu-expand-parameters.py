"""With speculation on a CPU, a sampled text is what the model says, also beside greedy requests.

Runs inside the image. The tiny model's next token has a probability of all but 1, so that it says the same at any usual
temperature.
"""

import sys

from aerie.checkpoint.tiny import expected_continuation
from vllm import LLM, SamplingParams

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
    expected = expected_continuation("?", TOKENS)
    for outputs in ([llm.generate("?", one, use_tqdm=False)[0] for one in SAMPLING],
                    llm.generate(["?"] * len(SAMPLING), SAMPLING, use_tqdm=False)):  # fmt: skip
        for parameters, output in zip(SAMPLING, outputs, strict=True):
            said = output.outputs[0].text
            assert said == expected, f"not what the model says, at {parameters.temperature}: {said!r}"


if __name__ == "__main__":
    sys.exit(main())
