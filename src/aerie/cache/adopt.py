"""`aerie model adopt`: takes weights that are on the host already into manifest and layout, without a copy.

Every file is hashed where it lies. Then a second name for each (a hard link) is made in the model's staging, and the
staging is published by one rename; only then the old names go. A kill leaves the old names alone, or both, and the
same command goes on. A file keeps its inode all the time: what has it open or mapped does not notice.
"""

import hashlib
import json
import os
import re
import shutil
import signal
import stat
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import NoReturn

import aerie
from aerie.cache.hashing import ShortFileError, digest, git_sha1
from aerie.cache.inside import directory, walk
from aerie.cache.layout import CURRENT, PREVIOUS, Model, Store, StoreError, load_manifest, make_directory, sync
from aerie.cache.manifest import MANIFEST, File, Manifest, ManifestError, content_revision
from aerie.cache.meter import Meter
from aerie.cache.names import check_files, check_revision, model_of
from aerie.cache.progress import amount
from aerie.cache.repair import ADOPTED
from aerie.cache.sharing import clone, copy_range
from aerie.cache.sources.opening import open_source
from aerie.cache.sources.source import SourceError, TryAgainError

_TERMINATED = 128 + signal.SIGTERM
_NOT_THE_MODELS = {".git", ".cache", "lost+found", ".aerie"}
"""Of `git clone`, of `hf download --local-dir`, of the file system, of Aerie."""
_HUB = re.compile(r"models--(?P<owner>.+?)--(?P<name>.+)")
_SHA256 = 64
_SHA1 = 40
_SPARE = 2**30  # bytes left free by a copy
_SHOWN = 20


@dataclass(frozen=True)
class Options:
    """What `aerie model adopt` was told."""

    directory: Path
    name: str | None
    revision: str | None
    source: str | None
    models_dir: Path
    endpoint: str | None
    token_file: Path | None
    reflink: bool
    copy: bool
    switch: bool
    json: bool


@dataclass(frozen=True, slots=True)
class _Original:
    """A file as it lies there: `real` is where its content is, which a link of the Hub's cache leads to."""

    path: str
    real: Path
    status: os.stat_result


@dataclass(slots=True)
class _Expected:
    """What is known of a file before it is hashed."""

    sha256: str | None = None
    git_sha1: str | None = None
    size: int | None = None
    by: str = ""
    """Who says so."""


@dataclass(slots=True)
class _Origin:
    """What a directory says of itself."""

    name: str
    revision: str | None = None
    source: str = ADOPTED
    options: dict[str, str] = field(default_factory=dict)
    expected: dict[str, _Expected] = field(default_factory=dict)
    keep: bool = False
    """Whether the old names stay: they are of the Hub's cache."""


def adopt(options: Options) -> int:
    """Adopt, print where it is now, and return 0; raises StoreError, NameRefusedError, OSError."""
    signal.signal(signal.SIGTERM, _terminated)
    path = Path(os.path.abspath(options.directory))  # noqa: PTH100 - `..` is to go, a symlink is not
    if options.revision is not None:
        check_revision(options.revision)
    store = Store(options.models_dir.absolute())
    try:
        origin = _origin(path)
        model = store.model(options.name or origin.name)
        _check_place(path, store, model)
        with model.lock("aerie model adopt"):
            revision, manifest = _adopt(options, path, model, origin)
    except (SourceError, TryAgainError, ManifestError) as error:
        raise StoreError(str(error)) from None
    published = model.revision_path(revision)
    if options.json:
        size = {"files": len(manifest.files), "size": manifest.size}
        print(json.dumps({"name": model.name, "revision": revision, "path": str(published), **size}))
    else:
        print(f"{model.name}@{revision}: {len(manifest.files)} files, {amount(manifest.size)}, in {published}")
        if model.current() == revision:
            print(f"the service reads it at {model.path / CURRENT}")
    return 0


def _terminated(_number: int, _frame: FrameType | None) -> NoReturn:
    raise SystemExit(_TERMINATED)


