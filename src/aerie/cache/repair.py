"""Mends a published revision: takes only the wrong segments from where it came from, and proves them first.

A damaged file is never written to. Its good part is copied (by sharing blocks where the file system can), the wrong
segments are written into the copy, the whole copy is hashed, and it takes the damaged one's place by a rename: a kill
leaves the one or the other, and what has the damaged one open keeps it. What the manifest does not list may be
somebody's only copy: it is moved aside, not removed.
"""

import hashlib
import os
import random
import shutil
import stat
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from aerie.cache.findings import Finding, Kind, Report, ranges
from aerie.cache.hashing import Task, compare, digest
from aerie.cache.inside import directory, open_inside
from aerie.cache.layout import DIRECTORY_MODE, FILE_MODE, Model, make_directory
from aerie.cache.manifest import File, Manifest, spans
from aerie.cache.meter import Meter
from aerie.cache.progress import amount
from aerie.cache.sharing import clone, copy_range
from aerie.cache.sources.opening import open_source
from aerie.cache.sources.source import Offer, Source, SourceError, TryAgainError

ADOPTED = "adopted"
"""A manifest's source where there is none."""
_CONTENT = {Kind.MISSING, Kind.TRUNCATED, Kind.TOO_LONG, Kind.ALTERED, Kind.UNREADABLE, Kind.NO_FILE}
_ATTEMPTS = 6
_LONGEST_PAUSE = 60.0  # seconds
_CONNECTIONS = 4
_SPARE = 2**30  # bytes left free


@dataclass(frozen=True, slots=True)
class Reach:
    """How the source is reached, where it differs from what the manifest says."""

    source: str | None = None
    endpoint: str | None = None
    token_file: Path | None = None
    limit: int | None = None
    """Bytes a second."""


class _NotRepairedError(Exception):
    """Why a file stays as it is; the message says what to do."""


def repair(model: Model, manifest: Manifest, report: Report, reach: Reach, threads: int) -> None:
    """Mend what the report lists, with the model's lock held, and move in the report what is mended.

    Where something stays, the report's `error` says why.
    """
    path = model.revision_path(manifest.revision)
    work = model.own / "repair"
    shutil.rmtree(work, ignore_errors=True)  # of one that was killed
    mending = _Mending(path, work, model.own / "aside", report)
    try:
        mending.put_aside([each for each in report.findings if each.kind is Kind.EXTRA])
        if wrong := _wrong(path, manifest, report, threads):
            make_directory(work, 0o700)
            mending.mend([(file, numbers) for file, numbers in wrong if not numbers], None, reach)  # too long, or empty
            if to_fetch := [(file, numbers) for file, numbers in wrong if numbers]:
                source = _open(manifest, reach)
                try:
                    mending.mend(to_fetch, source, reach)
                finally:
                    source.close()
        mending.open_to_service()
    except (_NotRepairedError, SourceError, TryAgainError) as error:
        report.error = f"not repaired: {error}"
    except OSError as error:
        report.error = f"not repaired: {error.filename or path}: {error.strerror}"
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _wrong(path: Path, manifest: Manifest, report: Report, threads: int) -> list[tuple[File, list[int]]]:
    """Return the files to be mended, and all of their segments that are wrong: a quick look knows one at most."""
    files = {file.path: file for file in manifest.files}
    found: dict[str, set[int]] = {}
    for finding in report.findings:
        if finding.kind in _CONTENT and finding.path in files:
            everything = finding.kind is Kind.NO_FILE
            numbers = range(len(files[finding.path].segments)) if everything else finding.segments
            found.setdefault(finding.path, set()).update(numbers)
    if report.quick:
        present = [name for name in found if not _kinds(report, name) & {Kind.MISSING, Kind.NO_FILE}]
        with directory(path) as root:
            tasks = [Task(files[name], range(len(files[name].segments))) for name in present]
            for name, each in compare(root, tasks, threads).items():
                found[name] = {*each.wrong, *each.unreadable}
    return [(files[name], sorted(found[name])) for name in sorted(found)]


def _kinds(report: Report, path: str) -> set[Kind]:
    return {each.kind for each in report.findings if each.path == path}


