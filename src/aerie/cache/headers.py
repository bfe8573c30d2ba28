"""What the headers of safetensors files and their index say against one another and against the files' sizes."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from aerie.checkpoint.files import INDEX, Fault, read_weights

WEIGHTS = ".safetensors"
_SHOWN = 5


def odd_headers(path: Path, names: Iterable[str], *, partly: bool) -> list[Fault]:
    """Return what does not fit in the files at `path`, of these names; none where it has no weights.

    Only those of the directory itself, which vLLM reads, are looked at, not those of folders in it.

    Where only some of a model's files are to be there, it is `partly`, shards may be missing. Raises OSError where the
    directory itself cannot be read.
    """
    if not any(name == INDEX or (name.endswith(WEIGHTS) and "/" not in name) for name in names):
        return []
    return [fault for fault in read_weights(path).faults if fault.fatal and not (partly and fault.absent)]


def is_incomplete(odd: Sequence[Fault]) -> bool:
    """Return whether a file is cut off or a shard is missing: the rest may be as its authors want it."""
    return any(fault.broken or fault.absent for fault in odd)


def told(odd: Sequence[Fault]) -> str:
    """Return the first few of them as one text."""
    more = len(odd) - _SHOWN
    return "; ".join(fault.text for fault in odd[:_SHOWN]) + (f"; and {more} more" if more > 0 else "")
