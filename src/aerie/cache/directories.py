"""Makes the directories of the store, and brings their names to the disk."""

import os
import stat
from contextlib import suppress
from pathlib import Path

DIRECTORY_MODE = 0o755


class StoreError(Exception):
    """The store is not as it must be for what was asked; the message says what was found and what to do."""


def make_directory(path: Path, mode: int) -> None:
    """Make a directory where there is none, and let it be open as `mode` says; raises StoreError.

    Something else, a symlink too, in its place is an error.
    """
    try:
        path.mkdir(mode)
        path.chmod(mode)  # the umask takes away
        sync(path.parent)
    except FileExistsError:
        if not is_directory(path):
            raise StoreError(f"{path} is no directory (a symlink is none): move it away, then try again") from None
        if closed := mode & ~stat.S_IMODE(path.stat().st_mode):  # killed before it was opened, or made by a person
            path.chmod(stat.S_IMODE(path.stat().st_mode) | closed)
    except OSError as error:
        raise StoreError(f"{path} cannot be made: {error.strerror}") from None


def sync(path: Path) -> None:
    """Let the names in a directory be on the disk; raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def exists(path: Path) -> bool:
    """Whether anything has this name, a dangling symlink too."""
    return os.path.lexists(path)


def is_directory(path: Path) -> bool:
    """Whether it is a directory; a symlink to one is none."""
    with suppress(OSError):
        return stat.S_ISDIR(path.lstat().st_mode)
    return False
