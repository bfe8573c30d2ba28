"""A second file with the same content, without a second copy where the file system can do that."""

import errno
import fcntl
import os
from contextlib import suppress

_CLONE = 0x40049409  # linux/fs.h, FICLONE
_PIECE = 256 * 2**20  # bytes a call, so that a signal is not waited for
_CANNOT = {errno.EOPNOTSUPP, errno.EXDEV, errno.EINVAL, errno.ENOTTY, errno.ENOSYS}


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
