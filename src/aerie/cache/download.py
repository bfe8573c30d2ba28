"""Fetches the files of a listing into a directory, in segments over several connections, and proves each of them.

Whatever ends it, a kill and a crash of the machine too, the same call goes on where it was; see ledger.py.
"""

import errno
import fcntl
import logging
import os
import random
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeVar

from aerie.cache import hashing
from aerie.cache.inside import directory, open_inside, walk
from aerie.cache.ledger import Identity, Ledger, boot_id
from aerie.cache.manifest import SEGMENT, File
from aerie.cache.sources.source import Offer, Source, SourceError, TryAgainError

ATTEMPTS = 10
"""Attempts without a byte in between, then it is given up: about five minutes."""
FIRST_PAUSE = 1.0
"""Seconds before the second attempt; each further pause is twice as long, but LONGEST_PAUSE at most."""
LONGEST_PAUSE = 60.0
LONGEST_RETRY_AFTER = 900.0
"""Seconds for which a source may let us wait."""
_FLUSH_BYTES = 256 * 1024
_FLUSH_SECONDS = 0.05
_SYNC_BYTES = 256 * 2**20
_SYNC_SECONDS = 5.0
_MOST_DIRTY = 2**30
"""Bytes that may be unsynchronised; then it is the disk's turn."""
_HASHERS = 16
"""Files that are hashed at once, at most."""
_JOIN_SECONDS = 3.0
_BURST = 0.1  # seconds in which less came may be made up for
_FICLONE = 0x40049409  # linux/fs.h
_CLONE_REFUSED = {errno.EOPNOTSUPP, errno.ENOTTY, errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EPERM, errno.EBADF}

_log = logging.getLogger("aerie")
_T = TypeVar("_T")


class DiskError(Exception):
    """The disk does not take what is fetched; the message says which error, and where."""


class GaveUpError(Exception):
    """The source did not answer well for so long that it was given up; the message says what it did last."""


class _StoppedError(Exception):
    """Another thread has failed, or the user wants it."""


class Tally(Protocol):
    """Who is told how far it is, from several threads."""

    def arrived(self, count: int) -> None:
        """So many bytes came from the source."""
        ...

    def dropped(self, count: int) -> None:
        """So many bytes that were there are fetched anew."""
        ...

    def hashed(self, count: int) -> None:
        """So many bytes were read again and hashed."""
        ...

    def proven(self, path: str) -> None:
        """Hear that a file is whole and right."""
        ...

    def trouble(self, message: str) -> None:
        """Something is tried again."""
        ...


class Pace:
    """A limit on bytes a second, over all who take part."""

    def __init__(self, limit: float | None, stop: threading.Event) -> None:
        self._limit = limit
        self._stop = stop
        self._lock = threading.Lock()
        self._due = 0.0

    def take(self, count: int) -> None:
        """Wait until these bytes may have been read."""
        if self._limit is None:
            return
        with self._lock:
            now = time.monotonic()
            self._due = max(self._due, now - _BURST) + count / self._limit
            due = self._due
        self._stop.wait(max(0.0, due - now))


@dataclass(slots=True)
class _Fetched:
    """A file under way. `lock` of the download guards it."""

    number: int
    offer: Offer
    missing: set[int]
    """Segments, by the ledger's numbers, that are not complete."""
    descriptor: int | None = None
    dirty: bool = False
    anew: bool = False
    """It was wrong once, and is fetched a second time."""
    result: File | None = None


