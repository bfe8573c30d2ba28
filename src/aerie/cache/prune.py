"""`aerie model prune`: frees the space of old revisions, and never of what is in service, kept or in use."""

import json
import math
import os
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from aerie.cache.directories import StoreError, sync
from aerie.cache.layout import CURRENT, Model, Store, load_manifest
from aerie.cache.listing import inodes, used
from aerie.cache.manifest import ADOPTED, ManifestError
from aerie.cache.progress import amount
from aerie.cache.users import unused, who_uses
from aerie.cache.words import printable

_DAY = 24 * 60 * 60
_SHOWN = 3
"""Of those who use a revision."""


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
    freed: int
    """Those of them that nothing else has."""
    removed: bool
    """Whether it was, or would be in a dry run."""
    why: str


def prune(options: Options) -> int:
    """Remove, print what and how many bytes, and return 0, or 1 where a model was left out. Raises StoreError."""
    store = Store(options.models_dir)
    models = [store.kept(name) for name in dict.fromkeys(options.models)] or store.models()
    pruning, items, failed = _Pruning(options), [], dict[str, str]()
    for model in models:
        try:
            with _alone(model, options):
                for item in pruning.of(model):
                    items.append(item)
                    if not options.json:
                        _print(item, options)
        except (StoreError, OSError) as error:
            failed[model.name] = printable(str(error))
            print(f"aerie model prune: {model.name} is left as it is: {failed[model.name]}", file=sys.stderr)
    freed = sum(item.freed for item in items)
    if options.json:
        content = {"freed": freed, "dry_run": options.dry_run, "items": [asdict(item) for item in items]}
        content["failed"] = failed
        json.dump(content, sys.stdout, indent=1)
        print()
    else:
        print(f"{amount(freed)} {'would be ' if options.dry_run else ''}freed")
    return int(bool(failed))


@contextmanager
def _alone(model: Model, options: Options) -> Iterator[None]:
    """Work on the model alone; a dry run, which writes nothing, only sees whether nobody does. Raises BusyError."""
    if options.dry_run:
        model.leave_to_others()
        yield
    else:
        with model.lock("aerie model prune"):
            yield


def _print(item: Item, options: Options) -> None:
    done = ("would be removed" if options.dry_run else "removed") if item.removed else "kept"
    size = amount(item.size)
    if item.removed and item.freed != item.size:
        size += f", of which {amount(item.size - item.freed)} stay, shared with what is kept"
    print(printable(f"{item.name}: {item.path} {done}, {size}: {item.why}"), flush=True)


class _Pruning:
    """What goes of one model after another."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._gone = Counter[tuple[int, int]]()
        """How many names of a file would be gone by now, in a dry run."""

    def of(self, model: Model) -> Iterator[Item]:
        """Remove what goes of a model, in a dry run nothing, and yield what there is. Raises StoreError, OSError."""
        options = self._options
        if model.current() is not None:
            model.find(CURRENT)  # raises where it is not there, as `current` where it is none of ours
        if not options.dry_run:
            for trash in ("trash", "repair"):  # of a prune or a repair that was killed
                shutil.rmtree(model.own / trash, ignore_errors=True)
            (model.own / "hashed").unlink(missing_ok=True)  # of an adoption that nobody went on with
        kept = {model.current(), model.previous()}
        further = [each for each in model.revisions() if each not in kept]
        if model.current() is None and further:
            newest = further.pop(0)  # fetched to be in service later
            yield self._keep(model, model.revision_path(newest), "the newest, and nothing is in service")
        for revision in further[: options.keep]:
            yield self._keep(model, model.revision_path(revision), f"one of the {options.keep} newest")
        for revision in further[options.keep :]:
            yield self._revision(model, model.revision_path(revision))
        keys = model.staging_keys()
        if keys is None:
            unseen = f"of {model.name}, only root sees what is half fetched and which files are open"
            print(f"aerie model prune: {unseen}", file=sys.stderr)
        for key in keys or ():
            yield self._staging(model, key)

    def _revision(self, model: Model, path: Path) -> Item:
        with unused(path) as nobody:
            if not nobody:
                return self._keep(model, path, _used_by(who_uses(path)))
            if why := _only_copy(path, self._options):
                return self._keep(model, path, why)
            return self._remove(model, path, "neither current nor the one before")

    def _staging(self, model: Model, key: str) -> Item:
        path = model.staging_path(key)
        if model.is_published(key):
            return self._remove(model, path, "published by now")
        age = max(time.time() - _touched(path), 0)  # a clock may have been set back
        limit = self._options.staging
        if limit is not None and age >= limit * _DAY:
            return self._remove(model, path, f"not touched for {_duration(age)}")
        hint = f", and `--staging {_days(age)}` removes it" if limit is None else ""
        return self._keep(
            model, path, f"half fetched, the next fetch goes on from it; touched {_duration(age)} ago{hint}"
        )

    def _keep(self, model: Model, path: Path, why: str) -> Item:
        return Item(model.name, str(path), used(path)[0], 0, removed=False, why=why)

    def _remove(self, model: Model, path: Path, why: str) -> Item:
        files = inodes(path)
        size = sum(each.size for each in files.values())
        freed = sum(each.size for key, each in files.items() if each.here + self._gone[key] >= each.links)
        if self._options.dry_run:
            self._gone.update({key: each.here for key, each in files.items()})
        else:
            _remove(model, path)
        return Item(model.name, str(path), size, freed, removed=True, why=why)


def _used_by(who: Sequence[str]) -> str:
    if not who:
        return "somebody uses it"
    more = f" and {len(who) - _SHOWN} more" if len(who) > _SHOWN else ""
    return f"{', '.join(who[:_SHOWN])}{more} {'uses' if len(who) == 1 else 'use'} it"


def _duration(seconds: float) -> str:
    """Return how long it is, rounded down, in the largest unit of which it is two or more."""
    for unit, name in ((_DAY, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * unit:
            return f"{int(seconds // unit)} {name}"
    return "less than 2 minutes"


def _days(seconds: float) -> str:
    """Return days as `--staging` takes them, rounded down: so old it is."""
    return f"{math.floor(seconds / _DAY * 10) / 10:g}"


def _only_copy(path: Path, options: Options) -> str:
    """Return why what lies there may be in no other place; empty where it can be fetched again."""
    try:
        manifest = load_manifest(path)
    except ManifestError as error:
        return f"whose it is cannot be told: {error}"
    if manifest.source == ADOPTED and not options.adopted:
        return "it was adopted, and no source of it is known; --adopted removes it"
    return ""


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
