"""Which pages of a file were in the page cache before it was read, so that reading it leaves the cache as it was."""

import ctypes
import mmap
import os
import re

_FAILED = ctypes.c_void_p(-1).value
_ABSENT = re.compile(rb"\x00+")


class Residency:
    """The pages of an open file that the cache held when this was made.

    Of a file that is neither ours nor writable the kernel says that all are there; then nothing is dropped.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._pages = _resident(descriptor, os.fstat(descriptor).st_size)

    def restore(self, start: int, end: int) -> None:
        """Drop what the cache did not hold of the bytes [start, end) before; `start` is at a page's begin."""
        first = start // mmap.PAGESIZE
        for run in _ABSENT.finditer(self._pages, first, -(-end // mmap.PAGESIZE)):
            os.posix_fadvise(
                self._descriptor,
                run.start() * mmap.PAGESIZE,
                (run.end() - run.start()) * mmap.PAGESIZE,
                os.POSIX_FADV_DONTNEED,
            )


def _resident(descriptor: int, size: int) -> bytes:
    """Return a byte for each page; none where the kernel does not say."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
    if size == 0:
        return b""
    # Mapped only: no page is touched, so a disk that fails or a file that shrinks cannot end the process.
    mapped = libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
    if mapped == _FAILED:
        return b""
    pages = ctypes.create_string_buffer(-(-size // mmap.PAGESIZE))
    told = libc.mincore(mapped, size, pages)
    libc.munmap(mapped, size)
    return pages.raw if told == 0 else b""
