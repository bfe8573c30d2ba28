"""Moves bytes from GPU to GPU and looks at the destination whether they came: what `pairs` runs in a child.

    python -P -m aerie.fabric.copies PAIRS PARENT PIPE

PAIRS is JSON, [[from, to], ...]. Before each step goes a message that names it, after each pair one with what came of
it.
"""

import json
import statistics
import sys
from collections.abc import Callable
from typing import Any

from aerie.fabric.children import Telling
from aerie.fabric.sizes import COPIES, KERNEL_COPY, LOADING, words_of

_TIMES = 5  # of the largest copy; the median counts
_WORD = 4  # bytes
_MULTIPLIER = 1664525  # odd, so that no two words of a pattern are the same
_BETWEEN_PATTERNS = 7919

Move = Callable[[Any, Any], object]


def main(pairs: list[tuple[int, int]], tell: Callable[..., None]) -> None:
    """Try all pairs, each in several ways. An error of CUDA is raised: after one, a process can do nothing more."""
    tell(step=LOADING)
    import torch  # noqa: PLC0415 - takes seconds, and may hang where the driver does

    for gpu in sorted({gpu for pair in pairs for gpu in pair}):
        torch.ones(1, device=f"cuda:{gpu}").sum().item()
    kernel = _kernel(torch, pairs[0][0], tell)
    for number, (source, destination) in enumerate(pairs):
        pair = _Pair(torch, source, destination, number, tell)
        wrong = pair.try_all(kernel)
        rate = pair.rate() if wrong is None else None
        tell(pair=(source, destination), offered=pair.offered, wrong=wrong, gb_per_s=rate)


class _Pair:
    def __init__(self, torch: Any, source: int, destination: int, number: int, tell: Callable[..., None]) -> None:
        self._torch = torch
        self._numbers = source, destination
        self._here, self._there = torch.device("cuda", source), torch.device("cuda", destination)
        self._seed = number * _BETWEEN_PATTERNS
        self._tell = tell
        self.offered = bool(torch.cuda.can_device_access_peer(source, destination))

    def try_all(self, kernel: Move | None) -> str | None:
        """Return the first way in which bytes did not come, and what came; None where all came."""
        for size in COPIES:  # the first of them lets PyTorch open the other GPU's memory to this one
            if wrong := self._moved("copy", size, lambda sent, arrived: arrived.copy_(sent)):
                return wrong
        if kernel is None or not self.offered:
            return None
        with self._torch.cuda.device(self._here):
            return self._moved("kernel writes", KERNEL_COPY, kernel) or self._moved(
                "kernel reads", KERNEL_COPY, kernel, back=True
            )

    def rate(self) -> float:
        """Return 10^9 bytes a second of the largest copy."""
        size = COPIES[-1]
        self._tell(step=f"timing {words_of(size)}", pair=self._numbers)
        sent, arrived = (self._torch.ones(size, dtype=self._torch.uint8, device=gpu) for gpu in self._ends)
        self._wait()
        seconds = []
        with self._torch.cuda.device(self._here):
            for _ in range(_TIMES):
                begin, end = (self._torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                arrived.copy_(sent)
                end.record()
                end.synchronize()
                seconds.append(begin.elapsed_time(end) / 1000)
        return float(round(size / statistics.median(seconds) / 1e9, 2))

    @property
    def _ends(self) -> tuple[Any, Any]:
        return self._here, self._there

    def _moved(self, way: str, size: int, move: Move, *, back: bool = False) -> str | None:
        """Let `move` fill one tensor from another; `back` is from the second GPU. Say what is wrong with it."""
        way = f"{way} {words_of(size)}"
        self._tell(step=way, pair=self._numbers)
        begin, end = reversed(self._ends) if back else self._ends
        # Made where it is looked at, too: only the move itself goes over the path.
        expected, sent = self._pattern(size, end), self._pattern(size, begin)
        arrived = ~expected
        self._wait()
        move(sent, arrived)
        self._wait()
        wrong = int((arrived != expected).sum().item())
        if wrong == 0:
            return None
        untouched = int((arrived == ~expected).sum().item())
        if untouched * _WORD == size:
            return f"{way}: no byte arrived"
        return f"{way}: {wrong * _WORD:,} of {size:,} bytes are not what was sent"

    def _pattern(self, size: int, device: Any) -> Any:
        """Return words that are all different, and different from pair to pair."""
        words = self._torch.arange(size // _WORD, dtype=self._torch.int32, device=device)
        return words * _MULTIPLIER + self._seed

    def _wait(self) -> None:
        for gpu in self._ends:
            self._torch.cuda.synchronize(gpu)


def _kernel(torch: Any, gpu: int, tell: Callable[..., None]) -> Move | None:
    """Return the kernel, compiled and tried within one GPU; None, and why, where this image cannot compile."""
    try:
        from aerie.fabric import kernel  # noqa: PLC0415 - Triton

        with torch.cuda.device(gpu):
            sent = torch.arange(1000, dtype=torch.int32, device="cuda")
            arrived = torch.zeros_like(sent)
            kernel.copy(sent, arrived)
            torch.cuda.synchronize()
    except Exception as error:  # noqa: BLE001 - Triton raises whatever its compilers do
        tell(no_kernel=" ".join(f"{type(error).__name__}: {error}".split())[:300])
        return None
    return kernel.copy


if __name__ == "__main__":
    main([(source, destination) for source, destination in json.loads(sys.argv[1])], Telling(*map(int, sys.argv[2:])))
