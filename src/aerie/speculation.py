"""vLLM's counters of speculative decoding, read from the text of its `/metrics`. Pure, standard library only."""

import re
from dataclasses import dataclass

# In `drafts` rounds a drafter proposes `draft_tokens`; the target accepts some (vllm/v1/spec_decode/metrics.py).
_NAMES = {
    "drafts": "vllm:spec_decode_num_drafts_total",
    "draft_tokens": "vllm:spec_decode_num_draft_tokens_total",
    "accepted_tokens": "vllm:spec_decode_num_accepted_tokens_total",
}


@dataclass(frozen=True)
class Speculation:
    """Counters since the engine started, or the difference of two readings."""

    drafts: int
    draft_tokens: int
    accepted_tokens: int

    def __sub__(self, earlier: "Speculation") -> "Speculation":
        return Speculation(
            self.drafts - earlier.drafts,
            self.draft_tokens - earlier.draft_tokens,
            self.accepted_tokens - earlier.accepted_tokens,
        )

    def __str__(self) -> str:
        length = "" if self.acceptance_length is None else f", {self.acceptance_length:.2f} tokens a step"
        return f"{self.drafts} drafts, {self.accepted_tokens} of {self.draft_tokens} drafted tokens accepted{length}"

    @property
    def acceptance_length(self) -> float | None:
        """Return the mean number of tokens a step of the target yields: its own one and the accepted drafts."""
        return 1 + self.accepted_tokens / self.drafts if self.drafts else None


def read_counters(metrics: str) -> Speculation | None:
    """Sum the counters over all engines; None where the engine does not speculate, or keeps no statistics."""
    sums = dict.fromkeys(_NAMES, 0)
    seen = False
    for line in metrics.splitlines():
        name = re.split("[{ ]", line, maxsplit=1)[0]  # the labels may be missing
        for field, counter in _NAMES.items():
            if name == counter:
                seen = True
                sums[field] += int(float(line.rpartition(" ")[2]))
    return Speculation(**sums) if seen else None
