"""The contracts of aux_values.py on vLLM 0.16.0, whose only drafter for Kimi-K2.5 is Llama's.

What its recording needs to know of that release besides: how its engine speculates on a CPU, and that a drafter beside
a multimodal target is given its tokens' embeddings.
"""

from __future__ import annotations

import functools
from typing import Any

import aux_recording
import aux_values
from verdict import contract, main

DRAFTER = "drafter-llama"


class Recording(aux_recording.Recording):
    """Listens to a drafter that is given embeddings instead of tokens, and looks up what was embedded."""

    def _look(self, module: Any, args: Any, given: dict[str, Any]) -> None:
        if given["input_ids"] is None:
            given = given | {"input_ids": self._runner.drafter.input_ids[: len(given["positions"])]}
        super()._look(module, args, given)


aux_recording.Recording = Recording
aux_values.generate = functools.partial(
    aux_values.generate, worker_cls="speculating_cpu.Worker", trust_remote_code=True
)


@contract("aux-values")
def values() -> str:
    """The auxiliary states equal transformers', of prompts and of verified drafts, in a batch of unequal lengths."""
    plain = aux_values.run(DRAFTER)
    return f"{aux_values.check_aux(plain)}; {aux_values.covered(plain)}"


@contract("aux-values-first-and-last")
def values_first_and_last() -> str:
    """So are the embeddings, layer 0's input, and what the last layer puts out, before the norm."""
    layers = aux_values.reference().layers
    ends = aux_values.run(DRAFTER, (0, layers // 2, layers))
    return f"{aux_values.check_aux(ends)}; {aux_values.covered(ends)}"


@contract("drafter-inputs")
def drafter_inputs() -> str:
    """The drafter reads what its training pairs: at position p the states of p and the token of p + 1."""
    return aux_values.check_drafter(aux_values.run(DRAFTER))


if __name__ == "__main__":
    main()
