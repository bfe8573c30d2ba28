"""`aerie model prune`: frees the space of old revisions, and never of what is in service, kept or in use."""

import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from aerie.cache.directories import sync
from aerie.cache.layout import BusyError, Model, Store, load_manifest
from aerie.cache.listing import used
from aerie.cache.manifest import ADOPTED, ManifestError
from aerie.cache.progress import amount
from aerie.cache.users import unused
from aerie.cache.words import printable

_DAY = 24 * 60 * 60


@dataclass(frozen=True)
class Options:
    """What `aerie model prune` was told."""

    models: list[str]
    models_dir: Path
    keep: int
    """Further revisions, the newest."""
    staging: float | None
    """Days since what was half fetched was touched; None: only where the revision is published."""
    adopted: bool
    """Whether what has no source is removed as well."""
    dry_run: bool
    json: bool


@dataclass(frozen=True, slots=True)
class Item:
    """Something that could be removed."""

    name: str
    path: str
    size: int
    """Bytes on the disk."""
    removed: bool
    """Whether it was, or would be in a dry run."""
    why: str


def prune(options: Options) -> int:
    """Remove, print what and how many bytes, and return 0, or 1 where a model was left out. Raises StoreError."""
    store = Store(options.models_dir)
    models = [store.kept(name) for name in dict.fromkeys(options.models)] or store.models()
    items, failed = [], False
    for model in models:
        try:
            with model.lock("aerie model prune"):
                for item in _prune(model, options):
                    items.append(item)
                    if not options.json:
                        _print(item, options)
        except (BusyError, OSError) as error:
            failed = True
            print(f"aerie model prune: {model.name} is left as it is: {error}", file=sys.stderr)
    freed = sum(item.size for item in items if item.removed)
    if options.json:
        content = {"freed": freed, "dry_run": options.dry_run, "items": [asdict(item) for item in items]}
        json.dump(content, sys.stdout, indent=1)
        print()
    else:
        print(f"{amount(freed)} {'would be ' if options.dry_run else ''}freed")
    return int(failed)


def _print(item: Item, options: Options) -> None:
    done = ("would be removed" if options.dry_run else "removed") if item.removed else "kept"
    print(printable(f"{item.name}: {item.path} {done}, {amount(item.size)}: {item.why}"), flush=True)


def _prune(model: Model, options: Options) -> Iterator[Item]:
    if not options.dry_run:
        for trash in ("trash", "repair"):  # of a prune or a repair that was killed
            shutil.rmtree(model.own / trash, ignore_errors=True)
        (model.own / "hashed").unlink(missing_ok=True)  # of an adoption that nobody went on with
    kept = {model.current(), model.previous()}  # raises where a link is none of ours: nothing is removed then
    further = [each for each in model.revisions() if each not in kept]
    for revision in further[: options.keep]:
        yield _item(model, model.revision_path(revision), f"one of the {options.keep} newest", removed=False)
    for revision in further[options.keep :]:
        yield _remove_revision(model, revision, options)
    for key in model.staging_keys():
        yield _remove_staging(model, key, options)


def _item(model: Model, path: Path, why: str, *, removed: bool) -> Item:
    return Item(model.name, str(path), used(path)[0], removed, why)


def _remove_revision(model: Model, revision: str, options: Options) -> Item:
    path = model.revision_path(revision)
    with unused(path) as nobody:
        if not nobody:
            return _item(model, path, "somebody uses it", removed=False)
        if why := _only_copy(path, options):
            return _item(model, path, why, removed=False)
        item = _item(model, path, "neither current nor the one before", removed=True)
        if not options.dry_run:
            _remove(model, path)
    return item


def _only_copy(path: Path, options: Options) -> str:
    """Return why what lies there may be in no other place; empty where it can be fetched again."""
    try:
        manifest = load_manifest(path)
    except ManifestError as error:
        return f"whose it is cannot be told: {error}"
    if manifest.source == ADOPTED and not options.adopted:
        return "it was adopted, and no source of it is known; --adopted removes it"
    return ""


def _remove_staging(model: Model, key: str, options: Options) -> Item:
    path = model.staging_path(key)
    age = (time.time() - _touched(path)) / _DAY
    if model.is_published(key):
        why, removed = "published by now", True
    elif options.staging is not None and age >= options.staging:
        why, removed = f"not touched for {age:.1f} days", True
    else:
        hint = f"--staging {max(age, 0):.1f} removes it" if options.staging is None else f"touched {age:.1f} days ago"
        why, removed = f"half fetched, the next fetch goes on from it; {hint}", False
    item = _item(model, path, why, removed=removed)
    if removed and not options.dry_run:
        _remove(model, path)
    return item


def _touched(path: Path) -> float:
    """Return when anything in a staging was written last."""
    newest = path.lstat().st_mtime
    for folder, _, names in os.walk(path):
        for name in names:
            with suppress(FileNotFoundError):
                newest = max(newest, Path(folder, name).lstat().st_mtime)
    return newest


def _remove(model: Model, path: Path) -> None:
    """Let it go in one step, then free its space: a kill leaves no half of a revision."""
    trash = model.own / "trash"
    trash.mkdir(mode=0o700, exist_ok=True)
    gone = trash / path.name
    path.rename(gone)
    sync(path.parent)
    shutil.rmtree(gone)
    trash.rmdir()