def _origin(path: Path) -> _Origin:
    """Return what is known of the directory from where it lies and from a manifest in it."""
    if not path.exists():
        raise StoreError(f"{path} is not there")
    if path.is_symlink() or not path.is_dir():
        what = f"a symlink to {path.resolve()}: name that" if path.is_symlink() else "no directory"
        raise StoreError(f"{path} is {what}")
    if (path / MANIFEST).exists():
        manifest = load_manifest(path)
        told = {file.path: _Expected(sha256=file.sha256, size=file.size, by="its manifest") for file in manifest.files}
        return _Origin(manifest.name, manifest.revision, manifest.source, dict(manifest.options), told)
    if path.parent.name == "snapshots" and (hub := _HUB.fullmatch(path.parent.parent.name)):
        revision = path.name if re.fullmatch(r"[0-9a-f]{40}", path.name) else None
        return _Origin(hub["name"], revision, f"hf:{hub['owner']}/{hub['name']}", keep=True)
    return _Origin(model_of(path))


def _check_place(path: Path, store: Store, model: Model) -> None:
    if path == store.root or path in store.root.parents:
        raise StoreError(f"{path} holds the models directory: name the directory of one model")
    for each in store.models():
        for revision in each.revisions():
            if path.is_relative_to(each.revision_path(revision)) and (path / MANIFEST).exists():
                raise StoreError(f"{path} is published already, as {each.name}@{revision}")
    if path != model.path and path.is_relative_to(model.path):
        raise StoreError(f"{path} lies in {model.path}: adopt that, or move it out first")


def _adopt(options: Options, path: Path, model: Model, origin: _Origin) -> tuple[str, Manifest]:
    originals = list(_originals(path, model, origin))
    if (done := _published_before(options, path, model, originals)) is not None:
        revision = done
    else:
        if not originals:
            raise StoreError(f"{path} has no files")
        check_files(each.path for each in originals)
        manifest = _manifest(options, model, origin, originals)
        revision = manifest.revision
        if model.is_published(revision):
            _check_same(load_manifest(model.revision_path(revision)), manifest, path)
        else:
            staging = model.staging(_key(revision))
            _fill(options, staging / "files", originals, manifest)
            model.publish(staging / "files", manifest, switch=False)
            shutil.rmtree(staging)
    if options.switch:
        model.switch(revision)
    if not (origin.keep or options.reflink or options.copy):
        _remove(path, model, revision, originals)
    return revision, load_manifest(model.revision_path(revision))


def _key(revision: str) -> str:
    """Return the staging's key: no fetch goes on from it and writes to what has a name elsewhere, too."""
    return hashlib.sha256(f"adopt {revision}".encode()).hexdigest()[:40]


def _originals(path: Path, model: Model, origin: _Origin) -> Iterator[_Original]:
    blobs = path.parent.parent / "blobs" if origin.keep else None
    skipped = set(_NOT_THE_MODELS)
    if path == model.path:
        skipped |= {CURRENT, PREVIOUS, *model.revisions()}
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
            yield _Original(entry.path, real, status)


def _blob(link: Path, blobs: Path) -> Path:
    try:
        real = link.resolve(strict=True)
    except (OSError, RuntimeError):
        raise StoreError(f"{link} leads to nothing: the download was not finished, or its content is gone") from None
    if real.parent != blobs.resolve():
        raise StoreError(f"{link} leads out of the cache, to {real}")
    return real


def _published_before(options: Options, path: Path, model: Model, originals: Sequence[_Original]) -> str | None:
    """Return the revision that has been adopted from here already, where what is left here is only its old names."""
    if options.reflink or options.copy:
        return None
    if not originals and path == model.path:
        return model.current()
    for revision in model.revisions():
        published = model.revision_path(revision)
        if not originals and all((published / folder).is_dir() for folder in _folders(path)):
            return revision  # killed when all files were gone, and not yet their directories
        if originals and all(_is_same(each, published) for each in originals):
            return revision
    return None


def _folders(path: Path) -> list[str]:
    with directory(path) as root:
        return [entry.path for entry in walk(root)]


def _is_same(original: _Original, published: Path) -> bool:
    with suppress(OSError):
        return os.path.samestat(original.status, (published / original.path).lstat())
    return False


