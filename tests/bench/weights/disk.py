"""How fast the disk reads files, past the page cache: what a loader could reach at best."""

from __future__ import annotations

import mmap
import os
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


def read_direct(files: Sequence[Path], threads: int, block: int) -> float:
    """Return the seconds that so many threads take to read the files in order, with O_DIRECT and blocks of that size.

    As `fio --rw=read --direct=1` does. Raises OSError where the file system has no O_DIRECT.
    """
    work = ((path, begin) for path in files for begin in range(0, path.stat().st_size, block))
    lock = threading.Lock()
    descriptors = {path: os.open(path, os.O_RDONLY | os.O_DIRECT) for path in files}
    failures: list[OSError] = []

    def read() -> None:
        buffer = mmap.mmap(-1, block)  # aligned to pages
        while not failures:
            with lock:
                piece = next(work, None)
            if piece is None:
                return
            try:
                os.preadv(descriptors[piece[0]], [buffer], piece[1])
            except OSError as error:
                failures.append(error)

    began = time.monotonic()
    readers = [threading.Thread(target=read) for _ in range(threads)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    seconds = time.monotonic() - began
    for descriptor in descriptors.values():
        os.close(descriptor)
    if failures:
        raise failures[0]
    return seconds


SHAPES = ((1, 1 << 20), (8, 1 << 20))
"""Threads and bytes a block that are tried; the fastest counts as the disk's rate."""
