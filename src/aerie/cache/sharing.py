"""A second file with the same content, without a second copy where the file system can do that."""

import errno
import fcntl
import os
import stat
from contextlib import suppress
from pathlib import Path

_CLONE = 0x40049409  # linux/fs.h, FICLONE
_PIECE = 256 * 2**20  # bytes a call, so that a signal is not waited for
_CANNOT = {errno.EOPNOTSUPP, errno.EXDEV, errno.EINVAL, errno.ENOTTY, errno.ENOSYS, errno.EPERM}


def clone(source: int, target: int) -> bool:
    """Let `target`, an empty file, share the blocks of `source`; return False where this file system cannot do it.

    Raises OSError where it fails for another reason.
    """
    try:
        fcntl.ioctl(target, _CLONE, source)
    except OSError as error:
        if error.errno in _CANNOT:
            return False
        raise
    return True


def share(donor: Path, target: Path, size: int) -> bool:
    """Let `target`, which is not there yet, have the donor's content without a copy: by shared blocks, or as a link.

    Returns False where the donor is no regular file of this size. Raises OSError.
    """
    source = os.open(donor, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(source)
        if not stat.S_ISREG(status.st_mode) or status.st_size != size:
            return False
        copy = os.open(target, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            cloned = clone(source, copy)
        except OSError:
            target.unlink()
            raise
        finally:
            os.close(copy)
        if not cloned:
            target.unlink()
            os.link(donor, target, follow_symlinks=False)
    finally:
        os.close(source)
    return True


def copy_range(source: int, target: int, start: int, end: int) -> None:
    """Copy the bytes [start, end) to the same place of `target`; raises OSError, also where `source` is shorter."""
    at = start
    while at < end:
        count = _copy_piece(source, target, at, min(_PIECE, end - at))
        if count == 0:
            raise OSError(errno.EIO, f"the file ends at {at} of {end} bytes")
        at += count


def _copy_piece(source: int, target: int, at: int, count: int) -> int:
    with suppress(OSError):
        return os.copy_file_range(source, target, count, at, at)
    # From another kind of file system; what failed for a reason fails here again, and is told.
    return os.pwrite(target, os.pread(source, min(count, 2**20), at), at)
