"""`aerie model adopt`: takes weights that are on the host already into manifest and layout, without a copy.

Every file is hashed where it lies. Then a second name for each (a hard link) is made in the model's staging, and the
staging is published by one rename; only then the old names go. A kill leaves the old names alone, or both, and the
same command goes on. A file keeps its inode all the time: what has it open or mapped does not notice.
"""

import errno
import hashlib
import json
import os
import re
import shutil
import signal
import stat
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import NoReturn

import aerie
from aerie.cache.directories import StoreError, make_directory, sync
from aerie.cache.hashing import digest
from aerie.cache.headers import is_incomplete, odd_headers, told
from aerie.cache.inside import directory, walk
from aerie.cache.layout import CURRENT, PREVIOUS, Model, Store, load_manifest
from aerie.cache.manifest import ADOPTED, MANIFEST, Manifest, ManifestError, content_revision
from aerie.cache.meter import Meter
from aerie.cache.names import NameRefusedError, check_files, check_revision, model_of
from aerie.cache.originals import Expected, Memory, Original, find_originals, hash_all, is_changed
from aerie.cache.progress import amount
from aerie.cache.sharing import clone, copy_range
from aerie.cache.sources.opening import SourceTextError, open_source
from aerie.cache.sources.published import why_no_model
from aerie.cache.sources.source import SourceError, TryAgainError
from aerie.cache.whose import refuse_the_service
from aerie.cache.words import printable

_TERMINATED = 128 + signal.SIGTERM
_NOT_THE_MODELS = {".git", ".cache", "lost+found", ".aerie"}
"""Of `git clone`, of `hf download --local-dir`, of the file system, of Aerie."""
_HUB = re.compile(r"models--(?P<owner>.+?)--(?P<name>.+)")
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
    as_it_is: bool
    json: bool


@dataclass(slots=True)
class _Origin:
    """What a directory says of itself."""

    name: str
    revision: str | None = None
    source: str = ADOPTED
    options: dict[str, str] = field(default_factory=dict)
    expected: dict[str, Expected] = field(default_factory=dict)
    keep: bool = False
    """Whether the old names stay: they are of the Hub's cache."""


def adopt(options: Options) -> int:
    """Adopt, print where it is now, and return 0; raises StoreError, NameRefusedError, SourceTextError, OSError."""
    refuse_the_service("aerie model adopt")
    signal.signal(signal.SIGTERM, _terminated)
    path = Path(os.path.abspath(options.directory))  # noqa: PTH100 - `..` is to go, a symlink is not
    if options.revision is not None:
        check_revision(options.revision)
    store = Store(options.models_dir.absolute())
    try:
        _check_there(path, store, options.name)
        origin = _origin(path)
        model = store.model(options.name or origin.name)
        _check_place(path, store, model)
        with model.lock("aerie model adopt"):
            revision, manifest = _adopt(options, path, model, origin)
    except SourceTextError:
        raise
    except (SourceError, TryAgainError, ManifestError) as error:
        raise StoreError(str(error)) from None
    published = model.revision_path(revision)
    moved = _moves(options, origin)
    if options.json:
        size = {"files": len(manifest.files), "size": manifest.size, "moved_from": str(path) if moved else None}
        print(json.dumps({"name": model.name, "revision": revision, "path": str(published), **size}))
    else:
        where = f"in {published}, {'moved from' if moved else 'also in'} {path}"
        print(f"{model.name}@{revision}: {len(manifest.files)} files, {amount(manifest.size)}, {where}")
        if model.current() == revision:
            print(f"the service reads it at {model.path / CURRENT}")
    return 0


def _terminated(_number: int, _frame: FrameType | None) -> NoReturn:
    raise SystemExit(_TERMINATED)


def _moves(options: Options, origin: _Origin) -> bool:
    """Return whether the old names go."""
    return not (origin.keep or options.reflink or options.copy)


