"""Files of a directory that somebody else may have written to: nothing is followed out of it."""

import errno
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

_LEASED = 100


@dataclass(frozen=True, slots=True)
class Entry:
    """What a directory holds: a path within it, with `/`, and what `lstat` says of it; or why it cannot be read."""

    path: str
    status: os.stat_result
    error: OSError | None = None
    """Of a directory that could not be listed."""


@contextmanager
def directory(path: Path) -> Iterator[int]:
    """Open a directory that is no symlink; raises OSError, NotADirectoryError where it is something else."""
    descriptor = os.open(path, _DIRECTORY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def open_inside(root: int, path: str, flags: int = os.O_RDONLY, mode: int = 0o600) -> int:
    """Open the file `path`, with `/`, below the directory `root` and return its descriptor, the caller's to close.

    No part of the path may be a symlink, nor may the file be a pipe or a device: raises OSError, with ELOOP, ENOTDIR or
    EINVAL then.
    """
    *folders, name = path.split("/")
    if any(part in ("", ".", "..") for part in (*folders, name)):
        raise OSError(errno.EINVAL, "the path does not stay in its directory", path)
    at = root
    try:
        for folder in folders:
            inner = os.open(folder, _DIRECTORY, dir_fd=at)
            if at != root:
                os.close(at)
            at = inner
        descriptor = _open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, mode, at)
    finally:
        if at != root:
            os.close(at)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no regular file", path)
    return descriptor


def _open(name: str, flags: int, mode: int, at: int) -> int:
    for _ in range(_LEASED):
        try:
            return os.open(name, flags, mode, dir_fd=at)
        except BlockingIOError:  # somebody asks by a lease, for this moment, whether the file is in use
            time.sleep(0.005)
    return os.open(name, flags, mode, dir_fd=at)


def walk(root: int) -> Iterator[Entry]:
    """Yield everything below the directory `root` but itself, a directory before what is in it, by name."""
    yield from _walk(root, "")


def _walk(at: int, prefix: str) -> Iterator[Entry]:
    for name in sorted(os.listdir(at)):
        path = prefix + name
        try:
            status = os.stat(name, dir_fd=at, follow_symlinks=False)
        except FileNotFoundError:  # it went in this moment
            continue
        if not stat.S_ISDIR(status.st_mode):
            yield Entry(path, status)
            continue
        try:
            inner = os.open(name, _DIRECTORY, dir_fd=at)
        except OSError as error:
            yield Entry(path, status, error)
            continue
        try:
            yield Entry(path, status)
            yield from _walk(inner, path + "/")
        finally:
            os.close(inner)
