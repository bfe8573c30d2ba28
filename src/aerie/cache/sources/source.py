"""What a place that weights come from can do; each kind is a module beside this one."""

from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from aerie.cache.words import printable


class SourceError(Exception):
    """A source that will not give what is asked for, however often; the message says what to do."""

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))  # it may repeat what a server has said


class TryAgainError(Exception):
    """What may work later: a connection cut, 429, 5xx, a time-out."""

    def __init__(self, message: str, after: float | None = None) -> None:
        super().__init__(printable(message))
        self.after = after
        """Seconds to wait before the next attempt, where the source says so (Retry-After)."""


@dataclass(frozen=True, slots=True)
class Offer:
    """A file that a source has."""

    path: str
    """In the model's directory, with `/`. Not checked yet."""
    size: int
    sha256: str | None = None
    """Where the source knows it: the Hub of what is in LFS or Xet, a published directory by its manifest."""
    git_sha1: str | None = None
    """Of what the Hub keeps in git: SHA-1 of `blob <size>\\0` and the content. None where `sha256` stands."""
    version: str | None = None
    """Changes with the content (ETag, modification time); what was half fetched under another is begun anew."""


@dataclass(frozen=True, slots=True)
class Listing:
    """All that a source offers for one revision."""

    files: tuple[Offer, ...]
    revision: str | None
    """40 hexadecimal digits; None where the source knows no revisions, and the content will name it."""
    chosen: Mapping[str, str] = field(default_factory=dict)
    """See Manifest.chosen."""


class Source(Protocol):
    """One model in one place. Methods are called from several threads at once, `list` first.

    Where the place knows no revisions, `Listing.revision` is None and who asked for one compares the content's.
    """

    description: str
    """As the manifest records it and `fetch` takes it again; no secret in it."""
    options: dict[str, str]
    """What the manifest records besides."""

    def list(self) -> Listing:
        """Return what there is; raises SourceError (missing, gated, no such revision) or TryAgainError."""
        ...

    def read(self, offer: Offer, start: int, end: int) -> Iterator[bytes]:
        """Yield the bytes [start, end) of the file in order, in pieces of 1 MiB at most.

        Raises TryAgainError where the connection breaks or brings another number of bytes, also after some pieces;
        SourceError where the file is gone, has changed, or may not be read.
        """
        ...

    def close(self) -> None:
        """Give up connections."""
        ...


def read(source: Source, offer: Offer, start: int, end: int) -> Generator[bytes, None, None]:
    """Yield a file's bytes [start, end) as `source.read` does; what it did not foresee is told as the source's."""
    try:
        yield from source.read(offer, start, end)
    except OSError as error:
        raise TryAgainError(f"{source.description}/{offer.path}: {error.strerror or error}") from error
