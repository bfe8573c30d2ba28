"""What a repair takes from a source: segments of files whose digests are known, each proven as it comes."""

import hashlib
import os
import random
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from aerie.cache.manifest import ADOPTED, File, Manifest, spans
from aerie.cache.meter import Meter, StoppedError
from aerie.cache.pace import Pace
from aerie.cache.sources.opening import open_source
from aerie.cache.sources.source import Offer, Source, TryAgainError, read
from aerie.cache.words import printable

_ATTEMPTS = 6
_LONGEST_PAUSE = 60.0  # seconds
_CONNECTIONS = 4


@dataclass(frozen=True, slots=True)
class Reach:
    """How the source is reached, where it differs from what the manifest says."""

    source: str | None = None
    endpoint: str | None = None
    token_file: Path | None = None
    limit: int | None = None
    """Bytes a second."""


class NotRepairedError(Exception):
    """Why a file stays as it is; the message says what to do."""


def open_for(manifest: Manifest, reach: Reach) -> Source:
    """Return the source of a revision's files; raises NotRepairedError where none is known, SourceError."""
    text = reach.source or manifest.source
    title = f"{manifest.name}@{manifest.revision[:12]}"
    if text == ADOPTED:
        raise NotRepairedError(
            f"{title} was adopted, and no source is recorded: give one that has the same files, `--repair --source "
            "SOURCE`, a copy on another host or disk too; only what its digests prove is taken"
        )
    options = {} if reach.source else manifest.options
    return open_source(
        text,
        revision=manifest.revision,
        endpoint=reach.endpoint or options.get("endpoint"),
        region=options.get("region"),
        token_file=reach.token_file,
        limit=reach.limit,
    )


class Refetch:
    """A source that segments are taken from, in several threads."""

    def __init__(self, source: Source, limit: int | None) -> None:
        self.source = source
        self._stop = threading.Event()
        self._pace = Pace(limit, self._stop)
        self._offers: dict[str, Offer] = {}

    def look(self, files: Sequence[File]) -> None:
        """See whether the source has these files; raises NotRepairedError, SourceError."""
        self._offers = {offer.path: offer for offer in self._listed()}
        for file in files:
            offer = self._offers.get(file.path)
            if offer is None:
                raise NotRepairedError(
                    f"{self.source.description} does not have {file.path}: give another source with --source"
                )
            if offer.size != file.size or (offer.sha256 or file.sha256) != file.sha256:
                raise NotRepairedError(
                    f"{self.source.description} has another {file.path} ({offer.size:,} bytes) than the manifest "
                    f"({file.size:,} bytes): it is not the same revision. Give another source with --source"
                )

    def fetch(self, target: int, file: File, numbers: Sequence[int], meter: Meter) -> None:
        """Write segments of a file to `target`, each proven; raises NotRepairedError, SourceError, OSError.

        What ends it in this thread, Ctrl-C too, ends the others with their next bytes.
        """
        with ThreadPoolExecutor(_CONNECTIONS) as pool:
            try:
                list(pool.map(lambda number: self._segment(target, file, number, meter), numbers))
            except BaseException:
                self._stop.set()
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def _listed(self) -> tuple[Offer, ...]:
        failures = 0
        while True:
            try:
                return self.source.list().files
            except TryAgainError as error:
                failures += 1
                self._pause(error, failures)

    def _segment(self, target: int, file: File, number: int, meter: Meter) -> None:
        start, end = spans(file.size)[number]
        at, failures = start, 0
        segment = hashlib.sha256()
        while at < end:
            try:
                for piece in read(self.source, self._offers[file.path], at, end):
                    self._pace.take(len(piece))
                    if self._stop.is_set():
                        raise StoppedError
                    _write(target, piece, at)
                    segment.update(piece)
                    at += len(piece)
                    failures = 0
                    meter.count(len(piece))
            except TryAgainError as error:
                failures += 1
                self._pause(error, failures)
        if segment.hexdigest() != file.segments[number]:
            raise NotRepairedError(
                f"{self.source.description} has another content in segment {number} of {file.path}: "
                f"{segment.hexdigest()}, expected {file.segments[number]}. Give another source with --source"
            )

    def _pause(self, error: TryAgainError, failures: int) -> None:
        if failures >= _ATTEMPTS:
            raise NotRepairedError(f"{error}. Given up after {failures} attempts: try again later") from None
        pause = min(error.after or 2.0**failures * random.uniform(0.5, 1.0), _LONGEST_PAUSE)  # noqa: S311
        print(printable(f"aerie model verify: {error}; again in {pause:.0f} s"), file=sys.stderr, flush=True)
        if self._stop.wait(pause):
            raise StoppedError


def _write(target: int, piece: bytes, at: int) -> None:
    view = memoryview(piece)
    while view:
        count = os.pwrite(target, view, at)
        view = view[count:]
        at += count
