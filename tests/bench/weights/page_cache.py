"""What of files is in the page cache, and how to change that. Linux."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_TRIES = 10
_PIECE = 4 * 2**20
_LOWEST_BIT = bytes(byte & 1 for byte in range(256))
_PAGE = os.sysconf("SC_PAGESIZE")


def resident(files: Sequence[Path]) -> int:
    """Return how many bytes of the files are in the page cache; raises OSError where the kernel cannot tell.

    By mincore(), since cachestat() counts nothing on overlayfs. The kernel tells only whoever may write to the files.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
    libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    pages = 0
    for path in files:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            address = libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, file.fileno(), 0)
            told = ctypes.create_string_buffer(-(-size // _PAGE))
            try:
                if libc.mincore(address, size, told):
                    raise OSError(ctypes.get_errno(), "mincore", str(path))
            finally:
                libc.munmap(address, size)
            pages += sum(told.raw.translate(_LOWEST_BIT))
    return min(pages * _PAGE, sum(path.stat().st_size for path in files))


def evict(files: Sequence[Path]) -> int:
    """Take the files out of the page cache and return how many bytes of them are still in it."""
    for _ in range(_TRIES):
        for path in files:
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if not (left := resident(files)):
            return 0
        time.sleep(0.2)
    return left


def fill(files: Sequence[Path]) -> int:
    """Read the files, which puts them into the page cache, and return how many bytes of them are in it then."""

    def read(some: Sequence[Path]) -> None:
        for path in some:
            with path.open("rb", buffering=0) as file:
                buffer = bytearray(_PIECE)
                while file.readinto(buffer):
                    pass

    threads = [threading.Thread(target=read, args=(files[begin::4],)) for begin in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return resident(files)