def _manifest(options: Options, model: Model, origin: _Origin, originals: Sequence[_Original]) -> Manifest:
    expected = dict(origin.expected)
    source, revision = origin.source, options.revision or origin.revision
    kept = dict(origin.options)
    if options.source is not None:
        source, kept, revision, listed = _listed(options, revision)
        expected = listed
    if missing := sorted(set(expected) - {each.path for each in originals}):
        raise StoreError(f"{_many(missing)} missing, which {expected[missing[0]].by} lists. Nothing was adopted")
    if expected and (more := sorted({each.path for each in originals} - set(expected))):
        by = next(iter(expected.values())).by
        raise StoreError(f"{_many(more)} not what {by} lists: move it away first. Nothing was adopted")
    files = _hash_all(originals, expected, model.name)
    return Manifest(
        name=model.name,
        revision=revision or content_revision(files),
        source=source,
        files=tuple(sorted(files, key=lambda file: file.path)),
        tool=f"aerie {aerie.__version__}",
        fetched=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        options=kept,
    )


def _many(names: Sequence[str]) -> str:
    more = len(names) - _SHOWN
    return (
        ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "") + (" is" if len(names) == 1 else " are")
    )


def _listed(options: Options, revision: str | None) -> tuple[str, dict[str, str], str | None, dict[str, _Expected]]:
    """Return what the source is called, its options, its revision and what it lists."""
    source = open_source(
        str(options.source), revision=revision, endpoint=options.endpoint, token_file=options.token_file
    )
    try:
        listing = source.list()
    finally:
        source.close()
    expected = {
        offer.path: _Expected(offer.sha256, offer.git_sha1, offer.size, source.description) for offer in listing.files
    }
    return source.description, dict(source.options), listing.revision or revision, expected


def _hash_all(originals: Sequence[_Original], expected: dict[str, _Expected], name: str) -> list[File]:
    """Hash every file in parallel, and compare it with what is known of it; raises StoreError naming the wrong ones."""
    largest_first = sorted(originals, key=lambda each: -each.status.st_size)
    total = sum(each.status.st_size for each in originals)
    with Meter(f"adopt {name}", total) as meter, ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        try:
            pairs = list(pool.map(lambda each: _hash(each, expected.get(each.path), meter), largest_first))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            meter.stop()
            raise
    if wrong := sorted(message for _, message in pairs if message):
        raise StoreError(f"{'; '.join(wrong[:_SHOWN])}. Nothing was adopted")
    return [file for file, _ in pairs if file is not None]


