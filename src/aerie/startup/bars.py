"""The progress bars of vLLM's loaders and of its graph capturing. One rank of all draws them."""

import re
from typing import NamedTuple

# `Loading safetensors checkpoint shards:  33% Completed | 2/6 [00:01<00:02, 2it/s]`: every loader that draws a bar
# (vllm/model_executor/model_loader/weight_utils.py, _BAR_FORMAT; fastsafetensors has the same). InstantTensor counts
# bytes (`12.3G/445G`), the Run:ai streamer tensors, the others files.
_LOADING = re.compile(
    r"((?:Loading|Multi-thread loading) [\w .()-]{1,80}): {1,3}\d{1,3}% Completed"
    r" \| ([\d.]{1,12}[kKMGTP]?)/([\d.]{1,12}[kKMGTP]?) \["
)
# `Capturing CUDA graphs (decode, FULL):  39%|███▉      | 20/51 [00:00<00:00, 192.49it/s]`
_CAPTURING = re.compile(r"(Capturing [\w ,()-]{1,80}): {1,3}\d{1,3}%\|[^|]{0,300}\| (\d{1,9})/(\d{1,9}) \[")
# Logged by each rank, for its own share of the files.
_PREFETCHING = re.compile(r"Prefetching checkpoint files: (\d{1,3})% \(\d+/\d+\)")

_SCALE = {"": 1.0, "k": 1024.0, "K": 1024.0, "M": 1024.0**2, "G": 1024.0**3, "T": 1024.0**4, "P": 1024.0**5}


class Bar(NamedTuple):
    """A bar as one line shows it."""

    what: str
    done: str
    total: str
    loads: bool
    """Weights; else it captures graphs."""

    @property
    def fraction(self) -> float:
        """How much of it is done, 0 to 1."""
        return min(1.0, _number(self.done) / _number(self.total))

    @property
    def step(self) -> float:
        """How much its next move will add, where it counts things; 0 where it counts bytes."""
        return 1 / _number(self.total) if self.total.isdigit() else 0.0

    def __str__(self) -> str:
        counted = f"{self.done} of {self.total}"
        if not self.loads:
            return f"{self.what.removeprefix('Capturing ')}: {counted}"
        if not self.total.isdigit():
            return f"{counted}B"
        return f"{counted} {'tensors' if 'Streamer' in self.what else 'shards'}"


def bar_in(text: str) -> Bar | None:
    """Return the bar that a line shows."""
    if "%" not in text:
        return None
    for pattern, loads in ((_LOADING, True), (_CAPTURING, False)):
        if (found := pattern.search(text)) and _number(found[3]) > 0:
            return Bar(found[1], found[2], found[3], loads)
    return None


def prefetched_in(text: str) -> int | None:
    """Return how much of its files a rank has brought into the page cache, in percent."""
    found = _PREFETCHING.search(text) if "Prefetching" in text else None
    return int(found[1]) if found else None


def _number(text: str) -> float:
    digits = text.rstrip("kKMGTP")
    try:
        return float(digits) * _SCALE[text[len(digits) :]]
    except ValueError:  # such as 1.2.3: no bar of ours
        return 0.0
