"""What of files is in the page cache, and how to change that. Linux 6.5 and later."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_CACHESTAT = 451
_TRIES = 10
_PIECE = 4 * 2**20


class _Range(ctypes.Structure):
    _fields_ = (("off", ctypes.c_uint64), ("len", ctypes.c_uint64))


class _CacheStat(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in ("cache", "dirty", "writeback", "evicted", "recent"))


def resident(files: Sequence[Path]) -> int:
    """Return how many bytes of the files are in the page cache; raises OSError where the kernel cannot tell."""
    libc = ctypes.CDLL(None, use_errno=True)
    pages = 0
    for path in files:
        with path.open("rb") as file:
            whole, found = _Range(0, 0), _CacheStat()
            if libc.syscall(_CACHESTAT, file.fileno(), ctypes.byref(whole), ctypes.byref(found), 0):
                raise OSError(ctypes.get_errno(), "cachestat", str(path))
            pages += found.cache
    return pages * os.sysconf("SC_PAGESIZE")


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