@dataclass(slots=True)
class _State:
    segments: deque[tuple[_Fetched, int]] = field(default_factory=deque)
    to_prove: deque[_Fetched] = field(default_factory=deque)
    left: int = 0
    """Files that are not proven."""
    dirty: int = 0
    not_before: float = 0.0
    """Monotonic time before which the source is left alone."""
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
        self._root = staging / "files"
        self._tally = tally
        self._connections = connections
        self._donors = donors or {}
        self._stop = threading.Event()
        self._ended = threading.Event()
        self._changed = threading.Condition()
        self._pace = Pace(limit, self._stop)
        self._state = _State()
        self._threads: list[threading.Thread] = []
        try:
            self._ledger = Ledger(staging / "ledger", self._offers, boot_id())
            self._directory = os.open(self._root, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            found = _sweep(self._root, {offer.path for offer in self._offers})
            self._files = [self._resumed(number, found.get(offer.path)) for number, offer in enumerate(self._offers)]
        except OSError as error:
            raise _disk_error(error, staging) from None
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
        with suppress(OSError):  # the failure that ended it says more
            self._sync()
        # Those that are still waiting for bytes will not write them, but they hold their descriptors.
        if not any(thread.is_alive() for thread in self._threads):
            for file in self._files:
                self._close(file)
            self._ledger.close()
            os.close(self._directory)

    # --- What is there ------------------------------------------------------------------------------------------------

    def _resumed(self, number: int, status: os.stat_result | None) -> _Fetched:
        """Return the file as it is to be gone on with."""
        offer = self._offers[number]
        written = self._ledger.file_written(number)
        file = _Fetched(number, offer, set())
        if status is not None:
            foreign = status.st_nlink > 1 and written < offer.size  # a link: never written to
            if status.st_size != offer.size or foreign or (offer.size and not written):
                self._remove(offer.path)
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
            self._make_parents(file.offer.path)
            target = self._root / file.offer.path
            if _clone(donor, target, file.offer.size):
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
                self._make_parents(file.offer.path)
                descriptor = open_inside(self._directory, file.offer.path, os.O_RDWR | os.O_CREAT)
                try:
                    if os.fstat(descriptor).st_size != file.offer.size:
                        os.ftruncate(descriptor, file.offer.size)
                except OSError:
                    os.close(descriptor)
                    raise
                file.descriptor = descriptor
            return file.descriptor

    def _close(self, file: _Fetched) -> None:
        with self._changed:
            if file.descriptor is not None:
                os.close(file.descriptor)
                file.descriptor = None

    def _make_parents(self, path: str) -> None:
        parts = path.split("/")
        for depth in range(1, len(parts)):
            with suppress(FileExistsError):
                os.mkdir("/".join(parts[:depth]), 0o700, dir_fd=self._directory)

    def _remove(self, path: str) -> None:
        with suppress(FileNotFoundError):
            os.unlink(path, dir_fd=self._directory)

    # --- The threads --------------------------------------------------------------------------------------------------

    def _guarded(self, target: Callable[[], None]) -> None:
        try:
            target()
        except _StoppedError:
            pass
        except BaseException as error:  # noqa: BLE001 - whatever it is, run() raises it
            self._fail(_disk_error(error, self._root) if isinstance(error, OSError) else error)

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            if self._state.failure is None and not self._stop.is_set():
                self._state.failure = error
            self._stop.set()
            self._ended.set()
            self._changed.notify_all()

    def _take(self, queue: deque[_T]) -> _T:
        """Return the next of a queue; raises _StoppedError where there will be none."""
        with self._changed:
            while not self._stop.is_set() and self._state.left:
                if queue:
                    return queue.popleft()
                self._changed.wait()
        raise _StoppedError

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
            self._wait_for_leave()
            try:
                self._read(file, index)
                if self._ledger.written(index) < self._length(file, index):
                    raise TryAgainError(f"{file.offer.path}: the source ended too early")  # noqa: TRY301
            except TryAgainError as error:
                failures = 1 if self._ledger.written(index) > before else failures + 1
                self._pause(file, error, failures)

    def _pause(self, file: _Fetched, error: TryAgainError, failures: int) -> None:
        if self._stop.is_set():
            raise _StoppedError
        if failures >= ATTEMPTS:
            raise GaveUpError(f"{file.offer.path}: {ATTEMPTS} attempts brought nothing; the last one: {error}")
        pause = min(FIRST_PAUSE * 2 ** (failures - 1), LONGEST_PAUSE) * random.uniform(0.75, 1.25)  # noqa: S311
        if error.after is not None:
            if error.after > LONGEST_RETRY_AFTER:
                raise GaveUpError(f"{error}; it wants to be left alone for {error.after:.0f} s: run fetch again then")
            # It speaks of all connections.
            pause = max(error.after, 0.0)
            with self._changed:
                self._state.not_before = max(self._state.not_before, time.monotonic() + pause)
        self._tally.trouble(f"{error}; again in {pause:.0f} s")
        if self._stop.wait(pause):
            raise _StoppedError

    def _wait_for_leave(self) -> None:
        while (left := self._state.not_before - time.monotonic()) > 0:
            if self._stop.wait(left):
                raise _StoppedError
        if self._stop.is_set():
            raise _StoppedError

    def _read(self, file: _Fetched, index: int) -> None:
        """Read on in a segment until it is complete; what comes before an error is kept. Raises TryAgainError."""
        offset = self._offset(file, index)
        done = self._ledger.written(index)
        left = self._length(file, index) - done
        pieces: list[bytes] = []
        held = 0
        last = time.monotonic()
        try:
            with closing(_generator(self._source.read(file.offer, offset + done, offset + done + left))) as stream:
                for whole in stream:
                    if self._stop.is_set():
                        raise _StoppedError
                    piece = whole[: left - held] if len(whole) > left - held else whole
                    pieces.append(piece)
                    held += len(piece)
                    self._pace.take(len(piece))
                    now = time.monotonic()
                    if held >= _FLUSH_BYTES or now - last > _FLUSH_SECONDS:
                        self._write(file, index, pieces, held)
                        left -= held
                        pieces, held, last = [], 0, now
        finally:
            if pieces:
                self._write(file, index, pieces, held)

    def _write(self, file: _Fetched, index: int, pieces: Sequence[bytes], size: int) -> None:
        descriptor = file.descriptor if file.descriptor is not None else self._open(file)
        done = self._ledger.written(index)
        _pwrite_all(descriptor, pieces, size, self._offset(file, index) + done)
        self._ledger.note_written(index, done + size)
        self._tally.arrived(size)
        with self._changed:
            file.dirty = True
            self._state.dirty += size
            if self._state.dirty >= _SYNC_BYTES:
                self._changed.notify_all()
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
                os.fsync(descriptor)
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
        return open_inside(self._directory, file.offer.path)

    def _hashed(self, count: int) -> None:
        if self._stop.is_set():
            raise _StoppedError
        self._tally.hashed(count)

    def _again(self, file: _Fetched, expected: str, found: str) -> None:
        """Begin a file anew that is wrong; a second time raises SourceError."""
        self._close(file)
        with self._changed:
            self._ledger.forget(file.number)
            self._remove(file.offer.path)
            file.dirty = False
        message = f"{file.offer.path} has the right size and wrong content: expected {expected}, found {found}"
        if file.anew:
            raise SourceError(
                f"{message}, twice. What the source sends is not what it announces: try again later, or take another "
                "source"
            )
        _log.warning("%s; it is fetched anew", message)
        self._tally.dropped(file.offer.size)
        with self._changed:
            file.anew = True
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
                (file, os.dup(file.descriptor)) for file in self._files if file.dirty and file.descriptor is not None
            ]
            counts = [self._ledger.counts(file.number) for file, _ in files]
            written = self._state.dirty
            for file, _ in files:
                file.dirty = False
        try:
            for (file, descriptor), count in zip(files, counts, strict=True):
                os.fdatasync(descriptor)
                with self._changed:
                    self._ledger.note_durable(file.number, count)
            self._ledger.sync()
        finally:
            for _, descriptor in files:
                os.close(descriptor)
        with self._changed:
            self._state.dirty -= written
            self._changed.notify_all()


