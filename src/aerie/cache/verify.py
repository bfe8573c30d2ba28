"""`aerie model verify`: proves that what is published is what was fetched, and mends it."""

import json
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import NoReturn

from aerie.cache.directories import StoreError
from aerie.cache.findings import Report, lines_of
from aerie.cache.hashing import default_threads
from aerie.cache.headers import odd_headers
from aerie.cache.inspection import inspect
from aerie.cache.layout import CURRENT, Model, Store, load_manifest
from aerie.cache.listing import in_words
from aerie.cache.manifest import Manifest, ManifestError
from aerie.cache.refetch import Reach
from aerie.cache.repair import repair
from aerie.cache.users import hold
from aerie.cache.words import printable

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


@dataclass(frozen=True, slots=True)
class _Target:
    """A revision that is to be looked at, or a model that has none to look at."""

    model: Model
    revision: str = ""
    note: str = field(default="", compare=False)
    """What is to be told besides."""
    error: str = ""
    """Why there is none, and what to do."""


def verify(options: Options) -> int:
    """Verify, print, and return 0 where all is whole, 1 where not; raises StoreError where nothing is there."""
    signal.signal(signal.SIGTERM, _terminated)
    reports = []
    for target in _chosen(options):
        report = _verify(options, target)
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


def _chosen(options: Options) -> list[_Target]:
    """Return what is to be looked at, each once; raises StoreError where something was named that is not there."""
    store = Store(options.models_dir)
    targets: list[_Target] = []
    for text in options.models:
        name, at, revision = text.partition("@")
        model = store.kept(name)
        if at:
            targets.append(_Target(model, model.find(revision)))
        else:
            nothing = f"no revision of it is published in {options.models_dir}: fetch or adopt it"
            targets += _of(model, everything=options.all) or [_Target(model, error=nothing)]
    if not options.models:
        targets = [target for model in store.models() for target in _of(model, everything=options.all)]
        if not targets:
            raise StoreError(f"nothing is published in {options.models_dir}")
        for path, why in store.left_out().items():
            print(printable(f"aerie model verify: {path} is left out: {why}"), file=sys.stderr)
    return list(dict.fromkeys(targets))


def _of(model: Model, *, everything: bool) -> list[_Target]:
    """Return what of a model is to be looked at: what is in service, or every revision; nothing where it has none."""
    targets = [_Target(model, revision) for revision in model.revisions()]
    try:
        current = model.find(CURRENT) if model.current() else None
    except StoreError as error:
        return [_Target(model, error=str(error)), *(targets if everything else [])]
    if everything:
        return targets
    if current:
        return [_Target(model, current)]
    return [replace(each, note="no revision of it is in service: this is the newest") for each in targets[:1]]


def _verify(options: Options, target: _Target) -> Report:
    model, revision = target.model, target.revision
    if not revision:
        return Report(model.name, "", str(model.path), options.quick, error=target.error)
    path = model.revision_path(revision)
    report = Report(model.name, revision, str(path), options.quick)
    with ExitStack() as stack:
        why_not = _locked(stack, model) if options.repair else ""
        try:
            stack.enter_context(hold(path))
            manifest = load_manifest(path)
            threads = options.threads or default_threads()
            report = inspect(path, manifest, quick=options.quick, threads=threads)
            report.notes += _remarks(target, manifest)
            if manifest.revision != revision:
                report.error = (
                    f"its manifest is that of revision {manifest.revision}: it was renamed or copied by hand. Move "
                    f"{path} away, and adopt it from there"
                )
            elif why_not and not report.is_whole:
                report.error = f"not repaired: {why_not}"
            elif options.repair and not why_not:
                reach = Reach(options.source, options.endpoint, options.token_file, options.limit_rate)
                before = set(report.notes)
                repair(model, manifest, report, reach, threads)
                if report.repaired and report.is_whole:
                    odd = odd_headers(path, [file.path for file in manifest.files], partly=bool(manifest.chosen))
                    report.notes = [each for each in report.notes if each not in before]
                    report.notes += [*(f"as it was fetched: {each.text}" for each in odd), *_remarks(target, manifest)]
        except ManifestError as error:
            report.error = f"{error}. Move {path} away, and fetch or adopt it again: `aerie model fetch`, `adopt`"
        except OSError as error:
            report.error = f"{error.filename or path} cannot be read: {error.strerror}"
    return report


def _remarks(target: _Target, manifest: Manifest) -> Iterator[str]:
    """Yield what is no damage, and is to be known."""
    if target.note:
        yield target.note
    if manifest.name != target.model.name:
        yield f"its manifest is that of a model {manifest.name}: it was copied, or renamed, by hand"
    if manifest.chosen:
        yield f"some of the model's files alone, as it was fetched: {in_words(manifest.chosen)}"


def _locked(stack: ExitStack, model: Model) -> str:
    """Lock the model until the stack unwinds; return why that cannot be: what is damaged is shown all the same."""
    try:
        stack.enter_context(model.lock("aerie model verify --repair"))
    except StoreError as error:
        return str(error)
    except OSError as error:
        return f"{error.filename or model.own}: {error.strerror}"
    return ""
