"""Under DCP a drafter is taken only where every rank has the KV heads of the queries that it is asked to attend for.

The engine's configuration is built as `vllm serve` builds it, for as many ranks as it takes; none of them is started.
"""

from __future__ import annotations

from in_process import engine_config
from verdict import contract, main


def refusal(drafter: str, ranks: int, dcp: int) -> str:
    """What the engine says to a drafter on so many ranks, sharing a context in groups of `dcp`; empty where taken."""
    try:
        engine_config(drafter, tensor_parallel_size=ranks, decode_context_parallel_size=dcp)
    except ValueError as error:
        return str(error)
    return ""


@contract("dcp-dense-drafter")
def dcp_dense_drafter() -> str:
    """A Llama drafter whose KV heads differ within a DCP group is refused with the remedy; others are taken."""
    # The tiny pair's Llama drafter has two KV heads: two ranks of one group have one each, and of four every two share.
    refused = refusal("drafter-llama", 2, 2)
    assert refused, "a Llama drafter is taken though the ranks of a DCP group have different KV heads"
    parts = ("drafter-llama has 2 KV heads", "decode_context_parallel_size=2", "Expected at most 1", "MLA")
    missing = [part for part in parts if part not in refused]
    assert not missing, f"refused, but without {missing}: {refused}"
    taken = [("drafter-llama", 2, 1), ("drafter-llama", 4, 2), ("drafter-mla", 2, 2)]
    wrongly = {case: said for case in taken if (said := refusal(*case))}
    assert not wrongly, f"refused though right: {wrongly}"
    return "2 KV heads on 2 ranks: DCP 2 is refused; DCP 1, DCP 2 on 4 ranks, and an MLA drafter are taken"


if __name__ == "__main__":
    main()