def _check_there(path: Path, store: Store, name: str | None) -> None:
    """Raise StoreError where the directory is not there: it may be because it was adopted before."""
    if path.exists() or path.is_symlink():
        return
    try:
        model = store.model(name or model_of(path))
        taken = model.current() or next(iter(model.revisions()), None)
    except (StoreError, NameRefusedError):
        taken = None
    if taken is None:
        raise StoreError(f"{path} is not there")
    raise StoreError(
        f"{path} is not there. If it was adopted before, its files are now {model.name}@{taken}, in "
        f"{model.revision_path(taken)}: `aerie model list` shows what is published, and `aerie model verify "
        f"{model.name}` proves it"
    )


def _origin(path: Path) -> _Origin:
    """Return what is known of the directory from where it lies and from a manifest in it."""
    if path.is_symlink() or not path.is_dir():
        what = f"a symlink to {path.resolve()}: name that" if path.is_symlink() else "no directory"
        raise StoreError(f"{path} is {what}")
    if (path / MANIFEST).exists():
        manifest = load_manifest(path)
        told = {file.path: Expected(sha256=file.sha256, size=file.size, by="its manifest") for file in manifest.files}
        # The token goes to the endpoint, and whoever wrote the manifest may have named one of his own.
        return _Origin(manifest.name, manifest.revision, manifest.source, manifest.chosen, told)
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
    if not path.is_dir():  # another adoption has had the lock before
        raise StoreError(f"{path} is not there any more: has another command adopted it? See `aerie model list`")
    skipped = _NOT_THE_MODELS | ({CURRENT, PREVIOUS, *model.revisions()} if path == model.path else set())
    originals = list(find_originals(path, skipped, path.parent.parent / "blobs" if origin.keep else None))
    if (done := _published_before(options, path, model, originals)) is not None:
        revision = done
    else:
        if not originals:
            raise StoreError(f"{path} has no files")
        if why := why_no_model(str(path), (each.path for each in originals)):
            raise StoreError(why)
        check_files(each.path for each in originals)
        if not (options.reflink or options.copy):
            _check_links(originals, model.own)
        memory = Memory(model.own / "hashed")
        manifest = _manifest(options, path, model, origin, originals, memory)
        revision = manifest.revision
        if model.is_published(revision):
            _check_same(load_manifest(model.revision_path(revision)), manifest, path)
        else:
            staging = model.staging(_key(revision))
            try:
                _fill(options, staging / "files", originals, manifest)
            except Exception:
                shutil.rmtree(staging, ignore_errors=True)  # second names and copies, begun anew by the next
                _remove_empty(staging.parent)
                raise
            model.publish(staging / "files", manifest, switch=False)
            shutil.rmtree(staging)
            _remove_empty(staging.parent)
        memory.forget()
    if options.switch:
        model.switch(revision)
    if _moves(options, origin):
        _remove(path, model, revision, originals)
    return revision, load_manifest(model.revision_path(revision))


def _remove_empty(folder: Path) -> None:
    with suppress(OSError):  # another staging is in it
        folder.rmdir()


def _key(revision: str) -> str:
    """Return the staging's key: no fetch goes on from it and writes to what has a name elsewhere, too."""
    return hashlib.sha256(f"adopt {revision}".encode()).hexdigest()[:40]


def _published_before(options: Options, path: Path, model: Model, originals: Sequence[Original]) -> str | None:
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


def _is_same(original: Original, published: Path) -> bool:
    with suppress(OSError):
        return os.path.samestat(original.status, (published / original.path).lstat())
    return False


def _manifest(
    options: Options, path: Path, model: Model, origin: _Origin, originals: Sequence[Original], memory: Memory
) -> Manifest:
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
    proven = bool(expected) and all(each.sha256 or each.git_sha1 for each in expected.values())
    odd = _check_headers(options, path, originals, proven=proven, partly="include" in kept or "exclude" in kept)
    files = hash_all(originals, expected, model.name, memory)
    if odd:
        print(printable(f"aerie model adopt: {odd}"), file=sys.stderr)
    return Manifest(
        name=model.name,
        revision=revision or content_revision(files),
        source=source,
        files=tuple(sorted(files, key=lambda file: file.path)),
        tool=f"aerie {aerie.__version__}",
        fetched=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        options=kept,
    )


