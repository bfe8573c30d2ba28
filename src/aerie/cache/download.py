"""Fetches the files of a listing into a directory, in segments over several connections, and proves each of them.

Whatever ends it, a kill and a crash of the machine too, the same call goes on where it was; see ledger.py.
"""

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from aerie.cache import hashing
from aerie.cache.held import Held
from aerie.cache.ledger import Identity, Ledger, boot_id
from aerie.cache.manifest import SEGMENT, File
from aerie.cache.pace import Pace
from aerie.cache.patience import Patience, StoppedError
from aerie.cache.sources.source import Offer, Source, SourceError, TryAgainError, read
from aerie.cache.staging import Staging, disk_error, write_all
from aerie.cache.tally import Tally

_SYNC_BYTES = 256 * 2**20
_SYNC_SECONDS = 5.0
_FLUSH_SECONDS = 0.25
_MOST_DIRTY = 2**30
"""Bytes that may be unsynchronised; then it is the disk's turn."""
_HASHERS = 16
"""Files that are hashed at once, at most."""
_JOIN_SECONDS = 3.0

_log = logging.getLogger("aerie")
_T = TypeVar("_T")


@dataclass(slots=True)
class _Fetched:
    """A file under way. `lock` of the download guards it."""

    number: int
    offer: Offer
    missing: set[int]
    """Segments, by the ledger's numbers, that are not complete."""
    descriptor: int | None = None
    dirty: bool = False
    generation: int = 0
    """1 once it was wrong, and is fetched a second time."""
    result: File | None = None


@dataclass(slots=True)
class _State:
    segments: deque[tuple[_Fetched, int]] = field(default_factory=deque)
    to_prove: deque[_Fetched] = field(default_factory=deque)
    left: int = 0
    """Files that are not proven."""
    dirty: int = 0
    writing: int = 0
    """Threads that write at this moment."""
    closed: bool = False
    """Whether nobody may write any more."""
    failure: BaseException | None = None


