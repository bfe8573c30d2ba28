"""The directory that a fetch writes to: nothing is followed out of it, and nothing else stays in it."""

import errno
import logging
import os
import stat
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from aerie.cache.inside import directory, open_inside, walk
from aerie.cache.sharing import share

_MOST_PIECES = 1024  # IOV_MAX
_WORDS = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the quota is used up",
    errno.EROFS: "the file system is read-only",
    errno.EIO: "the disk fails (input/output error): see the kernel's log",
    errno.EACCES: "no permission to write there",
    errno.EPERM: "no permission to write there",
    errno.EFBIG: "the file system, or a limit (ulimit -f), takes no file so large",
    errno.EMFILE: "too many open files: raise the limit (ulimit -n)",
}

_log = logging.getLogger("aerie")


class DiskError(Exception):
    """The disk does not take what is fetched; the message says which error, and where."""


def disk_error(error: OSError, place: Path) -> DiskError:
    """Return what an error of the disk says; `place` is where, unless the error names a path itself."""
    where = error.filename if isinstance(error.filename, str) and error.filename.startswith("/") else str(place)
    return DiskError(f"{where}: {_WORDS.get(error.errno or 0) or error.strerror or error}")


class Staging:
    """The files below `root`, by their paths with `/`. Every method raises OSError."""

    def __init__(self, root: Path, expected: Iterable[str]) -> None:
        """Open the directory; what is not expected in it is removed."""
        self.root = root
        self._directory = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        self.found = _sweep(root, set(expected))
        """The status of the files that are there."""

    def open(self, path: str, size: int) -> int:
        """Return a descriptor to write to a file, which is made in this size where it is not there."""
        self._make_parents(path)
        descriptor = open_inside(self._directory, path, os.O_RDWR | os.O_CREAT)
        try:
            if os.fstat(descriptor).st_size != size:
                os.ftruncate(descriptor, size)
        except OSError:
            os.close(descriptor)
            raise
        return descriptor

    def open_to_read(self, path: str) -> int:
        """Return a descriptor to read a file, which may be a link to what is published and read-only."""
        return open_inside(self._directory, path)

    def take(self, path: str, donor: Path, size: int) -> bool:
        """Let a file that is not there share a donor's content; return False where that cannot be."""
        self._make_parents(path)
        return share(donor, self.root / path, size)

    def remove(self, path: str) -> None:
        """Remove a file, there or not."""
        with suppress(FileNotFoundError):
            os.unlink(path, dir_fd=self._directory)

    def close(self) -> None:
        """Close the directory."""
        os.close(self._directory)

    def _make_parents(self, path: str) -> None:
        parts = path.split("/")
        for depth in range(1, len(parts)):
            with suppress(FileExistsError):
                os.mkdir("/".join(parts[:depth]), 0o700, dir_fd=self._directory)


def write_all(descriptor: int, pieces: Sequence[bytes], offset: int) -> None:
    """Write all of it; raises OSError."""
    size = sum(map(len, pieces))
    written = os.pwritev(descriptor, pieces, offset) if len(pieces) <= _MOST_PIECES else 0
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
