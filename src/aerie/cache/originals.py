"""The files that `aerie model adopt` finds: what lies there, what is known of it, and what it is by its digests."""

import json
import os
import re
import stat
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from aerie.cache.directories import StoreError
from aerie.cache.hashing import ShortFileError, digest, git_sha1
from aerie.cache.inside import directory, open_patiently, walk
from aerie.cache.manifest import MANIFEST, File, ManifestError
from aerie.cache.meter import Meter

_SHA256 = 64
_SHA1 = 40
_SHOWN = 20
_SETTLED = 2 * 10**9  # nanoseconds; what was written to so lately may be again, within one tick of the kernel's clock


@dataclass(frozen=True, slots=True)
class Original:
    """A file as it lies there: `real` is where its content is, which a link of the Hub's cache leads to."""

    path: str
    real: Path
    status: os.stat_result


@dataclass(slots=True)
class Expected:
    """What is known of a file before it is hashed."""

    sha256: str | None = None
    git_sha1: str | None = None
    size: int | None = None
    by: str = ""
    """Who says so."""


class Memory:
    """The digests of files that a killed adoption has hashed, each valid as long as nobody touches the file.

    A line of JSON each, appended as a file is done; a line that was cut is none.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: dict[tuple[int, ...], tuple[str, tuple[str, ...]]] = {}
        with suppress(OSError):
            for line in path.read_text(encoding="ascii", errors="replace").splitlines():
                with suppress(ValueError, KeyError, TypeError):
                    each = json.loads(line)
                    self._known[tuple(map(int, each["identity"]))] = str(each["sha256"]), tuple(each["segments"])

    def find(self, original: Original) -> File | None:
        """Return the file as it was hashed; None where it was not, or was touched since."""
        known = self._known.get(_identity(original.status))
        try:
            return known and File(original.path, original.status.st_size, *known)
        except ManifestError:
            return None

    def note(self, original: Original, file: File) -> None:
        """Remember a file that was hashed; without room for that it is not."""
        status = original.status
        if time.time_ns() - max(status.st_mtime_ns, status.st_ctime_ns) < _SETTLED:
            return
        line = {"identity": _identity(status), "sha256": file.sha256, "segments": file.segments}
        with suppress(OSError), os.fdopen(os.open(self._path, _APPEND, 0o600), "a", encoding="ascii") as stream:
            stream.write(json.dumps(line) + "\n")

    def forget(self) -> None:
        """Remove it."""
        self._path.unlink(missing_ok=True)


_APPEND = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC


def _identity(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def find_originals(path: Path, skipped: set[str], blobs: Path | None) -> Iterator[Original]:
    """Yield the files below `path` but for what is skipped; a link may lead to `blobs`, those of the Hub's cache.

    Raises StoreError where something is no file.
    """
    with directory(path) as root:
        for entry in walk(root):
            if entry.path.split("/")[0] in skipped or entry.path == MANIFEST:
                continue
            real = path / entry.path
            if entry.error is not None:
                raise StoreError(f"{real} cannot be read: {entry.error.strerror}")
            status = entry.status
            if stat.S_ISDIR(status.st_mode):
                continue
            if stat.S_ISLNK(status.st_mode) and blobs is not None:
                real = _blob(real, blobs)
                status = real.lstat()
            if not stat.S_ISREG(status.st_mode):
                raise StoreError(f"{real} is no regular file: put the file itself there, or take it away")
            yield Original(entry.path, real, status)


def _blob(link: Path, blobs: Path) -> Path:
    try:
        real = link.resolve(strict=True)
    except (OSError, RuntimeError):
        raise StoreError(f"{link} leads to nothing: the download was not finished, or its content is gone") from None
    if real.parent != blobs.resolve():
        raise StoreError(f"{link} leads out of the cache, to {real}")
    return real


def hash_all(originals: Sequence[Original], expected: dict[str, Expected], name: str, memory: Memory) -> list[File]:
    """Hash every file in parallel, and compare it with what is known of it; raises StoreError naming the wrong ones."""
    largest_first = sorted(originals, key=lambda each: -each.status.st_size)
    total = sum(each.status.st_size for each in originals)
    with Meter(f"adopt {name}", total) as meter, ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        try:
            pairs = list(pool.map(lambda each: _hash(each, expected.get(each.path), meter, memory), largest_first))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            meter.stop()
            raise
    if wrong := sorted(message for _, message in pairs if message):
        raise StoreError(f"{'; '.join(wrong[:_SHOWN])}. Nothing was adopted")
    return [file for file, _ in pairs if file is not None]


def _hash(original: Original, expected: Expected | None, meter: Meter, memory: Memory) -> tuple[File | None, str]:
    size = original.status.st_size
    descriptor = open_patiently(original.real, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        known = memory.find(original)
        if known is not None:
            meter.count(size)
        file = known or File(original.path, size, *digest(descriptor, size, meter.count))
        if is_changed(original, os.fstat(descriptor)):
            return None, f"{original.real} was written to while it was read: end what does that, then try again"
        if known is None:
            memory.note(original, file)
        return file, _mismatch(original, expected, file, descriptor)
    except ShortFileError:
        return None, f"{original.real} was truncated while it was read: end what does that, then try again"
    finally:
        os.close(descriptor)


def is_changed(original: Original, status: os.stat_result) -> bool:
    """Return whether a file is another one by now, by its status."""
    was = original.status
    return (was.st_ino, was.st_size, was.st_mtime_ns) != (status.st_ino, status.st_size, status.st_mtime_ns)


def _mismatch(original: Original, expected: Expected | None, file: File, descriptor: int) -> str:
    if expected is None:
        expected = _by_blob(original)
    if expected.size is not None and expected.size != file.size:
        return f"{original.path} has {file.size:,} bytes, and {expected.size:,} by {expected.by}"
    if expected.sha256 is not None and expected.sha256 != file.sha256:
        return f"{original.path} has SHA-256 {file.sha256}, and {expected.sha256} by {expected.by}"
    if expected.git_sha1 is not None and expected.git_sha1 != (found := git_sha1(descriptor, file.size)):
        return f"{original.path} has git's name {found}, and {expected.git_sha1} by {expected.by}"
    return ""


def _by_blob(original: Original) -> Expected:
    """Return what the name of the Hub's blob says of its content."""
    name = original.real.name
    if original.real.parent.name == "blobs" and re.fullmatch(r"[0-9a-f]+", name):
        if len(name) == _SHA256:
            return Expected(sha256=name, by="the Hub's name for it")
        if len(name) == _SHA1:
            return Expected(git_sha1=name, by="the Hub's name for it")
    return Expected()