class _Mending:
    """The repair of one revision."""

    def __init__(self, path: Path, work: Path, aside: Path, report: Report) -> None:
        self._path, self._work, self._report = path, work, report
        self._aside = aside / time.strftime(f"{report.revision[:12]}-%Y%m%dT%H%M%SZ", time.gmtime())

    def _done(self, findings: Iterable[Finding]) -> None:
        for each in findings:
            self._report.findings.remove(each)
            self._report.repaired.append(each)

    def put_aside(self, strange: Sequence[Finding]) -> None:
        """Move away what does not belong there; it is somebody's, and not ours to remove."""
        for each in strange:
            if not self._aside.exists():
                make_directory(self._aside.parent, 0o700)
                make_directory(self._aside, 0o700)
                self._report.notes.append(f"what does not belong there was moved to {self._aside}")
            target = self._aside / each.path
            target.parent.mkdir(parents=True, exist_ok=True)
            with _parent(self._path, each.path) as (folder, name):
                os.rename(name, target, src_dir_fd=folder)
                os.fsync(folder)
        self._done(each for each in list(strange) if each.kind is Kind.EXTRA)

    def mend(self, wrong: Sequence[tuple[File, list[int]]], source: Source | None, reach: Reach) -> None:
        """Replace the files by whole ones; without a source nothing may be wrong in them but their length.

        Raises _NotRepairedError, SourceError, OSError.
        """
        if not wrong:
            return
        offers = {} if source is None else {offer.path: offer for offer in _listed(source)}
        if source is not None:
            _check_offers(wrong, offers, source)
        _check_space(wrong, self._work)
        pace = _Pace(reach.limit)
        to_fetch = sum(end - start for file, numbers in wrong for start, end in _spans(file, numbers))
        with Meter(f"repair {self._report.name}@{self._report.revision[:12]}", to_fetch) as meter:
            for file, numbers in wrong:
                draft = self._work / "file"
                fetcher = None if source is None else _Fetcher(source, offers[file.path], pace, meter)
                _make(self._path, draft, file, numbers, fetcher)
                findings = [each for each in self._report.findings if each.path == file.path]
                self.put_aside([each for each in findings if each.kind is Kind.NO_FILE])
                _make_folders(self._path, file.path)
                with _parent(self._path, file.path) as (folder, name):
                    os.rename(draft, name, dst_dir_fd=folder)
                    os.fsync(folder)
                self._done(findings)
        if source is not None:
            self._report.notes.append(f"{amount(meter.done)} taken from {source.description}")

    def open_to_service(self) -> None:
        """Give what is there the owner and modes of what is published; raises OSError."""
        for each in [each for each in self._report.findings if each.kind in (Kind.CLOSED, Kind.WRITABLE)]:
            if each.path == ".":
                descriptor = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            else:
                with _parent(self._path, each.path) as (folder, name):
                    descriptor = os.open(
                        name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder
                    )
            try:
                os.fchown(descriptor, os.geteuid(), os.getegid())
                is_directory = stat.S_ISDIR(os.fstat(descriptor).st_mode)
                os.fchmod(descriptor, DIRECTORY_MODE if is_directory else FILE_MODE)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            self._done([each])


def _open(manifest: Manifest, reach: Reach) -> Source:
    text = reach.source or manifest.source
    title = f"{manifest.name}@{manifest.revision[:12]}"
    if text == ADOPTED:
        raise _NotRepairedError(
            f"{title} was adopted, and no source is recorded: give one that has the same files, `--repair --source "
            "SOURCE`, a copy on another host or disk too; only what its digests prove is taken"
        )
    options = {} if reach.source else manifest.options
    return open_source(
        text,
        revision=manifest.revision,
        endpoint=reach.endpoint or options.get("endpoint"),
        region=options.get("region"),
        token_file=reach.token_file,
        limit=reach.limit,
    )


def _listed(source: Source) -> tuple[Offer, ...]:
    failures = 0
    while True:
        try:
            return source.list().files
        except TryAgainError as error:
            failures += 1
            _pause(error, failures)


def _pause(error: TryAgainError, failures: int) -> None:
    if failures >= _ATTEMPTS:
        raise _NotRepairedError(f"{error}. Given up after {failures} attempts: try again later") from None
    time.sleep(min(error.after or 2.0**failures * random.uniform(0.5, 1.0), _LONGEST_PAUSE))  # noqa: S311


def _check_offers(wrong: Sequence[tuple[File, list[int]]], offers: dict[str, Offer], source: Source) -> None:
    for file, _ in wrong:
        offer = offers.get(file.path)
        if offer is None:
            raise _NotRepairedError(
                f"{source.description} does not have {file.path}: give another source with --source"
            )
        if offer.size != file.size or (offer.sha256 or file.sha256) != file.sha256:
            raise _NotRepairedError(
                f"{source.description} has another {file.path} ({offer.size:,} bytes) than the manifest ({file.size:,} "
                "bytes): it is not the same revision. Give another source with --source"
            )


