"""How fast a file system reads: measured by reading, past the page cache, for a moment, without ever writing."""

from __future__ import annotations

import json
import mmap
import os
import random
import select
import signal
import stat
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

# What the rate is measured with: as many readers, and as much at once, as a loader of weights has.
THREADS = 8
BLOCK = 8 << 20
# A smaller file tells more about the first access than about the rate.
LEAST_FILE = 256 << 20
# How many names of a large directory are looked at.
MOST_ENTRIES = 50000
# What stat counts a file's space in, whatever the blocks of its file system.
BLOCK = 512


class Unmeasurable(Exception):  # noqa: N818
    """There is no rate to be had here; the text says why."""


def read_rate(path: Path, seconds: float) -> float:
    """Measure the bytes a second that a file or block device gives to THREADS readers. Unmeasurable: it gives none."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError as error:
        raise Unmeasurable(f"{path}: {error.strerror} (read past the cache)") from error
    try:
        size = os.lseek(descriptor, 0, os.SEEK_END)
        if size < LEAST_FILE:
            raise Unmeasurable(f"{path} is too small to tell")
        done = [0] * THREADS
        failed: list[str] = []
        began = time.monotonic()

        def read(number: int) -> None:
            buffer = mmap.mmap(-1, BLOCK)  # aligned to a page, which reading past the cache needs
            places = random.Random(number)  # noqa: S311  # spread over the file, so that no disk's own cache answers
            while time.monotonic() - began < seconds:
                try:
                    done[number] += os.preadv(descriptor, [buffer], places.randrange(size // BLOCK) * BLOCK)
                except OSError as error:
                    failed.append(f"{path}: {error.strerror} (read past the cache)")
                    return

        readers = [threading.Thread(target=read, args=(number,)) for number in range(THREADS)]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
        if failed or not sum(done):
            raise Unmeasurable(failed[0] if failed else f"{path} gave nothing in {seconds} s")
        return sum(done) / (time.monotonic() - began)
    finally:
        os.close(descriptor)


def largest_file(directory: Path) -> Path | None:
    """Find the largest file among the first MOST_ENTRIES below `directory`, if it is large enough to tell a rate."""
    best, size, seen = None, LEAST_FILE - 1, 0
    for folder, _, names in os.walk(directory):
        for name in names:
            seen += 1
            path = Path(folder, name)
            if not path.is_symlink() and path.is_file() and path.stat().st_size > size:
                best, size = path, path.stat().st_size
        if seen > MOST_ENTRIES:
            break
    return best


def size_of(directory: Path) -> int:
    """Add up the bytes that the files below `directory` take of the disk.

    A link counts for nothing, as caches of models have many, and so does a second name of a file, as revisions share
    them, and what has not yet come of a file that is being fetched.
    """
    total, seen = 0, 0
    counted = set()
    for folder, _, names in os.walk(directory):
        for name in names:
            seen += 1
            status = Path(folder, name).lstat()
            if stat.S_ISREG(status.st_mode) and (status.st_dev, status.st_ino) not in counted:
                counted.add((status.st_dev, status.st_ino))
                total += min(status.st_size, status.st_blocks * BLOCK)
        if seen > MOST_ENTRIES:
            break
    return total


def within(seconds: float, work: Callable[[], Any]) -> Any:
    """Return the JSON-able result of `work`, done in a process of its own and given up after `seconds` (TimeoutError).

    A file system whose server is gone keeps whoever touches it waiting, for ever and out of reach of any exception.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.close(reader)
        try:
            answer = json.dumps({"result": work()})
        except Exception as error:  # noqa: BLE001
            answer = json.dumps({"error": str(error)})
        os.write(writer, answer.encode())
        os._exit(0)
    os.close(writer)
    try:
        text = b""
        deadline = time.monotonic() + seconds
        while True:
            if not select.select([reader], [], [], max(0.0, deadline - time.monotonic()))[0]:
                os.kill(child, signal.SIGKILL)
                raise TimeoutError(f"no answer in {seconds:g} s")
            piece = os.read(reader, 65536)
            if not piece:
                break
            text += piece
    finally:
        os.close(reader)
        os.waitpid(child, os.WNOHANG)
    answer = json.loads(text)
    if "error" in answer:
        raise Unmeasurable(answer["error"])
    return answer["result"]
