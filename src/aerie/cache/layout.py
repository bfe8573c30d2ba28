"""Where models lie on disk, who works on them, and how a revision appears and is switched to.

<models>/<name>/<revision>/     published: whole or not there; aerie-manifest.json is in it
                current         relative symlink to the revision in service
                previous        the one that was in service before
                .aerie/         lock, and what is being made; nobody else's to read
"""

import ctypes
import errno
import fcntl
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from aerie.cache.directories import DIRECTORY_MODE, StoreError, exists, is_directory, make_directory, sync
from aerie.cache.inside import directory, open_inside
from aerie.cache.manifest import MANIFEST, Manifest, ManifestError, read_manifest
from aerie.cache.names import NameRefusedError, check_model, check_revision, is_revision
from aerie.cache.settling import settle

CURRENT = "current"
PREVIOUS = "previous"
_OWN = ".aerie"
_OWN_MODE = 0o700
_LONGEST_MANIFEST = 256 * 2**20  # bytes; 595 GB take 1.5 MB
_LOOKS = 5
_SHORTEST = 7  # digits, as git shortens a commit
_AT_FDCWD = -100
_EXCHANGE = 2  # linux/fs.h, RENAME_EXCHANGE


class BusyError(StoreError):
    """Somebody else works on this model; the message says who."""


@dataclass(frozen=True, slots=True)
class Store:
    """All models of one directory."""

    root: Path

    def model(self, name: str) -> "Model":
        """Return the model of this name, there or not; raises NameRefusedError."""
        return Model(self.root, check_model(name))

    def kept(self, name: str) -> "Model":
        """Return the model of this name; raises StoreError where Aerie keeps none, NameRefusedError."""
        model = self.model(name)
        if model.path.is_symlink():
            target = model.path.readlink()
            raise StoreError(f"{model.path} is a symlink to {target}, and a model is a directory: give that one's name")
        if model.is_kept:
            return model
        others = [each.name for each in self.models()]
        raise StoreError(f"there is no model {name} in {self.root}{_instead(model, others)}")

    def models(self) -> list["Model"]:
        """Return those that Aerie keeps, by name; raises StoreError where the directory cannot be read."""
        try:
            with os.scandir(self.root) as entries:
                names = sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
        except OSError as error:
            raise StoreError(f"the models directory {self.root} cannot be read: {error.strerror}") from None
        found = []
        for name in names:
            with suppress(NameRefusedError, PermissionError):
                model = self.model(name)
                if model.is_kept:
                    model.revisions()  # one that this user may not list is left out, see `left_out`
                    found.append(model)
        return found

    def left_out(self) -> dict[str, str]:
        """Return what has a model's name and is none, nor a person's directory or file, with why. Raises OSError."""
        found = {}
        for path in sorted(self.root.iterdir()):
            try:
                check_model(path.name)
                if path.is_symlink():
                    found[str(path)] = f"it is a symlink to {path.readlink()}, and a model is a directory"
                elif is_directory(path):
                    os.scandir(path).close()
            except NameRefusedError:
                continue
            except OSError as error:
                found[str(path)] = f"it cannot be looked into: {error.strerror}"
        return found