def _check_space(wrong: Sequence[tuple[File, list[int]]], work: Path) -> None:
    status = os.statvfs(work)
    free = status.f_bavail * status.f_frsize
    if (needed := max(file.size for file, _ in wrong) + _SPARE) > free:
        raise _NotRepairedError(
            f"{work} has {amount(free)} free, and a copy of the largest damaged file and 1 GiB take {amount(needed)}: "
            "make room (`aerie model prune`)"
        )


def _spans(file: File, numbers: Sequence[int]) -> list[tuple[int, int]]:
    return [spans(file.size)[number] for number in numbers]


class _Fetcher:
    """Fetches segments of one file and proves each."""

    def __init__(self, source: Source, offer: Offer, pace: "_Pace", meter: Meter) -> None:
        self._source, self._offer, self._pace, self._meter = source, offer, pace, meter

    def fetch(self, target: int, file: File, number: int) -> None:
        """Write the segment to `target`; raises _NotRepairedError where the source has another content."""
        start, end = spans(file.size)[number]
        at, failures = start, 0
        segment = hashlib.sha256()
        while at < end:
            try:
                for piece in self._source.read(self._offer, at, end):
                    self._pace.take(len(piece))
                    _write(target, piece, at)
                    segment.update(piece)
                    at += len(piece)
                    failures = 0
                    self._meter.count(len(piece))
            except TryAgainError as error:
                failures += 1
                _pause(error, failures)
        if segment.hexdigest() != file.segments[number]:
            raise _NotRepairedError(
                f"{self._source.description} has another content in segment {number} of {file.path}: "
                f"{segment.hexdigest()}, expected {file.segments[number]}. Give another source with --source"
            )


def _write(target: int, piece: bytes, at: int) -> None:
    view = memoryview(piece)
    while view:
        count = os.pwrite(target, view, at)
        view = view[count:]
        at += count


def _make(path: Path, draft: Path, file: File, numbers: Sequence[int], fetcher: _Fetcher | None) -> None:
    """Write a whole file to `draft`: what is good of the damaged one, and the segments `numbers` from the source."""
    draft.unlink(missing_ok=True)
    target = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        good = [number for number in range(len(file.segments)) if number not in numbers]
        if good:
            with directory(path) as root:
                _copy(root, target, file, good)
        os.ftruncate(target, file.size)
        if fetcher is not None:
            fetch = partial(fetcher.fetch, target, file)
            with ThreadPoolExecutor(_CONNECTIONS) as pool:
                list(pool.map(fetch, numbers))
        sha256, segments = digest(target, file.size)
        if sha256 != file.sha256:
            others = [number for number, each in enumerate(segments) if each != file.segments[number]]
            raise _NotRepairedError(
                f"{file.path} is not what the manifest says with segments {ranges(numbers)} mended: "
                f"{ranges(others) or 'none'} are other ones now. Does the disk or the memory err? See `journalctl -k`"
            )
        os.fchmod(target, FILE_MODE)
        os.fsync(target)
    finally:
        os.close(target)


def _copy(root: int, target: int, file: File, good: Sequence[int]) -> None:
    source = open_inside(root, file.path)
    try:
        if not clone(source, target):
            for start, end in _spans(file, good):  # what cannot be read is not among them
                copy_range(source, target, start, end)
    finally:
        os.close(source)


def _make_folders(path: Path, name: str) -> None:
    """Make the directories that the file lies in; raises OSError where something else is in their place."""
    at = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        for folder in name.split("/")[:-1]:
            with suppress(FileExistsError):
                os.mkdir(folder, DIRECTORY_MODE, dir_fd=at)
                os.fsync(at)
            inner = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at)
            os.close(at)
            at = inner
            os.fchmod(at, DIRECTORY_MODE)
    finally:
        os.close(at)


@contextmanager
def _parent(path: Path, name: str) -> Iterator[tuple[int, str]]:
    """Open the directory that an entry lies in, through no symlink; give its descriptor and the entry's last name."""
    *folders, last = name.split("/")
    with ExitStack() as stack:
        at = stack.enter_context(directory(path))
        for folder in folders:
            at = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at)
            stack.callback(os.close, at)
        yield at, last


class _Pace:
    """A limit on bytes a second, over all threads."""

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._due = 0.0

    def take(self, count: int) -> None:
        """Wait until so many bytes may have come."""
        if self._limit is None:
            return
        with self._lock:
            now = time.monotonic()
            self._due = max(self._due, now) + count / self._limit
            pause = self._due - now
        time.sleep(pause)
