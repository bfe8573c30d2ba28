"""Where the shrunken pair and the engine's log lie while they are needed: gigabytes that nobody is to find later."""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_PREFIX = "aerie-rehearsal-"


@contextmanager
def work_folder(asked: Path | None, cache: Path) -> Iterator[Path]:
    """Yield the directory that was asked for, which is kept, or one below `cache` that is removed in the end.

    Where nobody may write to `cache`, it is the system's place for temporary files. Raises OSError.
    """
    if asked:
        yield asked.absolute()
        return
    place = cache if os.access(cache, os.W_OK) else Path(tempfile.gettempdir())
    with _locked(place):  # against one that looks for what was left, and finds the new one before it is locked
        _remove_what_was_left(place)
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=place))
        lock = _lock(folder)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    lock = _lock(directory)
    try:
        yield
    finally:
        os.close(lock)


def _lock(directory: Path, *, wait: bool = True) -> int:
    """Return a descriptor that holds the directory until it is closed; raises BlockingIOError where another does."""
    descriptor = os.open(directory, os.O_RDONLY)  # no child inherits it
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        os.close(descriptor)
        raise
    return descriptor


def _remove_what_was_left(place: Path) -> None:
    """Remove the directories of rehearsals that were killed, which nobody holds any more."""
    for folder in place.glob(f"{_PREFIX}*"):
        try:
            lock = _lock(folder, wait=False)
        except OSError:  # it is at work, or another user's
            continue
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)