def _hash(original: _Original, expected: _Expected | None, meter: Meter) -> tuple[File | None, str]:
    size = original.status.st_size
    descriptor = os.open(original.real, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        file = File(original.path, size, *digest(descriptor, size, meter.count))
        if _changed(original, os.fstat(descriptor)):
            return None, f"{original.real} was written to while it was read: end what does that, then try again"
        return file, _mismatch(original, expected, file, descriptor)
    except ShortFileError:
        return None, f"{original.real} was truncated while it was read: end what does that, then try again"
    finally:
        os.close(descriptor)


def _changed(original: _Original, status: os.stat_result) -> bool:
    was = original.status
    return (was.st_ino, was.st_size, was.st_mtime_ns) != (status.st_ino, status.st_size, status.st_mtime_ns)


def _mismatch(original: _Original, expected: _Expected | None, file: File, descriptor: int) -> str:
    if expected is None:
        expected = _by_blob(original)
    if expected.size is not None and expected.size != file.size:
        return f"{original.path} has {file.size:,} bytes, and {expected.size:,} by {expected.by}"
    if expected.sha256 is not None and expected.sha256 != file.sha256:
        return f"{original.path} has SHA-256 {file.sha256}, and {expected.sha256} by {expected.by}"
    if expected.git_sha1 is not None and expected.git_sha1 != (found := git_sha1(descriptor, file.size)):
        return f"{original.path} has git's name {found}, and {expected.git_sha1} by {expected.by}"
    return ""


def _by_blob(original: _Original) -> _Expected:
    """Return what the name of the Hub's blob says of its content."""
    name = original.real.name
    if original.real.parent.name == "blobs" and re.fullmatch(r"[0-9a-f]+", name):
        if len(name) == _SHA256:
            return _Expected(sha256=name, by="the Hub's name for it")
        if len(name) == _SHA1:
            return _Expected(git_sha1=name, by="the Hub's name for it")
    return _Expected()


def _check_same(published: Manifest, manifest: Manifest, path: Path) -> None:
    if published.files != manifest.files:
        theirs = {file.path: file.sha256 for file in published.files}
        ours = {file.path: file.sha256 for file in manifest.files}
        others = sorted(name for name in theirs | ours if theirs.get(name) != ours.get(name))
        raise StoreError(
            f"{published.name}@{published.revision} is published with other files than {path} has: {_many(others)} "
            "different. Give it another --revision, or none"
        )


def _fill(options: Options, files: Path, originals: Sequence[_Original], manifest: Manifest) -> None:
    """Let the staging hold these files under their names; what a killed adoption left goes first."""
    with directory(files) as root:
        for entry in list(walk(root)):
            if not stat.S_ISDIR(entry.status.st_mode):
                (files / entry.path).unlink()
    if options.copy:
        _check_space(files, manifest)
    for original in originals:
        target = files / original.path
        for folder in reversed(target.relative_to(files).parents[:-1]):
            make_directory(files / folder, 0o700)
        if options.copy or options.reflink:
            _duplicate(options, original, target)
            continue
        try:
            os.link(original.real, target, follow_symlinks=False)
        except OSError as error:
            raise StoreError(_why_no_link(original, files, error)) from None
        if _changed(original, target.lstat()):
            raise StoreError(f"{original.real} was written to meanwhile: end what does that, then try again")
    if options.copy:
        _prove_copies(files, manifest)


def _why_no_link(original: _Original, files: Path, error: OSError) -> str:
    return (
        f"{original.real} cannot be given a second name in {files} ({error.strerror}): another file system? "
        "--copy copies it, and leaves it where it is"
    )


def _check_space(files: Path, manifest: Manifest) -> None:
    status = os.statvfs(files)
    free = status.f_bavail * status.f_frsize
    if free < manifest.size + _SPARE:
        raise StoreError(
            f"{files} has {amount(free)} free, and a copy with 1 GiB to spare takes {amount(manifest.size)}"
        )


def _duplicate(options: Options, original: _Original, target: Path) -> None:
    source = os.open(original.real, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    copied = os.open(target, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        if _changed(original, os.fstat(source)):
            raise StoreError(f"{original.real} was written to meanwhile: end what does that, then try again")
        if clone(source, copied):
            return
        if options.reflink:
            raise StoreError(
                f"this file system cannot share the blocks of {original.real}: leave --reflink out, and it is moved "
                "by renaming, or give --copy"
            )
        copy_range(source, copied, 0, original.status.st_size)
    finally:
        os.close(source)
        os.close(copied)


def _prove_copies(files: Path, manifest: Manifest) -> None:
    with Meter(f"prove {manifest.name}", manifest.size) as meter:
        for file in manifest.files:
            with (files / file.path).open("rb") as stream:
                if digest(stream.fileno(), file.size, meter.count)[0] != file.sha256:
                    raise StoreError(f"the copy of {file.path} is not what was read: does the disk err?")


def _remove(path: Path, model: Model, revision: str, originals: Sequence[_Original]) -> None:
    """Remove the old names; a file that is not the published one by now stays."""
    published = model.revision_path(revision)
    for original in originals:
        old = path / original.path
        with suppress(FileNotFoundError):
            if os.path.samestat(old.lstat(), (published / original.path).lstat()):
                old.unlink()
    names = [file.path for file in load_manifest(published).files]
    folders = {path / folder for name in names for folder in Path(name).parents}
    with suppress(FileNotFoundError):
        if path != model.path and (path / MANIFEST).is_file() and originals:
            (path / MANIFEST).unlink()
    for folder in sorted(folders, key=lambda each: -len(each.parts)):
        with suppress(OSError):  # something else is in it, or it is a mount
            if folder != model.path:
                folder.rmdir()
    with suppress(OSError):
        sync(path if path.exists() else path.parent)
