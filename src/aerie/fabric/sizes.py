"""How much is moved, and how long it may take."""

KIB, MIB = 1024, 1024 * 1024

COPIES = (4 * KIB, 1 * MIB, 64 * MIB)
"""Bytes of a copy: a page; what a switch can buffer; and what it cannot, of which the time is taken, too."""
KERNEL_COPY = 1 * MIB
"""Bytes that a kernel stores into, or loads from, another GPU's memory."""

_HIDDEN = 7168 * 2  # bytes of a hidden state of Kimi-K2.5, bfloat16
REDUCTIONS = (1 * _HIDDEN, 64 * _HIDDEN, 8192 * _HIDDEN)
"""Bytes of an all-reduce, as tensor-parallel ranks do it twice a layer: of one token, of 64 requests' next ones, and of
a chunk of a prompt, `max-num-batched-tokens` long. NCCL has another protocol for each (LL, LL128, Simple)."""

LOADING = "loading torch and reaching the GPUs"
"""The step that reads gigabytes from a cold disk; the others take milliseconds where nothing is wrong."""
LOADING_SECONDS = 300.0


def words_of(size: int) -> str:
    """Return bytes as people read them."""
    if size < MIB:
        return f"{size / KIB:.0f} KiB"
    return f"{size / MIB:.0f} MiB"