class Download:
    """One fetch into `staging`, a directory in which `files` and the ledger are. Nobody else may work there."""

    def __init__(
        self,
        source: Source,
        offers: Sequence[Offer],
        staging: Path,
        tally: Tally,
        *,
        connections: int = 8,
        limit: float | None = None,
        donors: Mapping[str, Path] | None = None,
    ) -> None:
        """Look at what is there. `donors` are files on the same file system, by the SHA-256 that they should have.

        What does not belong into the staging is removed from it. Raises DiskError.
        """
        self._source = source
        self._offers = tuple(offers)
        self._tally = tally
        self._connections = connections
        self._donors = donors or {}
        self._stop = threading.Event()
        self._ended = threading.Event()
        self._changed = threading.Condition()
        self._pace = Pace(limit, self._stop)
        self._patience = Patience(self._stop)
        self._held: set[Held] = set()
        self._lost: set[int] = set()
        """Files that could not be synchronised: what is in the page cache of them may never come to the disk."""
        self._state = _State()
        self._threads: list[threading.Thread] = []
        try:
            self._ledger = Ledger(staging / "ledger", self._offers, boot_id())
            self._staging = Staging(staging / "files", (offer.path for offer in self._offers))
            found = self._staging.found
            self._files = [self._resumed(number, found.get(offer.path)) for number, offer in enumerate(self._offers)]
        except OSError as error:
            raise disk_error(error, staging) from None
        if self._ledger.damaged:
            _log.warning("%s was no ledger and is now ledger.damaged: its files are fetched anew", staging / "ledger")
        self.there = sum(self._ledger.file_written(number) for number in range(len(self._offers)))
        """Bytes that need not be fetched, by the ledger."""

    @property
    def to_fetch(self) -> int:
        """Bytes that are to come from the source."""
        return sum(offer.size for offer in self._offers) - self.there

    def run(self, tick: Callable[[], None], every: float = 0.25) -> tuple[File, ...]:
        """Fetch and prove all; `tick` is called in between, by the caller's thread. Files are in the listing's order.

        Raises SourceError, GaveUpError, DiskError; whatever it raises, what is there is on the disk then, as far as the
        disk takes it, and no thread of it writes any more.
        """
        for file in self._files:
            if file.result is None:
                self._state.left += 1
                self._queue(file)
        if not self._state.left:
            self._ended.set()
        names = {
            "fetch": (self._work, self._connections),
            "prove": (self._prove_all, _hashers()),
            "sync": (self._sync_all, 1),
            "flush": (self._flush_all, 1),
        }
        for name, (target, count) in names.items():
            for number in range(count):
                # A daemon: one that waits for a dead connection must not keep the process.
                thread = threading.Thread(target=self._guarded, args=(target,), name=f"{name}-{number}", daemon=True)
                self._threads.append(thread)
                thread.start()
        try:
            while not self._ended.wait(every):
                tick()
        finally:
            self._finish()
        if self._state.failure is not None:
            raise self._state.failure
        return tuple(file.result for file in self._files if file.result is not None)

    def _finish(self) -> None:
        self._stop.set()
        with self._changed:
            self._changed.notify_all()
        until = time.monotonic() + _JOIN_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        with self._changed:
            # Those that are still waiting for bytes will not write them, and who is writing is waited for.
            self._state.closed = True
            self._changed.wait_for(lambda: not self._state.writing, _JOIN_SECONDS)
        with suppress(OSError):  # the failure that ended it says more
            self._sync()
        with suppress(OSError):
            for number in self._lost:
                self._ledger.distrust(number)
        if not any(thread.is_alive() for thread in self._threads):
            for file in self._files:
                self._close(file)
            self._ledger.close()
            self._staging.close()

    # --- What is there ------------------------------------------------------------------------------------------------

    def _resumed(self, number: int, status: os.stat_result | None) -> _Fetched:
        """Return the file as it is to be gone on with."""
        offer = self._offers[number]
        written = self._ledger.file_written(number)
        file = _Fetched(number, offer, set())
        if status is not None:
            foreign = status.st_nlink > 1 and written < offer.size  # a link: never written to
            if status.st_size != offer.size or foreign or (offer.size and not written):
                self._staging.remove(offer.path)
                status = None
            else:
                file.result = self._ledger.verified(number, status)
        if status is None and written:
            self._ledger.forget(number)
        if status is None:
            self._take_from_donor(file)
        file.missing = {
            index for index in self._ledger.segments(number) if self._ledger.written(index) < self._length(file, index)
        }
        return file

    def _take_from_donor(self, file: _Fetched) -> None:
        donor = self._donors.get(file.offer.sha256 or "")
        if donor is None or not file.offer.size:
            return
        with suppress(OSError):
            if self._staging.take(file.offer.path, donor, file.offer.size):
                for index in self._ledger.segments(file.number):
                    self._ledger.note_written(index, self._length(file, index))

    def _queue(self, file: _Fetched) -> None:
        if file.missing:
            self._state.segments.extend((file, index) for index in sorted(file.missing))
        else:
            self._state.to_prove.append(file)

    def _length(self, file: _Fetched, index: int) -> int:
        return min(SEGMENT, file.offer.size - self._offset(file, index))

    def _offset(self, file: _Fetched, index: int) -> int:
        return (index - self._ledger.first[file.number]) * SEGMENT

    # --- The files ----------------------------------------------------------------------------------------------------

    def _open(self, file: _Fetched) -> int:
        """Return the file's descriptor; it is made where it is not there."""
        with self._changed:
            if file.descriptor is None:
                file.descriptor = self._staging.open(file.offer.path, file.offer.size)
            return file.descriptor

    def _close(self, file: _Fetched) -> None:
        with self._changed:
            if file.descriptor is not None:
                os.close(file.descriptor)
                file.descriptor = None

    # --- The threads --------------------------------------------------------------------------------------------------

    def _guarded(self, target: Callable[[], None]) -> None:
        try:
            target()
        except StoppedError:
            pass
        except BaseException as error:  # noqa: BLE001 - whatever it is, run() raises it
            self._fail(disk_error(error, self._staging.root) if isinstance(error, OSError) else error)

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            if self._state.failure is None and not self._stop.is_set():
                self._state.failure = error
            self._stop.set()
            self._ended.set()
            self._changed.notify_all()

    def _take(self, queue: deque[_T]) -> _T:
        """Return the next of a queue; raises StoppedError where there will be none."""
        with self._changed:
            while not self._stop.is_set() and self._state.left:
                if queue:
                    return queue.popleft()
                self._changed.wait()
        raise StoppedError

    def _work(self) -> None:
        while True:
            file, index = self._take(self._state.segments)
            self._fetch(file, index)
            with self._changed:
                file.missing.discard(index)
                if not file.missing:
                    self._state.to_prove.append(file)
                    self._changed.notify_all()

    def _fetch(self, file: _Fetched, index: int) -> None:
        """Bring a segment in."""
        failures = 0
        while (before := self._ledger.written(index)) < self._length(file, index):
            self._patience.wait_for_leave()
            try:
                self._read(file, index)
                if self._ledger.written(index) < self._length(file, index):
                    raise TryAgainError(f"{file.offer.path}: the source ended too early")  # noqa: TRY301
            except TryAgainError as error:
                failures = 1 if self._ledger.written(index) > before else failures + 1
                pause = self._patience.failed(file.offer.path, error, failures)
                self._tally.trouble(f"{error}; again in {pause:.0f} s")
                self._patience.pause(error, pause)

    def _read(self, file: _Fetched, index: int) -> None:
        """Read on in a segment until it is complete; what comes before an error is kept. Raises TryAgainError."""
        start = self._offset(file, index)
        at, end = start + self._ledger.written(index), start + self._length(file, index)
        with self._holding(file, index) as held, closing(read(self._source, file.offer, at, end)) as pieces:
            for whole in pieces:
                if self._stop.is_set():
                    raise StoppedError
                piece = whole[: end - at] if len(whole) > end - at else whole
                at += len(piece)
                held.add(piece)
                self._pace.take(len(piece))

    @contextmanager
    def _holding(self, file: _Fetched, index: int) -> Iterator[Held]:
        held = Held(lambda pieces: self._write(file, index, pieces))
        with self._changed:
            self._held.add(held)
        try:
            yield held
        finally:
            with self._changed:
                self._held.discard(held)
            held.flush()

    def _flush_all(self) -> None:
        """Write what came over connections that bring nothing more for a while."""
        while not self._stop.wait(_FLUSH_SECONDS) and self._state.left:
            with self._changed:
                held = tuple(self._held)
            for each in held:
                each.flush_old()

    def _write(self, file: _Fetched, index: int, pieces: Sequence[bytes]) -> None:
        size = sum(map(len, pieces))
        with self._changed:
            if self._state.closed:
                raise StoppedError
            self._state.writing += 1
        try:
            descriptor = file.descriptor if file.descriptor is not None else self._open(file)
            done = self._ledger.written(index)
            write_all(descriptor, pieces, self._offset(file, index) + done)
            self._ledger.note_written(index, done + size)
        finally:
            with self._changed:
                self._state.writing -= 1
                file.dirty = True
                self._state.dirty += size
                if self._state.closed or self._state.dirty >= _SYNC_BYTES:
                    self._changed.notify_all()
        self._tally.arrived(size)
        with self._changed:
            while self._state.dirty > _MOST_DIRTY and not self._stop.is_set():
                self._changed.wait()

    def _prove_all(self) -> None:
        while True:
            self._prove(self._take(self._state.to_prove))

    def _prove(self, file: _Fetched) -> None:
        offer = file.offer
        descriptor = self._open_to_prove(file)
        try:
            before = Identity.of(os.fstat(descriptor))
            sha256, segments = hashing.digest(descriptor, offer.size, self._hashed)
            wrong = None
            if offer.sha256 is not None and sha256 != offer.sha256:
                wrong = f"SHA-256 {offer.sha256}", sha256
            elif offer.git_sha1 is not None:
                found = hashing.git_sha1(descriptor, offer.size)
                wrong = None if found == offer.git_sha1 else (f"git's SHA-1 {offer.git_sha1}", found)
            if wrong is None:
                self._synchronise(file, os.fsync, descriptor)
                after = os.fstat(descriptor)
                if before.mtime_ns != after.st_mtime_ns or before.size != after.st_size:
                    wrong = "nobody else to write to it", "somebody did"
        finally:
            os.close(descriptor)
        if wrong is not None:
            self._again(file, *wrong)
            return
        self._close(file)
        self._ledger.note_durable(file.number, self._ledger.counts(file.number))
        self._ledger.note_verified(file.number, Identity.of(after), sha256, segments)
        file.result = File(offer.path, offer.size, sha256, segments)
        self._tally.proven(offer.path)
        with self._changed:
            file.dirty = False
            self._state.left -= 1
            if not self._state.left:
                self._ended.set()
                self._changed.notify_all()

    def _open_to_prove(self, file: _Fetched) -> int:
        if not file.offer.size:
            self._open(file)  # an empty one is made here
        # Anew, since one that is a link may be read only.
        return self._staging.open_to_read(file.offer.path)

    def _hashed(self, count: int) -> None:
        if self._stop.is_set():
            raise StoppedError
        self._tally.hashed(count)

    def _again(self, file: _Fetched, expected: str, found: str) -> None:
        """Begin a file anew that is wrong; a second time raises SourceError."""
        self._close(file)
        anew = file.generation == 0
        with self._changed:
            file.generation += 1
            self._ledger.forget(file.number)
            self._ledger.sync()  # before another file has this name: none of it is to be taken for durable
            self._staging.remove(file.offer.path)
            file.dirty = False
        message = f"{file.offer.path} has the right size and wrong content: expected {expected}, found {found}"
        if not anew:
            raise SourceError(
                f"{message}, twice. What the source sends is not what it announces: try again later, or take another "
                "source"
            )
        _log.warning("%s; it is fetched anew", message)
        self._tally.dropped(file.offer.size)
        with self._changed:
            file.missing = set(self._ledger.segments(file.number))
            self._queue(file)
            self._changed.notify_all()

    def _sync_all(self) -> None:
        last = time.monotonic()
        while not self._stop.is_set():
            with self._changed:
                while not self._stop.is_set() and self._state.left and self._state.dirty < _SYNC_BYTES:
                    if (left := last + _SYNC_SECONDS - time.monotonic()) <= 0:
                        break
                    self._changed.wait(left)
                if not self._state.left:
                    return
            self._sync()
            last = time.monotonic()

    def _sync(self) -> None:
        """Bring what is written to the disk, and let the ledger say so."""
        with self._changed:
            files = [
                (file, os.dup(file.descriptor), file.generation, self._ledger.counts(file.number))
                for file in self._files
                if file.dirty and file.descriptor is not None
            ]
            written = self._state.dirty
            for file, *_ in files:
                file.dirty = False
        try:
            for file, descriptor, generation, counts in files:
                self._synchronise(file, os.fdatasync, descriptor)
                with self._changed:
                    if file.generation == generation:  # else it is another file that has this name by now
                        self._ledger.note_durable(file.number, counts)
            self._ledger.sync()
        finally:
            for _, descriptor, *_ in files:
                os.close(descriptor)
        with self._changed:
            self._state.dirty -= written
            self._changed.notify_all()

    def _synchronise(self, file: _Fetched, call: Callable[[int], None], descriptor: int) -> None:
        try:
            call(descriptor)
        except OSError:
            self._lost.add(file.number)
            raise


def _hashers() -> int:
    return min(_HASHERS, len(os.sched_getaffinity(0)))
