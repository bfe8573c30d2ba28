"""Who uses a revision: those that hold it, and those that have a file of it open or mapped."""

import errno
import fcntl
import os
import signal
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from aerie.cache.inside import directory, open_inside, walk


@contextmanager
def hold(path: Path) -> Iterator[None]:
    """Use what is published at `path`, a revision or a symlink to one: it is not freed meanwhile.

    Raises OSError where it is not there.
    """
    while True:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            # It may have been moved away, or `current` switched, before the lock was there.
            with suppress(FileNotFoundError):
                if os.path.samestat(path.stat(), os.fstat(descriptor)):
                    break
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
    try:
        yield
    finally:
        os.close(descriptor)


def in_use(path: Path) -> bool | None:
    """Whether somebody holds the revision at `path`, or has one of its files open or mapped; raises OSError.

    None where nobody holds it, and who has files open only their owner and root can tell.
    """
    with unused(path) as nobody:
        if nobody and os.geteuid() not in (0, path.stat().st_uid):
            return None
        return not nobody


@contextmanager
def unused(path: Path) -> Iterator[bool]:
    """Tell whether nobody uses the revision at `path`; then nobody can begin to hold it meanwhile. Raises OSError."""
    with directory(path) as descriptor:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield not any(
            _is_open(descriptor, entry.path) for entry in walk(descriptor) if stat.S_ISREG(entry.status.st_mode)
        )


def _is_open(root: int, path: str) -> bool:
    """Whether any process, in whatever container, has the file open or mapped, as far as this user may know."""
    descriptor = open_inside(root, path)
    try:
        # Whoever opens it just now lets the kernel tell us, by a signal that ends nobody.
        fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except OSError as error:
        return error.errno == errno.EAGAIN  # else: not our file, or a file system without leases
    finally:
        os.close(descriptor)
    return False
