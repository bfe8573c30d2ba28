"""How a fetch ended well, for programs and in words."""

from dataclasses import dataclass

from aerie.cache.progress import amount


@dataclass(frozen=True, slots=True)
class Result:
    """How it ended well."""

    name: str
    revision: str
    path: str
    files: int
    bytes: int
    fetched_bytes: int
    """That came from the source in this run."""
    seconds: float
    state: str
    """`published`, `there already`, or `not fetched` of a dry run."""
    current: bool
    """Whether `current` is this revision."""
    odd: tuple[str, ...] = ()
    """What its weights say against themselves, though they are as the source has them."""


def in_words(result: Result) -> str:
    """Return it as one line."""
    named = f"{result.name}@{result.revision}" if result.revision else result.name
    what = f"{named}: {result.files} files, {amount(result.bytes)}"
    if result.state == "not fetched":
        return f"{what}, of which {amount(result.fetched_bytes)} would be fetched"
    where = f"{result.path}{', which is current' if result.current else ''}"
    if not result.fetched_bytes:
        return f"{what}, {result.state} in {where}; nothing was fetched"
    rate = amount(result.fetched_bytes / max(result.seconds, 0.001))
    whole = "as the source has it" if result.odd else "whole"
    return f"{what}, {whole}, in {where}; {amount(result.fetched_bytes)} fetched in {result.seconds:.0f} s ({rate}/s)"
