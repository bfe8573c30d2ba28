"""`aerie model warm`: reads weights into the page cache, in vLLM's own order and as fast as the disk can.

vLLM's own loader maps a shard and copies one tensor after another out of it, so that one page fault after another waits
for the disk; eight ranks do the same eight times. From the page cache the same loader runs at memory's speed.

How: posix_fadvise(WILLNEED) in small steps, by a few threads. It starts the disk's reads without copying a byte, so it
takes a sixth of a core where reading takes several (docs/weights.md has the figures). The kernel reads for one call no
more than the device's read-ahead, hence the steps. After each window, one byte at its end is read, which waits for it.
"""

import ctypes
import errno
import json
import os
import re
import signal
import stat
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from aerie.cache.directories import StoreError
from aerie.cache.layout import CURRENT
from aerie.cache.room import Room, room

INDEX = "model.safetensors.index.json"
GB = 10**9
_WINDOW = 8 * 2**20
"""Bytes that a thread has asked for when it waits for those of the window before: 64 MiB of all threads."""
_AHEAD = 1
_THREADS = 4
_STEPS = (128 * 2**10, 2 * 2**20)
"""Bytes of one posix_fadvise, at least and at most: force_page_cache_ra (mm/readahead.c) cuts it to the read-ahead of
the device, 128 KiB unless set otherwise, and goes by 2 MiB itself."""
_LEAST_RESERVE = 4 * 2**30
_RESERVED = 0.1
"""Of what is available. vLLM takes 90 % for its own prefetch (weight_utils.py): with less left, the kernel drops pages
to have free ones, and begins with those that were read first, which the engine reads first, too."""
_NICE = 10
_TELL_EVERY = 1.0  # seconds
_LINE_EVERY = 10.0
_STOPS_WITHIN = 2.0  # then without the threads, which a network file system may hold
_CACHESTAT = 451  # its number on all architectures; Linux 6.5
_TERMINATED = 128 + signal.SIGTERM


@dataclass(frozen=True)
class Options:
    """What `aerie model warm` was told."""

    directories: list[Path]
    json: bool


class Verdict(StrEnum):
    """What came of it; each is the `state` of the result."""

    DONE = "done"
    SKIPPED = "skipped"
    FAILED = "failed"
    STOPPED = "stopped"


@dataclass(frozen=True)
class Result:
    """What was read into the page cache, in bytes and seconds."""

    state: Verdict
    text: str
    total: int = 0
    warmed: int = 0
    from_disk: int | None = None
    """None where the kernel does not tell."""
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """Return it as `--json` prints it, and as the state of `aerie serve` has it."""
        return {
            "state": str(self.state),
            "text": self.text,
            "total_bytes": self.total,
            "warmed_bytes": self.warmed,
            "from_disk_bytes": self.from_disk,
            "seconds": round(self.seconds, 1),
        }


