"""SHA-256 of files: one file as it is fetched, or segments of many on all cores.

Files are read through the page cache, with the kernel's own read-ahead: it takes less of a core than reading past the
cache does, and finds what a running service has read already. What was not in the cache before is dropped from it
after its segment: to verify 595 GB throws nothing out that the service needs, and warms nothing.
"""

import hashlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from aerie.cache.inside import open_inside
from aerie.cache.manifest import File, spans
from aerie.cache.residency import Residency

_PIECE = 2**20  # bytes a read: it stays in a core's cache until it is hashed


class ShortFileError(Exception):
    """A file ended before the bytes that were to be hashed; the message says where."""


class Task(NamedTuple):
    """A file, and the numbers of its segments that are to be compared."""

    file: File
    segments: Sequence[int]


@dataclass(slots=True)
class Found:
    """What was found of a file: the numbers of segments with other content, and of those that cannot be read."""

    wrong: list[int] = field(default_factory=list)
    unreadable: list[int] = field(default_factory=list)
    error: str = ""
    """Why some cannot be read."""


def _nothing(_count: int) -> None:
    pass


def digest(descriptor: int, size: int, on_bytes: Callable[[int], None] = _nothing) -> tuple[str, tuple[str, ...]]:
    """Return the SHA-256 of the file's first `size` bytes, and those of their segments, in hexadecimal.

    `on_bytes` is told how many bytes were hashed since its last call, and may raise to give up. Raises OSError, and
    ShortFileError where the file is shorter.
    """
    whole = hashlib.sha256()
    segments = []
    buffer = memoryview(bytearray(min(_PIECE, size)))
    for start, end in spans(size):
        segment = hashlib.sha256()
        for piece in _pieces(descriptor, start, end, buffer):
            whole.update(piece)
            segment.update(piece)
            on_bytes(len(piece))
        segments.append(segment.hexdigest())
    return whole.hexdigest(), tuple(segments)


def git_sha1(descriptor: int, size: int) -> str:
    """Return what git calls the file's first `size` bytes; raises OSError and ShortFileError."""
    # It is git's name for the content, which the Hub gives; beside it stands the SHA-256 of what was fetched.
    named = hashlib.sha1(f"blob {size}\0".encode(), usedforsecurity=False)
    for piece in _pieces(descriptor, 0, size, memoryview(bytearray(min(_PIECE, size)))):
        named.update(piece)
    return named.hexdigest()


def default_threads() -> int:
    """Return how many threads keep both the cores and a disk busy: while one waits for the disk, another hashes."""
    return 2 * max(2, len(os.sched_getaffinity(0)))


def compare(
    root: int, tasks: Iterable[Task], threads: int, on_bytes: Callable[[int], None] = _nothing
) -> dict[str, Found]:
    """Hash segments of files below the directory `root`, in `threads` threads, and return what was found, by path.

    Segments are shared out in order, so that one large file keeps all cores busy, too. `on_bytes` is told from any
    thread how many bytes were hashed since its last call. An exception in this thread (Ctrl-C, a signal's handler), or
    one of `on_bytes`, ends the others within a piece.
    """
    files = [_Segments(root, task) for task in tasks]
    _in_threads(_Work(((each, number) for each in files for number in each.numbers), on_bytes), threads)
    return {each.file.path: each.found for each in files}


class _Segments:
    """A file of which segments are compared, open from the first to the last of them."""

    def __init__(self, root: int, task: Task) -> None:
        self.file, self.numbers = task
        self.found = Found()
        self._root = root
        self._left = len(self.numbers)
        self._descriptor = -1
        self._residency: Residency | None = None
        self._lock = threading.Lock()

    def compare(self, number: int, buffer: memoryview, on_bytes: Callable[[int], None]) -> None:
        start, end = spans(self.file.size)[number]
        try:
            descriptor = self._open()
            segment = hashlib.sha256()
            try:
                for piece in _pieces(descriptor, start, end, buffer):
                    segment.update(piece)
                    on_bytes(len(piece))
            finally:
                if self._residency is not None:
                    self._residency.restore(start, end)
        except ShortFileError:
            self._note(self.found.wrong, number)
        except OSError as error:
            self._note(self.found.unreadable, number, error.strerror or str(error))
        else:
            if segment.hexdigest() != self.file.segments[number]:
                self._note(self.found.wrong, number)
        finally:
            self._close()

    def _open(self) -> int:
        with self._lock:
            if self._descriptor < 0:
                self._descriptor = open_inside(self._root, self.file.path)
                os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
                self._residency = Residency(self._descriptor)
            return self._descriptor

    def _close(self) -> None:
        with self._lock:
            self._left -= 1
            if not self._left and self._descriptor >= 0:
                os.close(self._descriptor)
                self._descriptor = -1

    def _note(self, numbers: list[int], number: int, error: str = "") -> None:
        with self._lock:
            numbers.append(number)
            numbers.sort()
            self.found.error = self.found.error or error

    def give_up(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class _Work:
    """What is left to do, and why somebody gave up."""

    def __init__(self, items: Iterable[tuple[_Segments, int]], on_bytes: Callable[[int], None]) -> None:
        self.failure: BaseException | None = None
        self._items = iter(items)
        self._on_bytes = on_bytes
        self._lock = threading.Lock()
        self._begun = set[_Segments]()

    def take_part(self) -> None:
        """Do what nobody has begun, until nothing is left or somebody gives up."""
        buffer = memoryview(bytearray(_PIECE))
        try:
            while self.failure is None and (item := self._next()) is not None:
                item[0].compare(item[1], buffer, self._count)
        except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
            self.failure = self.failure or error

    def _next(self) -> tuple[_Segments, int] | None:
        with self._lock:
            item = next(self._items, None)
            if item is not None:
                self._begun.add(item[0])
            return item

    def _count(self, count: int) -> None:
        if self.failure is not None:
            raise self.failure
        self._on_bytes(count)

    def close(self) -> None:
        """Close what is open of files that were given up."""
        for each in self._begun:
            each.give_up()


def _in_threads(work: _Work, threads: int) -> None:
    running = [threading.Thread(target=work.take_part, name=f"hash-{number}") for number in range(threads)]
    try:
        for each in running:
            each.start()
        for each in running:
            while each.is_alive():
                each.join(0.2)  # so that a signal's handler gets its turn
    except BaseException as error:
        work.failure = work.failure or error
        raise
    finally:
        for each in running:
            if each.ident is not None:
                each.join()
        work.close()
    if work.failure is not None:
        raise work.failure


def _pieces(descriptor: int, start: int, end: int, buffer: memoryview) -> Iterator[memoryview]:
    """Yield the bytes [start, end) of a file, each piece only until the next; raises OSError and ShortFileError."""
    at = start
    while at < end:
        count = os.preadv(descriptor, [buffer[: end - at]], at)
        if count == 0:
            raise ShortFileError(f"the file ends at {at} of {end} bytes")
        yield buffer[:count]
        at += count
