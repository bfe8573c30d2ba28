"""What the engine computes on: the GPUs of this machine, or those that a plan is made for."""

from dataclasses import dataclass

GIB = 2**30


@dataclass(frozen=True)
class Hardware:
    """One kind of GPU, and how many of it; `chip` is None for a CPU."""

    name: str
    chip: str | None
    memory: int
    """Bytes of one GPU that programs can have; of a CPU, those of the machine."""
    multiprocessors: int
    count: int


RTX_PRO_6000 = Hardware("RTX PRO 6000 Blackwell", "sm_120", int(95.6 * GIB), 188, 8)
"""The host that Aerie is made for (NVIDIA's RTX Blackwell PRO architecture paper; usable memory as vLLM reports it)."""