def _generator(pieces: Iterable[bytes]) -> Generator[bytes, None, None]:
    """Return something with a `close`, which ends what it reads from."""
    yield from pieces


def _hashers() -> int:
    return min(_HASHERS, len(os.sched_getaffinity(0)))


def _pwrite_all(descriptor: int, pieces: Sequence[bytes], size: int, offset: int) -> None:
    """Write all of it; raises OSError."""
    written = os.pwritev(descriptor, pieces, offset) if len(pieces) <= 1024 else 0  # noqa: PLR2004 - IOV_MAX
    if written == size:
        return
    rest = memoryview(b"".join(pieces))[written:]
    while rest:
        count = os.pwrite(descriptor, rest, offset + written)
        written += count
        rest = rest[count:]


def _sweep(root: Path, expected: set[str]) -> dict[str, os.stat_result]:
    """Return the status of the regular files below `root` that are expected; remove all else. Raises OSError."""
    folders = {
        "/".join(parts[:depth]) for parts in (path.split("/") for path in expected) for depth in range(1, len(parts))
    }
    found: dict[str, os.stat_result] = {}
    unwanted: list[tuple[str, bool]] = []
    with directory(root) as descriptor:
        for entry in walk(descriptor):
            if entry.error is not None:
                raise entry.error
            is_folder = stat.S_ISDIR(entry.status.st_mode)
            if is_folder and entry.path in folders:
                continue
            if stat.S_ISREG(entry.status.st_mode) and entry.path in expected:
                found[entry.path] = entry.status
            else:
                unwanted.append((entry.path, is_folder))
        for path, is_folder in reversed(unwanted):  # what is in a directory before it
            _log.warning("%s does not belong to what is fetched, and is removed", root / path)
            if is_folder:
                os.rmdir(path, dir_fd=descriptor)
            else:
                os.unlink(path, dir_fd=descriptor)
    return found


def _clone(donor: Path, target: Path, size: int) -> bool:
    """Let `target` have the donor's content without a copy: by shared blocks, or as a link. Raises OSError."""
    source = os.open(donor, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        status = os.fstat(source)
        if not stat.S_ISREG(status.st_mode) or status.st_size != size:
            return False
        copy = os.open(target, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.ioctl(copy, _FICLONE, source)
        except OSError as error:
            target.unlink()
            if error.errno not in _CLONE_REFUSED:
                raise
        else:
            return True
        finally:
            os.close(copy)
        os.link(donor, target, follow_symlinks=False)
    finally:
        os.close(source)
    return True


def _disk_error(error: OSError, place: Path) -> DiskError:
    words = {
        errno.ENOSPC: "the disk is full",
        errno.EDQUOT: "the quota is used up",
        errno.EROFS: "the file system is read-only",
        errno.EIO: "the disk fails (input/output error): see the kernel's log",
        errno.EACCES: "no permission to write there",
        errno.EPERM: "no permission to write there",
        errno.EFBIG: "the file system, or a limit (ulimit -f), takes no file so large",
        errno.EMFILE: "too many open files: raise the limit (ulimit -n)",
    }
    where = error.filename if isinstance(error.filename, str) and error.filename.startswith("/") else str(place)
    return DiskError(f"{where}: {words.get(error.errno or 0) or error.strerror or error}")
