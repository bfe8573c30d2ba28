"""Brings the files of a revision to the disk, with the modes that the service needs, before it appears."""

import os
import stat
from contextlib import suppress
from pathlib import Path

from aerie.cache.directories import DIRECTORY_MODE, StoreError
from aerie.cache.inside import directory, open_inside, walk
from aerie.cache.manifest import MANIFEST, Manifest

FILE_MODE = 0o444


def settle(path: Path, manifest: Manifest) -> None:
    """Let the directory hold just what the manifest lists, with its modes, all of it on the disk; write the manifest.

    Raises StoreError where it holds something else; nothing is removed.
    """
    expected = {file.path: file.size for file in manifest.files}
    with directory(path) as root:
        for entry in walk(root):
            if entry.error is not None:
                raise entry.error
            _settle_entry(root, path, entry.path, expected)
        if expected:
            raise StoreError(f"{path} lacks {min(expected)}, which the manifest lists")
        _write_manifest(root, manifest)
        _settle_mode(root, DIRECTORY_MODE)


def _settle_entry(root: int, path: Path, name: str, expected: dict[str, int]) -> None:
    status = os.stat(name, dir_fd=root, follow_symlinks=False)
    if stat.S_ISDIR(status.st_mode):
        with directory(path / name) as descriptor:
            _settle_mode(descriptor, DIRECTORY_MODE)
        return
    if name in {MANIFEST, f"{MANIFEST}.new"} and stat.S_ISREG(status.st_mode):
        return
    if not stat.S_ISREG(status.st_mode) or expected.get(name) != status.st_size:
        wanted = f"a file of {expected[name]} bytes" if name in expected else "nothing of that name"
        found = f"a file of {status.st_size} bytes" if stat.S_ISREG(status.st_mode) else "no regular file"
        raise StoreError(f"{path / name} is {found}, and the manifest lists {wanted}")
    del expected[name]
    descriptor = open_inside(root, name)
    try:
        _settle_mode(descriptor, FILE_MODE)
    finally:
        os.close(descriptor)


def _settle_mode(descriptor: int, mode: int) -> None:
    status = os.fstat(descriptor)
    if os.geteuid() == 0 and status.st_uid != 0:  # adopted: its owner could make it writable again
        os.fchown(descriptor, 0, 0)
    if stat.S_IMODE(status.st_mode) != mode:
        os.fchmod(descriptor, mode)
    os.fsync(descriptor)


def _write_manifest(root: int, manifest: Manifest) -> None:
    draft = f"{MANIFEST}.new"
    with suppress(FileNotFoundError):
        os.unlink(draft, dir_fd=root)
    with os.fdopen(open_inside(root, draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as stream:
        stream.write(manifest.to_json().encode())
        stream.flush()
        os.fchmod(stream.fileno(), FILE_MODE)
        os.fsync(stream.fileno())
    os.rename(draft, MANIFEST, src_dir_fd=root, dst_dir_fd=root)
