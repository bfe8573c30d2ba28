"""`aerie model rollback`: lets `current` be the revision before, once that is seen to be there and whole."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from aerie.cache.directories import StoreError
from aerie.cache.findings import lines_of
from aerie.cache.hashing import default_threads
from aerie.cache.inspection import inspect
from aerie.cache.layout import CURRENT, PREVIOUS, Store
from aerie.cache.manifest import ManifestError


@dataclass(frozen=True)
class Options:
    """What `aerie model rollback` was told."""

    model: str
    revision: str | None
    """Which one; None for the one before."""
    models_dir: Path
    json: bool


def rollback(options: Options) -> int:
    """Look at the revision, switch to it, print that, and return 0; 1 where it is damaged. Raises StoreError."""
    model = Store(options.models_dir).kept(options.model)
    revision = model.find(options.revision or PREVIOUS)
    path = model.revision_path(revision)
    with model.lock("aerie model rollback"):
        try:
            report = inspect(path, model.manifest(revision), quick=True, threads=default_threads())
        except ManifestError as error:
            raise StoreError(f"{error}. Nothing was switched") from None
        if not report.is_whole:
            message = "\n".join([*lines_of(report), "Nothing was switched."])
            print(message, file=sys.stderr)
            if options.json:
                print(json.dumps({"state": "failed", "message": message}))
            return 1
        before = model.current()
        model.switch(revision)
    if options.json:
        print(json.dumps({"name": model.name, CURRENT: revision, PREVIOUS: model.previous()}))
    elif before == revision:
        print(f"{model.name}: {revision} is current already")
    else:
        print(f"{model.name}: {revision} is current now, {before or 'nothing'} was; what runs goes on with what it has")
    return 0
