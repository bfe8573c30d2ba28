"""`aerie model verify`: proves that what is published is what was fetched, and mends it."""

import json
import signal
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn

from aerie.cache.directories import StoreError
from aerie.cache.findings import Report, lines_of
from aerie.cache.hashing import default_threads
from aerie.cache.inspection import inspect
from aerie.cache.layout import CURRENT, Model, Store, load_manifest
from aerie.cache.manifest import ManifestError
from aerie.cache.refetch import Reach
from aerie.cache.repair import repair
from aerie.cache.users import hold

_TERMINATED = 128 + signal.SIGTERM


@dataclass(frozen=True)
class Options:
    """What `aerie model verify` was told."""

    models: list[str]
    """NAME or NAME@REVISION; none for all."""
    all: bool
    """Every revision."""
    models_dir: Path
    quick: bool
    repair: bool
    source: str | None
    """To repair from, instead of where it came from."""
    endpoint: str | None
    token_file: Path | None
    limit_rate: int | None
    """Bytes a second."""
    threads: int | None
    json: bool


def verify(options: Options) -> int:
    """Verify, print, and return 0 where all is whole, 1 where not; raises StoreError where nothing is there."""
    signal.signal(signal.SIGTERM, _terminated)
    reports = []
    for model, revision in list(_chosen(options)):
        report = _verify(options, model, revision)
        reports.append(report)
        if not options.json:
            print("\n".join(lines_of(report)), flush=True)
    whole = all(report.is_whole for report in reports)
    if options.json:
        json.dump({"whole": whole, "revisions": [report.to_json() for report in reports]}, sys.stdout, indent=1)
        print()
    return 0 if whole else 1


def _terminated(_number: int, _frame: FrameType | None) -> NoReturn:
    raise SystemExit(_TERMINATED)


def _chosen(options: Options) -> Iterator[tuple[Model, str]]:
    store = Store(options.models_dir)
    for text in options.models:
        name, at, revision = text.partition("@")
        model = store.model(name)
        if at or not options.all:
            yield model, model.find(revision if at else CURRENT)
        else:
            yield from _all(model)
    if options.models:
        return
    models = [model for model in store.models() if model.revisions()]
    if not models:
        raise StoreError(f"nothing is published in {options.models_dir}")
    for model in models:
        if options.all:
            yield from _all(model)
        else:
            yield model, model.find(CURRENT)


def _all(model: Model) -> Iterator[tuple[Model, str]]:
    revisions = model.revisions()
    if not revisions:
        raise StoreError(f"{model.name} is not published in {model.root}")
    for revision in revisions:
        yield model, revision


def _verify(options: Options, model: Model, revision: str) -> Report:
    path = model.revision_path(revision)
    report = Report(model.name, revision, str(path), options.quick)
    with model.lock("aerie model verify --repair") if options.repair else nullcontext():
        try:
            with hold(path):
                manifest = load_manifest(path)
                threads = options.threads or default_threads()
                report = inspect(path, manifest, quick=options.quick, threads=threads)
                if manifest.revision != revision:
                    report.error = (
                        f"its manifest is that of revision {manifest.revision}: it was renamed or copied by hand. Move "
                        f"{path} away, and adopt it from there"
                    )
                elif options.repair:
                    reach = Reach(options.source, options.endpoint, options.token_file, options.limit_rate)
                    repair(model, manifest, report, reach, threads)
        except ManifestError as error:
            report.error = f"{error}. Move {path} away, and fetch or adopt it again: `aerie model fetch`, `adopt`"
        except OSError as error:
            report.error = f"{error.filename or path} cannot be read: {error.strerror}"
    return report
