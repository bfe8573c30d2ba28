"""`aerie model list`: what is published, in service, in use, and half fetched."""

import json
import signal
import stat
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from aerie.cache.directories import StoreError
from aerie.cache.inside import directory, walk
from aerie.cache.layout import CURRENT, Model, Store, load_manifest
from aerie.cache.manifest import ManifestError
from aerie.cache.progress import amount
from aerie.cache.users import in_use
from aerie.cache.words import printable

_BLOCK = 512  # bytes of st_blocks


@dataclass(frozen=True)
class Options:
    """What `aerie model list` was told."""

    models_dir: Path
    json: bool


@dataclass(frozen=True, slots=True)
class Revision:
    """A published revision, as a program reads it."""

    revision: str
    path: str
    state: str | None
    """`current`, `previous` or None."""
    files: int | None
    """None where the manifest cannot be used."""
    size: int | None
    """Bytes."""
    source: str | None
    chosen: dict[str, str] | None
    """Which of the model's files it has, by `include` and `exclude`; empty where it has all."""
    fetched: str | None
    in_use: bool | None
    """Whether somebody holds it or has a file of it open; None where that cannot be told."""
    error: str | None


@dataclass(frozen=True, slots=True)
class Staged:
    """What is being fetched or adopted, or was left half so."""

    key: str
    """The revision, or a stand-in where it is not known yet."""
    size: int
    """Bytes on the disk so far."""
    files: int
    busy: str | None
    """Who works on the model now."""


def listing(options: Options) -> int:
    """Print all models and return 0, or 1 where the state of one cannot be read or what it serves is gone.

    Raises StoreError where the models directory cannot be read.
    """
    with _ended_by_its_reader():
        return _list(options)


@contextmanager
def _ended_by_its_reader() -> Iterator[None]:
    """Let this process end without a word where nobody reads its output any more, as with `| head`."""
    before = signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        yield
        sys.stdout.flush()
    finally:
        signal.signal(signal.SIGPIPE, before)


def _list(options: Options) -> int:
    store = Store(options.models_dir)
    models = [_described(model) for model in store.models()]
    left_out = store.left_out()
    if options.json:
        left = [{"path": path, "why": why} for path, why in left_out.items()]
        json.dump({"models": models, "left_out": left}, sys.stdout, indent=1)
        print()
    else:
        _print(options.models_dir, models)
        for line in _remarks(models, left_out):
            print(printable(f"aerie model list: {line}"), file=sys.stderr)
    return int(any(model["error"] or any(each["error"] for each in model["revisions"]) for model in models))


def _remarks(models: Sequence[dict[str, Any]], left_out: Mapping[str, str]) -> Iterator[str]:
    yield from (model["error"] for model in models if model["error"])
    if unseen := [model["name"] for model in models if model["staging"] is None]:
        yield f"what is half fetched of {', '.join(unseen)} is not shown: only root may look"
    yield from (f"{path} is left out: {why}" for path, why in left_out.items())


def _described(model: Model) -> dict[str, Any]:
    links: dict[str | None, str] = {}
    error = None
    try:
        links = {model.previous(): "previous", model.current(): "current"}
        if model.current():
            model.find(CURRENT)
    except StoreError as wrong:
        error = str(wrong)
    published = model.revisions()
    staging = model.staging_keys()
    busy = model.busy()
    return {
        "name": model.name,
        "path": str(model.path),
        "error": error,
        "busy": busy,
        "revisions": [asdict(revision_of(model, each, links.get(each))) for each in published],
        "missing": [
            {"revision": each, "state": state} for each, state in links.items() if each and each not in published
        ],
        "staging": None if staging is None else [asdict(_staged(model, key, busy)) for key in staging],
    }


def revision_of(model: Model, revision: str, state: str | None) -> Revision:
    """Return what is known of a published revision."""
    path = model.revision_path(revision)
    try:
        used = in_use(path)
    except OSError:
        used = None
    try:
        manifest = load_manifest(path)
    except ManifestError as error:
        return Revision(revision, str(path), state, None, None, None, None, None, used, str(error))
    size, files, source = manifest.size, len(manifest.files), manifest.source
    return Revision(revision, str(path), state, files, size, source, manifest.chosen, manifest.fetched, used, None)


def in_words(chosen: Mapping[str, str]) -> str:
    """Return which of a model's files a revision has."""
    return ", ".join(f"{name} {patterns}" for name, patterns in chosen.items())


def _staged(model: Model, key: str, busy: str | None) -> Staged:
    size, files = used(model.staging_path(key))
    return Staged(key, size, files, busy)


def used(path: Path) -> tuple[int, int]:
    """Return how many bytes of the disk the files below `path` take, links counted once, and how many they are."""
    found = inodes(path)
    return sum(each.size for each in found.values()), len(found)


@dataclass(slots=True)
class Inode:
    """A file, by whatever names."""

    size: int
    """Bytes on the disk."""
    links: int
    """Names that it has anywhere."""
    here: int = 0
    """Those of them that are below the directory in question."""


def inodes(path: Path) -> dict[tuple[int, int], Inode]:
    """Return the files below `path` by device and number, as far as they can be seen."""
    found: dict[tuple[int, int], Inode] = {}
    with suppress(OSError), directory(path) as root:
        for entry in walk(root):
            status = entry.status
            if stat.S_ISREG(status.st_mode):
                inode = Inode(status.st_blocks * _BLOCK, status.st_nlink)
                found.setdefault((status.st_dev, status.st_ino), inode).here += 1
    return found


def _print(root: Path, models: Sequence[dict[str, Any]]) -> None:
    if not models:
        print(f"nothing is published in {root}")
    rows = [row for model in models for row in _rows(model)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)] if rows else []
    for row in rows:
        print(printable("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()))


def _rows(model: dict[str, Any]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for each in model["revisions"]:
        state = ", ".join(filter(None, (each["state"], "in use" if each["in_use"] else "")))
        size = "?" if each["size"] is None else amount(each["size"])
        source = each["source"] or each["error"]
        if each["chosen"]:
            source += f", some files alone: {in_words(each['chosen'])}"
        rows.append((model["name"], each["revision"], state, size, each["fetched"] or "", source))
    rows += [(model["name"], each["revision"], each["state"], "", "", "not there") for each in model["missing"]]
    for each in model["staging"] or ():
        who = f"half fetched; now: {each['busy']}" if each["busy"] else "half fetched"
        rows.append((model["name"], each["key"], "", amount(each["size"]), "", who))
    return rows