def weight_files(directory: Path) -> list[Path]:
    """Return the files that vLLM's loader reads from a checkpoint, in its order.

    As vllm/model_executor/model_loader: `*.safetensors` of the directory itself, those that the index names where there
    is one, by their names with numbers as numbers. Raises OSError where the directory cannot be read.
    """
    found = [path for path in directory.iterdir() if path.suffix == ".safetensors" and path.is_file()]
    try:
        index = json.loads((directory / INDEX).read_text(encoding="utf-8"))
        named = {str(file) for file in index["weight_map"].values()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # vLLM complains of a broken one itself
        named = set()
    kept = [path for path in found if not named or path.name in named]
    return sorted(kept, key=lambda path: _natural(path.name))


def _natural(name: str) -> list[tuple[int, int | str]]:
    return [(0, int(part)) if part.isdecimal() else (1, part) for part in re.split(r"(\d+)", name)]


def size_of(files: Iterable[Path]) -> int:
    """Return the bytes of all of them; raises OSError."""
    return sum(path.stat().st_size for path in files)


def reserve(available: int, engine: int = 0) -> int:
    """Return the bytes that stay free of what is available: what the engine takes itself, and what the kernel needs."""
    return engine + max(_LEAST_RESERVE, int(_RESERVED * available))


def refusal(total: int, there: Room, engine: int = 0) -> str | None:
    """Return why so many bytes are not to be read into the page cache; None where they may."""
    kept = reserve(there.available, engine)
    if total + kept <= there.available:
        return None
    return (
        f"the weights take {total / GB:.1f} GB, and {there.bound} has {there.available / GB:.1f} GB available, of "
        f"which {kept / GB:.1f} GB stay free: what is read first would be dropped again before the engine reads it"
    )


def _served(directory: Path) -> Path:
    """Return where the weights of a directory are: of a model in the models directory, in its current revision.

    Raises StoreError where there are none, OSError where it cannot be read.
    """
    if weight_files(directory):
        return directory
    current = directory / CURRENT
    if current.is_dir() and weight_files(current):
        return current
    if any((each / CURRENT).is_dir() for each in directory.iterdir()):
        raise StoreError(f"{directory} is no model, but has models in it: name the directories of those to be read")
    raise StoreError(f"{directory} has no *.safetensors, which alone are read: name a directory with weights")


def warm(options: Options) -> int:
    """Run the command and return its exit code; raises StoreError, OSError."""
    directories = [_served(each) for each in options.directories]
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    shown = _Shown(sys.stderr.isatty())
    result = run(directories, stop, shown.tell)
    shown.end()
    if result.state == Verdict.FAILED:
        raise StoreError(result.text)
    if options.json:
        print(json.dumps(result.to_json(), indent=1))
    elif result.state == Verdict.DONE:
        print(result.text)
    else:
        print(f"aerie model warm: {result.text}", file=sys.stderr)
    if result.state == Verdict.STOPPED:
        sys.stdout.flush()
        os._exit(_TERMINATED)  # a thread may wait for a disk that does not answer
    return 0 if result.state == Verdict.DONE else 1


def run(
    directories: Sequence[Path],
    stop: threading.Event,
    tell: Callable[[int, int, float], None],
    engine: int = 0,
    there: Room | None = None,
) -> Result:
    """Read the weights of the directories into the page cache, the first directory's first.

    `tell` is called about every second with bytes done, bytes in all and seconds; `engine` is what the engine will take
    of the memory itself. Never raises for what it finds on the disk.
    """
    began = time.monotonic()
    try:
        files = [file for directory in directories for file in weight_files(directory)]
        total, cached = size_of(files), sum(map(_cached, files))
    except OSError as error:
        return Result(Verdict.FAILED, f"{error.filename}: {error.strerror}")
    if not files:
        return Result(Verdict.DONE, "there are no safetensors files: nothing to read")
    if cached >= total:
        return Result(Verdict.DONE, f"{total / GB:.1f} GB: all of it is in the page cache already", total, total, 0)
    if why := refusal(total, there or room(), engine):
        return Result(Verdict.SKIPPED, f"nothing was read ahead: {why}", total)
    return _Reading(files, total, stop).until_done(began, tell)


class _Reading:
    """Threads that ask for one window after another."""

    def __init__(self, files: Sequence[Path], total: int, stop: threading.Event) -> None:
        self._windows = self._all_windows(files)
        self._total = total
        self._stop = stop
        self._lock = threading.Lock()
        self._open: list[int] = []
        self._done = 0
        self._error: OSError | None = None

    def until_done(self, began: float, tell: Callable[[int, int, float], None]) -> Result:
        before = _read_from_disk()
        os.nice(_NICE)  # of the CPU alone: the engine waits for these very bytes, so the disk is not to put them off
        threads = [threading.Thread(target=self._work, daemon=True) for _ in range(_THREADS)]
        for thread in threads:
            thread.start()
        told = began
        while any(thread.is_alive() for thread in threads) and not self._stop.is_set():
            self._stop.wait(0.05)
            if time.monotonic() - told >= _TELL_EVERY:
                told = time.monotonic()
                tell(self._done, self._total, told - began)
        deadline = time.monotonic() + _STOPS_WITHIN
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        seconds = time.monotonic() - began
        if not any(thread.is_alive() for thread in threads):
            for descriptor in self._open:
                os.close(descriptor)
        after = _read_from_disk()
        from_disk = None if before is None or after is None else after - before
        return self._result(seconds, from_disk)

    def _result(self, seconds: float, from_disk: int | None) -> Result:
        figures = (self._total, self._done, from_disk, seconds)
        if self._error:
            where = f"{self._error.filename}: " if self._error.filename else ""
            return Result(Verdict.FAILED, f"{where}{self._error.strerror}", *figures)
        if self._done < self._total:
            return Result(
                Verdict.STOPPED, f"stopped after {self._done / GB:.1f} of {self._total / GB:.1f} GB", *figures
            )
        disk = "" if from_disk is None else f", {from_disk / GB:.1f} GB of it from the disk"
        rate = f", {self._total / GB / seconds:.2f} GB/s" if seconds > 0 else ""
        return Result(Verdict.DONE, f"{self._total / GB:.1f} GB in {seconds:.1f} s{rate}{disk}", *figures)

    def _all_windows(self, files: Sequence[Path]) -> Iterator[tuple[int, int, int, int]]:
        for path in files:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            self._open.append(descriptor)
            about = os.fstat(descriptor)
            if not stat.S_ISREG(about.st_mode):
                raise OSError(errno.EINVAL, "it is no regular file", str(path))
            step = _step(about.st_dev)
            for start in range(0, about.st_size, _WINDOW):
                yield descriptor, start, min(start + _WINDOW, about.st_size), step

    def _work(self) -> None:
        asked: deque[tuple[int, int, int]] = deque()
        try:
            while not self._stop.is_set():
                with self._lock:
                    window = next(self._windows, None)
                if window is None:
                    break
                descriptor, start, end, step = window
                for offset in range(start, end, step):
                    os.posix_fadvise(descriptor, offset, min(step, end - offset), os.POSIX_FADV_WILLNEED)
                asked.append((descriptor, start, end))
                if len(asked) > _AHEAD:
                    self._await(*asked.popleft())
            while asked and not self._stop.is_set():
                self._await(*asked.popleft())
        except OSError as error:
            self._error = error
            self._stop.set()

    def _await(self, descriptor: int, start: int, end: int) -> None:
        os.pread(descriptor, 1, end - 1)
        with self._lock:
            self._done += end - start


def _step(device: int) -> int:
    try:
        number = f"{os.major(device)}:{os.minor(device)}"
        kib = int(Path("/sys/class/bdi", number, "read_ahead_kb").read_text())
    except (OSError, ValueError):
        kib = 0
    least, most = _STEPS
    return min(max(kib * 1024, least), most)


class _Range(ctypes.Structure):
    _fields_ = (("off", ctypes.c_uint64), ("len", ctypes.c_uint64))


class _CacheStat(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in ("cache", "dirty", "writeback", "evicted", "recently_evicted"))


def _cached(path: Path) -> int:
    """Return how many bytes of the file are in the page cache; 0 where the kernel does not tell this user.

    It tells who owns the file or may write it, and not the image's user of a published model.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(descriptor).st_size
        where, said = _Range(0, 0), _CacheStat()
        failed = ctypes.CDLL(None).syscall(_CACHESTAT, descriptor, ctypes.byref(where), ctypes.byref(said), 0)
        return 0 if failed else min(size, said.cache * os.sysconf("SC_PAGE_SIZE"))
    finally:
        os.close(descriptor)


def _read_from_disk() -> int | None:
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("read_bytes:")), None)


class _Shown:
    """Progress for a person: one line that is drawn over, or on no terminal a line now and then."""

    def __init__(self, is_terminal: bool) -> None:  # noqa: FBT001 - named by what it asks
        self._is_terminal = is_terminal
        self._said = 0.0

    def tell(self, done: int, total: int, seconds: float) -> None:
        line = f"{done / GB:.1f} of {total / GB:.1f} GB, {done / GB / max(seconds, 0.1):.2f} GB/s"
        if self._is_terminal:
            print(f"\r{line}\033[K", end="", file=sys.stderr, flush=True)
        elif seconds - self._said >= _LINE_EVERY:
            self._said = seconds
            print(line, file=sys.stderr, flush=True)

    def end(self) -> None:
        if self._is_terminal:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def _for_supervisor(engine: int, directories: Sequence[Path]) -> int:
    """Warm as a child of `aerie serve`: a JSON object a line, the last of which has `state`."""
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())

    def tell(done: int, total: int, seconds: float) -> None:
        print(json.dumps({"warmed_bytes": done, "total_bytes": total, "seconds": round(seconds, 1)}), flush=True)

    print(json.dumps(run(directories, stop, tell, engine).to_json()), flush=True)
    os._exit(0)  # a thread may wait for a disk that does not answer


if __name__ == "__main__":
    sys.exit(_for_supervisor(int(sys.argv[1]), [Path(each) for each in sys.argv[2:]]))