def _check_headers(options: Options, path: Path, originals: Sequence[Original], *, proven: bool, partly: bool) -> str:
    """Return what is to be told of the weights' headers.

    Raises StoreError where weights are cut off or missing, and nothing proves that they are to be so.
    """
    odd = odd_headers(path, [each.path for each in originals], partly=partly)
    if not odd:
        return ""
    if is_incomplete(odd) and not proven and not options.as_it_is:
        raise StoreError(
            f"{told(odd)}. Nothing was adopted, and {path} is as it was: mend it first, or name with --source what "
            "it is a copy of; --as-it-is adopts it all the same"
        )
    return f"{told(odd)}; adopted all the same{', by its digests it is to be so' if proven else ''}"


def _many(names: Sequence[str]) -> str:
    more = len(names) - _SHOWN
    return (
        ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "") + (" is" if len(names) == 1 else " are")
    )


def _listed(options: Options, revision: str | None) -> tuple[str, dict[str, str], str | None, dict[str, Expected]]:
    """Return what the source is called, its options, its revision and what it lists."""
    source = open_source(
        str(options.source), revision=revision, endpoint=options.endpoint, token_file=options.token_file
    )
    try:
        listing = source.list()
    finally:
        source.close()
    expected = {
        offer.path: Expected(offer.sha256, offer.git_sha1, offer.size, source.description) for offer in listing.files
    }
    return source.description, dict(source.options), listing.revision or revision, expected


def _check_same(published: Manifest, manifest: Manifest, path: Path) -> None:
    if published.files != manifest.files:
        theirs = {file.path: file.sha256 for file in published.files}
        ours = {file.path: file.sha256 for file in manifest.files}
        others = sorted(name for name in theirs | ours if theirs.get(name) != ours.get(name))
        raise StoreError(
            f"{published.name}@{published.revision} is published with other files than {path} has: {_many(others)} "
            "different. Give it another --revision, or none"
        )


def _fill(options: Options, files: Path, originals: Sequence[Original], manifest: Manifest) -> None:
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
        if is_changed(original, target.lstat()):
            raise StoreError(f"{original.real} was written to meanwhile: end what does that, then try again")
    if options.copy:
        _prove_copies(files, manifest)


def _check_links(originals: Sequence[Original], place: Path) -> None:
    """Raise StoreError, before anything is hashed, where second names will not be had.

    The kernel gives a file that is another's a second name by root alone (fs.protected_hardlinks), and nobody else
    could take its owner's right to write to it away.
    """
    user, linked = os.geteuid(), {place.stat().st_dev}
    for original in originals:
        if original.status.st_dev not in linked:
            _try_link(original, place)  # an overlay has files of several numbers, and links them all
            linked.add(original.status.st_dev)
        if user not in (0, original.status.st_uid):
            raise StoreError(
                f"{original.real} is not yours: it belongs to user {original.status.st_uid}, and this is user {user}. "
                "Run this as its owner or as root, or give --copy, which leaves it where it is"
            )


def _try_link(original: Original, place: Path) -> None:
    name = place / "link"
    name.unlink(missing_ok=True)
    try:
        os.link(original.real, name, follow_symlinks=False)
    except OSError as error:
        raise StoreError(_why_no_link(original, place, error)) from None
    name.unlink()


def _why_no_link(original: Original, files: Path, error: OSError) -> str:
    why = "another file system?" if error.errno == errno.EXDEV else "see who may write there, and lsattr."
    return (
        f"{original.real} cannot be given a second name in {files} ({error.strerror}): {why} "
        "--copy copies it, and leaves it where it is"
    )


def _check_space(files: Path, manifest: Manifest) -> None:
    status = os.statvfs(files)
    free = status.f_bavail * status.f_frsize
    if free < manifest.size + _SPARE:
        raise StoreError(
            f"{files} has {amount(free)} free, and a copy with 1 GiB to spare takes {amount(manifest.size)}"
        )


def _duplicate(options: Options, original: Original, target: Path) -> None:
    source = os.open(original.real, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    copied = os.open(target, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        if is_changed(original, os.fstat(source)):
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


def _remove(path: Path, model: Model, revision: str, originals: Sequence[Original]) -> None:
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
