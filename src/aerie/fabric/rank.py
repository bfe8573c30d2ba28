"""One rank of an all-reduce over all GPUs: what `all_reduce` runs in children, one for each.

    RANK=r WORLD_SIZE=n python -P -m aerie.fabric.rank BACKEND RENDEZVOUS PARENT PIPE

RENDEZVOUS is a file that the ranks meet by, so that no port is taken.
"""

import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from aerie.fabric.children import Telling
from aerie.fabric.sizes import LOADING, REDUCTIONS, words_of

_IN_A_ROW = 5  # between two looks at the clock, so that what starting them takes hides behind the one before
_WARM, _TIMES = 1, 5  # rows; the median counts
_EXACT = 256  # whole numbers up to this are exact in bfloat16, and so are sums that stay below
_APART = 13  # ranks give different numbers at one place

Tell = Callable[..., None]


def main(backend: str, rendezvous: str, rank: int, ranks: int, tell: Tell) -> None:
    """Join the others and reduce each size, looked at word by word and timed."""
    tell(step=LOADING)
    import torch  # noqa: PLC0415 - takes seconds
    from torch import distributed  # noqa: PLC0415

    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.ones(1, device=device).sum().item()
    tell(step="joining the others")
    distributed.init_process_group(backend, init_method=f"file://{rendezvous}", rank=rank, world_size=ranks)
    for size in REDUCTIONS:
        tell(step=f"all-reduce of {words_of(size)}")
        tell(reduced=size, wrong=_wrong(torch, distributed, size, rank, ranks, device))
        tell(timed=size, seconds=_seconds(torch, distributed, size, device, tell))
    tell(step="parting")
    distributed.destroy_process_group()


def _wrong(torch: Any, distributed: Any, size: int, rank: int, ranks: int, device: Any) -> int:
    """Return how many of the sum's numbers are not what they have to be."""
    period = max(2, _EXACT // ranks)
    numbers = torch.arange(period, device=device)
    given = [(numbers + _APART * each) % period for each in range(ranks)]
    count = size // 2
    reduced = _filled(torch, given[rank], count)
    distributed.all_reduce(reduced)
    return int((reduced != _filled(torch, sum(given), count)).sum().item())


def _filled(torch: Any, numbers: Any, count: int) -> Any:
    """Return so many numbers, these again and again."""
    return numbers.to(torch.bfloat16).repeat(-(-count // len(numbers)))[:count].contiguous()


def _seconds(torch: Any, distributed: Any, size: int, device: Any, tell: Tell) -> float:
    """Return how long one takes, on the GPU's own clock where there is one: the median."""
    data = torch.zeros(size // 2, dtype=torch.bfloat16, device=device)
    taken = []

    def row() -> None:
        for _ in range(_IN_A_ROW):
            distributed.all_reduce(data)

    for number in range(_WARM + _TIMES):
        tell(row=number)
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            row()
            end.record()
            end.synchronize()
            taken.append(begin.elapsed_time(end) / 1000)
        else:
            began = time.perf_counter()
            row()
            taken.append(time.perf_counter() - began)
    return float(statistics.median(taken[_WARM:]) / _IN_A_ROW)


if __name__ == "__main__":
    main(
        sys.argv[1],
        sys.argv[2],
        int(os.environ["RANK"]),
        int(os.environ["WORLD_SIZE"]),
        Telling(*map(int, sys.argv[3:])),
    )
