"""Weights from a directory of this machine: a disk, an NFS mount, a cache of the Hub's, another of Aerie's stores."""

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

from aerie.cache.inside import open_patiently
from aerie.cache.manifest import MANIFEST
from aerie.cache.names import is_revision
from aerie.cache.sources.published import LARGEST_MANIFEST, is_models, published
from aerie.cache.sources.source import Listing, Offer, SourceError, TryAgainError

_PIECE = 2**20
_LATER = {
    errno.ESTALE, errno.EIO, errno.ETIMEDOUT, errno.EREMOTEIO, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.EAGAIN,
}  # fmt: skip
"""What a file server that is away for a while gives, and a file on which somebody has a lease."""
_SPECIAL = {stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFBLK: "a device", stat.S_IFCHR: "a device"}


class DirectorySource:
    """The files of a directory, or of the revision that it publishes."""

    def __init__(self, path: Path, *, revision: str | None = None) -> None:
        self.description = str(path)
        self.options: dict[str, str] = {}
        self._path = path
        self._revision = revision
        self._files: dict[str, Path] = {}
        self._held: int | None = None

    def list(self) -> Listing:
        """Return the directory's files; of a model of Aerie's those of its revision, with the manifest's digests.

        Raises SourceError where there is no such directory, where it holds links out of it, links to directories or
        what is no file; TryAgainError where a file server is away.
        """
        with self._words(self._path):
            root = self._root().resolve(strict=True)
            self._hold(root)
            found = self._walk(root)
            self._files = {name: path for name, (path, _) in found.items()}
            sizes = {name: (status.st_size, _version(status)) for name, (_, status) in found.items()}
            if MANIFEST in found:
                return published(self._manifest(root), str(self._path), sizes, self._revision)
        if not sizes:
            raise SourceError(f"{self._path} has no files: is it mounted?")
        offers = (Offer(name, size, version=version) for name, (size, version) in sorted(sizes.items()))
        return Listing(tuple(offers), None)

    def read(self, offer: Offer, start: int, end: int) -> Iterator[bytes]:
        """Yield the bytes [start, end) of a file that `list` has given.

        Raises SourceError where the file is another one now, TryAgainError where a file server is away.
        """
        path = self._files[offer.path]
        with self._words(path):
            # A pipe that took the file's place would let the opening wait for ever.
            file = open_patiently(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            self._unchanged(file, path, offer)
            at = start
            while at < end:
                with self._words(path):
                    piece = os.pread(file, min(_PIECE, end - at), at)
                if not piece:
                    raise SourceError(f"{path} ended at {at} bytes while it was read: {_ANOTHER}")
                at += len(piece)
                if at == end:
                    self._unchanged(file, path, offer)
                yield piece
        finally:
            os.close(file)

    def close(self) -> None:
        """Let the revision go."""
        if self._held is not None:
            os.close(self._held)
            self._held = None

    def _root(self) -> Path:
        """Return the revision's directory where the path is that of a model of Aerie's, else the path."""
        model = self._path.parent if self._path.name in ("current", "previous") else self._path
        if self._revision is not None and is_revision(self._revision) and (model / self._revision / MANIFEST).is_file():
            return model / self._revision
        if (self._path / "current" / MANIFEST).is_file() and not (self._path / MANIFEST).exists():
            return self._path / "current"
        return self._path

    def _hold(self, root: Path) -> None:
        """Keep `aerie model prune` off the revision while it is read; where the file system cannot, nothing does."""
        self.close()
        self._held = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        with contextlib.suppress(OSError):
            fcntl.flock(self._held, fcntl.LOCK_SH | fcntl.LOCK_NB)

    def _walk(self, root: Path) -> dict[str, tuple[Path, os.stat_result]]:
        """Return each file's real path and status by its name; no link to a directory is followed."""
        within = [root]
        if root.parent.name == "snapshots" and (root.parent.parent / "blobs").is_dir():
            # The Hub's cache: a revision is links to the content beside it.
            within.append(root.parent.parent / "blobs")
        found = {}
        left = [root]
        while left:
            with os.scandir(left.pop()) as entries:
                for entry in entries:
                    path = Path(entry.path)
                    name = path.relative_to(root).as_posix()
                    if not is_models(name):
                        continue
                    real = self._followed(path, within) if entry.is_symlink() else path
                    status = real.stat(follow_symlinks=False)
                    if stat.S_ISDIR(status.st_mode) and not entry.is_symlink():
                        left.append(path)
                    else:
                        _check_kind(path, status)
                        found[name] = (real, status)
        return found

    def _followed(self, link: Path, within: Sequence[Path]) -> Path:
        try:
            real = link.resolve(strict=True)
        except (FileNotFoundError, RuntimeError):
            raise SourceError(
                f"{link} is a link to nothing: the download that it belongs to was not finished, or its content is gone"
            ) from None
        if not any(real.is_relative_to(directory) for directory in within):
            raise SourceError(f"{link} leads out of the directory, to {real}: put the file itself there")
        return real

    def _manifest(self, root: Path) -> str:
        path = self._files[MANIFEST]
        if path != root / MANIFEST or path.stat().st_size > LARGEST_MANIFEST:
            raise SourceError(f"{root / MANIFEST} is a link, or far too large: it is not one that Aerie wrote")
        try:
            return path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise SourceError(f"{path} is not text: it is not one that Aerie wrote") from None

    def _unchanged(self, file: int, path: Path, offer: Offer) -> None:
        with self._words(path):
            status = os.fstat(file)
        if _version(status) != offer.version:
            raise SourceError(f"{path} has changed since it was listed: {_ANOTHER}")

    @contextlib.contextmanager
    def _words(self, path: Path) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            where = error.filename if isinstance(error.filename, str) else path
            if error.errno in _LATER:
                raise TryAgainError(f"{where} could not be read: {error.strerror}") from error
            raise SourceError(f"{where} {_REASONS.get(error.errno or 0, f'could not be read: {error}')}") from error


_ANOTHER = "let what writes it end, then run this again"
_REASONS = {
    errno.ENOENT: "is not there: is the path right, and the disk or share mounted?",
    errno.ENOTDIR: "is no directory; a source is the directory that the files are in",
    errno.EACCES: "may not be read by this user: run this as root, or let the user read it",
    errno.EPERM: "may not be read by this user: run this as root, or let the user read it",
    errno.ELOOP: "became a link since it was listed: run this again",
}


def _check_kind(path: Path, status: os.stat_result) -> None:
    kind = stat.S_IFMT(status.st_mode)
    if kind == stat.S_IFDIR:
        raise SourceError(f"{path} is a link to a directory: put the directory itself there, or take the link away")
    if kind != stat.S_IFREG:
        raise SourceError(f"{path} is {_SPECIAL.get(kind, 'no file')}, which no model has: take it away")


def _version(status: os.stat_result) -> str:
    return f"{status.st_size}-{status.st_mtime_ns}-{status.st_ino}"
