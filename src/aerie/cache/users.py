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

_PROC = Path("/proc")


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


def who_uses(path: Path) -> list[str]:
    """Return what other processes use the revision at `path`, as far as /proc tells this user: name and number.

    Raises OSError where it is not there.
    """
    with directory(path) as root:
        itself = os.fstat(root)
        files = {
            (entry.status.st_dev, entry.status.st_ino) for entry in walk(root) if stat.S_ISREG(entry.status.st_mode)
        }
    holders = _holders(itself)
    others: list[int] = []
    with suppress(OSError):
        others = sorted(int(each.name) for each in _PROC.iterdir() if each.name.isdecimal())
    return [
        f"{_name(number)} (process {number})"
        for number in others
        if number != os.getpid() and (number in holders or not files.isdisjoint(_has(number)))
    ]


def _holders(held: os.stat_result) -> set[int]:
    """Return which processes have a lock on a file."""
    found = set()
    with suppress(OSError):
        for line in (_PROC / "locks").read_text().splitlines():
            # `1: FLOCK  ADVISORY  READ 4711 08:01:131 0 EOF`, with `->` before the kind where it waits.
            fields = line.split()
            if fields[1] == "FLOCK" and _device(fields[5]) == (held.st_dev, held.st_ino):
                found.add(int(fields[4]))
    return found


def _has(process: int) -> Iterator[tuple[int, int]]:
    """Yield device and number of each file that a process has open or mapped, as far as this user may know."""
    place = _PROC / str(process)
    with suppress(OSError):
        for descriptor in (place / "fd").iterdir():
            with suppress(OSError):
                status = descriptor.stat()
                yield status.st_dev, status.st_ino
    with suppress(OSError):
        for line in (place / "maps").read_text(errors="replace").splitlines():
            _, _, _, device, inode, *_ = line.split(maxsplit=5)
            yield _device(f"{device}:{inode}")


def _device(text: str) -> tuple[int, int]:
    """Return device and number of a file as the kernel writes them: `08:01:131`."""
    major, minor, inode = text.split(":")
    return os.makedev(int(major, 16), int(minor, 16)), int(inode)


def _name(process: int) -> str:
    with suppress(OSError):
        return (_PROC / str(process) / "comm").read_text(errors="replace").strip()
    return "a program"


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
