"""What the headers of safetensors files and their index say against one another and against the files' sizes."""

from collections.abc import Iterable
from pathlib import Path

from aerie.checkpoint.files import INDEX, read_weights

WEIGHTS = ".safetensors"
_SHOWN = 5


def odd_headers(path: Path, names: Iterable[str], *, partly: bool) -> list[str]:
    """Return what does not fit in the files at `path`, of these names; none where it has no weights.

    Where only some of a model's files are to be there, it is `partly`, shards may be missing. Raises OSError where the
    directory itself cannot be read.
    """
    if not any(name == INDEX or (name.endswith(WEIGHTS) and "/" not in name) for name in names):
        return []
    return [fault.text for fault in read_weights(path).faults if fault.fatal and not (partly and fault.absent)]


def told(odd: list[str]) -> str:
    """Return the first few of them as one text."""
    more = len(odd) - _SHOWN
    return "; ".join(odd[:_SHOWN]) + (f"; and {more} more" if more > 0 else "")
