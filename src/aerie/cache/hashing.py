"""SHA-256 of files: one file as it is fetched, or the segments of many on all cores."""

import hashlib
import os
from collections.abc import Callable

from aerie.cache.manifest import SEGMENT

_PIECE = 2**20  # bytes a read: it stays in a core's cache until it is hashed


class ShortFileError(Exception):
    """A file ended before the bytes that were to be hashed; the message says where."""


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
    for start in range(0, size, SEGMENT):
        segment = hashlib.sha256()
        end = min(start + SEGMENT, size)
        at = start
        while at < end:
            count = os.preadv(descriptor, [buffer[: end - at]], at)
            if count == 0:
                raise ShortFileError(f"the file ends at {at} of {size} bytes")
            whole.update(buffer[:count])
            segment.update(buffer[:count])
            at += count
            on_bytes(count)
        segments.append(segment.hexdigest())
    return whole.hexdigest(), tuple(segments)


def git_sha1(descriptor: int, size: int) -> str:
    """Return what git calls the file's first `size` bytes; raises OSError and ShortFileError."""
    # It is git's name for the content, which the Hub gives; beside it stands the SHA-256 of what was fetched.
    named = hashlib.sha1(f"blob {size}\0".encode(), usedforsecurity=False)
    at = 0
    while at < size:
        piece = os.pread(descriptor, min(_PIECE, size - at), at)
        if not piece:
            raise ShortFileError(f"the file ends at {at} of {size} bytes")
        named.update(piece)
        at += len(piece)
    return named.hexdigest()