@dataclass(frozen=True, slots=True)
class Model:
    """One model; what changes it is called with its lock held."""

    root: Path
    name: str

    @property
    def path(self) -> Path:
        """Its directory."""
        return self.root / self.name

    @property
    def own(self) -> Path:
        """Aerie's own directory in it."""
        return self.path / _OWN

    @property
    def is_kept(self) -> bool:
        """Whether Aerie keeps it; a directory that a person made there is not touched."""
        if is_directory(self.own) or self.revisions():
            return True
        with suppress(StoreError):
            return is_directory(self.path) and self.current() is not None  # its revisions were removed by hand
        return False

    def revision_path(self, revision: str) -> Path:
        """Return where this revision is or will be; raises NameRefusedError."""
        return self.path / check_revision(revision)

    def is_published(self, revision: str) -> bool:
        """Whether this revision is there."""
        return is_directory(self.revision_path(revision))

    def revisions(self) -> list[str]:
        """Return the published ones, the one that was published last first."""
        found = []
        with suppress(FileNotFoundError, NotADirectoryError), os.scandir(self.path) as entries:
            for entry in entries:
                with suppress(NameRefusedError):
                    if entry.is_dir(follow_symlinks=False):
                        # The manifest is written last and never again: its time is that of the publishing.
                        found.append((_changed(Path(entry.path, MANIFEST)), check_revision(entry.name)))
        return [revision for _, revision in sorted(found, reverse=True)]

    def manifest(self, revision: str) -> Manifest:
        """Return the manifest of a published revision; raises ManifestError, also where it is another one's."""
        path = self.revision_path(revision)
        manifest = load_manifest(path)
        if manifest.revision != revision:
            raise ManifestError(
                f"{path}: its manifest is that of revision {manifest.revision}: it was renamed or copied by hand. Move "
                f"{path} away, and adopt it from there"
            )
        return manifest

    def current(self) -> str | None:
        """Return the revision in service, None before the first; raises StoreError where `current` is none of ours."""
        return self._linked(CURRENT)

    def previous(self) -> str | None:
        """Return the revision that was in service before, None where there is none; raises StoreError as `current`."""
        linked = self._linked(PREVIOUS)
        return None if linked == self._linked(CURRENT) else linked  # equal: killed within the first half of a switch

    def find(self, text: str) -> str:
        """Return the published revision that is meant by `current`, `previous`, 40 digits, or 7 and more that begin it.

        Raises StoreError where it is none, or more than one.
        """
        published = self.revisions()
        if text in (CURRENT, PREVIOUS):
            linked = self.current() if text == CURRENT else self.previous()
            if linked is None:
                raise StoreError(f"{self.name} has no {text} revision in {self.root}")
            if linked not in published:
                mend = ", nor is any other revision of it: fetch or adopt it again"
                if published:
                    switch = f"`aerie model rollback {self.name} REVISION` lets one be current"
                    mend = f": {self._published(published)}: {switch}"
                raise StoreError(f"{self.path / text} points to {linked}, which is not there{mend}")
            return linked
        found = [each for each in published if each == text or (len(text) >= _SHORTEST and each.startswith(text))]
        if len(found) != 1:
            what = f"{'means more than one' if found else 'is not published'} in {self.root}"
            if text and not found and any(each.startswith(text) for each in published):
                what = f"is too short, {_SHORTEST} digits are needed"
            raise StoreError(f"{self.name}@{text} {what}: {self._published(published)}")
        return found[0]

    def _published(self, revisions: list[str]) -> str:
        return "there are " + ", ".join(revisions) if revisions else "there is no revision of it"

    def _linked(self, name: str) -> str | None:
        path = self.path / name
        try:
            return check_revision(str(path.readlink()))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except NameRefusedError:
            found = f"points to {str(path.readlink())!r}"
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise StoreError(f"{path} cannot be read: {error.strerror}: run this as root") from None
            found = "is no symlink"
        raise StoreError(f"{path} {found}, expected a symlink to a revision beside it: move it away, then try again")

    @contextmanager
    def lock(self, command: str, *, wait: bool = False) -> Iterator[None]:
        """Work on this model alone, as `command`; the directories are made where there are none.

        Raises BusyError where another process does, unless it is to `wait` for it; StoreError where the directories
        cannot be made or are none of ours.
        """
        descriptor, made = self._lock(wait=wait)
        try:
            with suppress(OSError):  # a full disk takes no new name; the old one would be wrong
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, f"`{command}` (process {os.getpid()})\n".encode(), 0)
            yield
        finally:
            with suppress(OSError):
                self._leave_nothing(made=made)
            os.close(descriptor)  # the name stays: who was refused in this moment still reads it

    def _lock(self, *, wait: bool) -> tuple[int, bool]:
        """Return the lock's descriptor, and whether the model's directory was made for it. Raises as `lock`."""
        path = self.own / "lock"
        made = False
        while True:
            made |= not exists(self.path)
            self._make_own()
            try:
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            except FileNotFoundError:  # who had it last has left nothing
                continue
            except OSError as error:
                raise StoreError(f"{path} cannot be opened: {error.strerror}") from None
            try:
                self._take(descriptor, wait=wait)
                with suppress(FileNotFoundError):
                    if os.path.samestat(path.lstat(), os.fstat(descriptor)):
                        return descriptor, made
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)

    def _take(self, descriptor: int, *, wait: bool) -> None:
        if not _locked(descriptor, wait=wait):
            raise self._busy_with(_who(descriptor))

    def _busy_with(self, who: str) -> BusyError:
        return BusyError(f"{self.name} is being worked on by {who}: wait for its end, then try again")

    def leave_to_others(self) -> None:
        """Raise BusyError where somebody works on this model, as far as this user may know; nothing is written."""
        if who := self.busy():
            raise self._busy_with(who)

    def _leave_nothing(self, *, made: bool) -> None:
        """Take the lock away, and what was made for it, where there is nothing besides. Raises OSError."""
        if [each.name for each in self.own.iterdir()] != ["lock"] or self.revisions():
            return
        (self.own / "lock").unlink()
        self.own.rmdir()
        if made:
            self.path.rmdir()

    def busy(self) -> str | None:
        """Return who works on this model now, None where nobody does, as far as this user may know."""
        try:
            descriptor = os.open(self.own / "lock", os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return _who(descriptor)
        finally:
            os.close(descriptor)
        return None

    def _make_own(self) -> None:
        for path, mode in ((self.path, DIRECTORY_MODE), (self.own, _OWN_MODE)):
            make_directory(path, mode)

    def staging_keys(self) -> list[str] | None:
        """Return the keys of what is being made, or was left half made; None where this user may not look."""
        try:
            with os.scandir(self.own / "staging") as entries:
                return sorted(
                    each.name for each in entries if is_revision(each.name) and each.is_dir(follow_symlinks=False)
                )
        except PermissionError:
            return None
        except (FileNotFoundError, NotADirectoryError):
            return []

    def staging_path(self, key: str) -> Path:
        """Return where what has this key, 40 hexadecimal digits, is being made; raises NameRefusedError."""
        return self.own / "staging" / check_revision(key)

    def staging(self, key: str) -> Path:
        """Return that directory, made where there is none, with `files` in it; raises StoreError."""
        path = self.staging_path(key)
        for each in (path.parent, path, path / "files"):
            make_directory(each, _OWN_MODE)
        return path

    def publish(self, files: Path, manifest: Manifest, *, switch: bool = True) -> Path:
        """Let `files`, a directory that holds what the manifest lists, appear as its revision, and return its path.

        All is on the disk before; a crash leaves it unpublished, published, or published and switched to. Raises
        StoreError where there is such a revision already, or the directory does not hold these files; OSError.
        """
        target = self.revision_path(manifest.revision)
        if exists(target):
            raise StoreError(f"{target} is there already")
        settle(files, manifest)
        files.rename(target)
        sync(target)
        sync(files.parent)
        sync(self.path)
        if switch:
            self.switch(manifest.revision)
        return target

    def switch(self, revision: str) -> None:
        """Let `current` be this revision, and `previous` what it was; raises StoreError where it is not published.

        A crash leaves the old state or the new one. Where no file system can exchange two names, it may forget what
        was `previous` before.
        """
        if not self.is_published(revision):
            raise StoreError(f"{self.name}@{revision} is not published")
        old = self.current()
        if old == revision:
            return
        if old is not None and not self.is_published(old):
            old = None  # it was removed by hand: what was previous is worth more than its name
        if self._linked(PREVIOUS) == revision and old is not None and self._exchange():
            sync(self.path)
            return
        if old is not None:
            self._link(PREVIOUS, old)
        self._link(CURRENT, revision)

    def _link(self, name: str, revision: str) -> None:
        self._linked(name)  # what a person put there is not replaced
        self._make_own()
        draft = self.own / f"{name}.new"
        with suppress(FileNotFoundError):
            draft.unlink()
        draft.symlink_to(revision)
        draft.rename(self.path / name)
        sync(self.path)

    def _exchange(self) -> bool:
        """Let `current` and `previous` change places; return False where this file system cannot do it."""
        names = (os.fsencode(self.path / CURRENT), os.fsencode(self.path / PREVIOUS))
        rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
        return rename is not None and rename(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _EXCHANGE) == 0


def load_manifest(path: Path) -> Manifest:
    """Return the manifest of the revision at `path`, or that `path` links to; raises ManifestError naming the file."""
    file = path / MANIFEST
    try:
        with directory(path.resolve()) as root, os.fdopen(open_inside(root, MANIFEST), "rb") as stream:
            content = stream.read(_LONGEST_MANIFEST + 1)
    except OSError as error:
        raise ManifestError(f"{file} cannot be read: {error.strerror}") from None
    if len(content) > _LONGEST_MANIFEST:
        raise ManifestError(f"{file} is no manifest: it is larger than {_LONGEST_MANIFEST} bytes")
    try:
        return read_manifest(content.decode())
    except UnicodeDecodeError as error:
        raise ManifestError(f"{file} is no manifest: {error}") from None
    except ManifestError as error:
        raise ManifestError(f"{file}: {error}") from None


def _instead(model: Model, others: Sequence[str]) -> str:
    """Return what a person may have meant who named a model that is not there."""
    if is_directory(model.path):
        return f": the directory {model.name} there is none of Aerie's: `aerie model adopt` takes the weights in one"
    if not others:
        return ", nor any other"
    folded = {each.casefold(): each for each in others}
    if close := get_close_matches(model.name.casefold(), folded, 1):
        return f": is {folded[close[0]]} meant? There are {', '.join(others)}"
    return f"; there are {', '.join(others)}"


def _locked(descriptor: int, *, wait: bool) -> bool:
    for _ in range(_LOOKS):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            time.sleep(0.02)  # `aerie model list` takes it for a moment, to see whether it is taken
        else:
            return True
    return False


def _who(lock: int) -> str:
    for _ in range(_LOOKS):
        if name := os.pread(lock, 200, 0).decode(errors="replace").strip():
            return name
        time.sleep(0.01)  # it has the lock, and is about to write who it is
    return "another process"


def _changed(path: Path) -> int:
    with suppress(OSError):
        return path.lstat().st_mtime_ns
    return 0
