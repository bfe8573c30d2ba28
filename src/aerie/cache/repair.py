"""Mends a published revision: takes only the wrong segments from where it came from, and proves them first.

A damaged file is never written to. Its good part is copied (by sharing blocks where the file system can), the wrong
segments are written into the copy, the whole copy is hashed, and it takes the damaged one's place by a rename: a kill
leaves the one or the other, and what has the damaged one open keeps it. What the manifest does not list may be
somebody's only copy: it is moved aside, not removed.
"""

import os
import shutil
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

from aerie.cache.directories import DIRECTORY_MODE, make_directory
from aerie.cache.findings import Finding, Kind, Report, ranges
from aerie.cache.hashing import ShortFileError, Task, compare, digest
from aerie.cache.inside import directory, open_inside
from aerie.cache.layout import Model, load_manifest
from aerie.cache.manifest import File, Manifest, ManifestError, spans
from aerie.cache.meter import Meter
from aerie.cache.progress import amount
from aerie.cache.refetch import NotRepairedError, Reach, Refetch, open_for
from aerie.cache.settling import FILE_MODE
from aerie.cache.sharing import clone, copy_range, share
from aerie.cache.sources.source import SourceError, TryAgainError

_CONTENT = {Kind.MISSING, Kind.TRUNCATED, Kind.TOO_LONG, Kind.ALTERED, Kind.UNREADABLE, Kind.NO_FILE}
_SPARE = 2**30  # bytes left free


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
            _mend(model, manifest, mending, wrong, reach)
        mending.open_to_service()
    except (NotRepairedError, SourceError, TryAgainError) as error:
        report.error = f"not repaired: {error}"
    except OSError as error:
        report.error = f"not repaired: {error.filename or path}: {error.strerror}"
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _mend(
    model: Model, manifest: Manifest, mending: "_Mending", wrong: Sequence[tuple[File, list[int]]], reach: Reach
) -> None:
    """Mend from what is nearest: the file itself where only its length is wrong, another revision, the source."""
    mending.mend([each for each in wrong if not each[1]])
    left = []
    for file, numbers in wrong:
        if numbers and not any(mending.take(file, donor) for donor in _elsewhere(model, manifest, file)):
            left.append((file, numbers))
    if left:
        with closing(open_for(manifest, reach)) as source:
            refetch = Refetch(source, reach.limit)
            refetch.look([file for file, _ in left])
            mending.mend(left, refetch)


def _elsewhere(model: Model, manifest: Manifest, wanted: File) -> Iterator[Path]:
    """Yield files of other revisions that have the same content by their manifests."""
    for revision in model.revisions():
        if revision == manifest.revision:
            continue
        path = model.revision_path(revision)
        with suppress(ManifestError):
            for file in load_manifest(path).files:
                if file.sha256 == wanted.sha256:
                    yield path / file.path


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
        self._has_aside = False
        self._aside = aside / time.strftime(f"{report.revision[:12]}-%Y%m%dT%H%M%SZ", time.gmtime())

    def _done(self, findings: Iterable[Finding]) -> None:
        for each in findings:
            self._report.findings.remove(each)
            self._report.repaired.append(each)

    def put_aside(self, strange: Sequence[Finding]) -> None:
        """Move away what does not belong there; it is somebody's, and not ours to remove."""
        for each in strange:
            if not self._has_aside:
                self._make_aside()
            target = self._aside / each.path
            target.parent.mkdir(parents=True, exist_ok=True)
            with _parent(self._path, each.path) as (folder, name):
                os.rename(name, target, src_dir_fd=folder)
                os.fsync(folder)
        self._done(each for each in list(strange) if each.kind is Kind.EXTRA)

    def _make_aside(self) -> None:
        """Make a directory that nothing is in yet: what was put aside before may be the only copy, too."""
        number, first = 1, self._aside
        while os.path.lexists(self._aside):
            number += 1
            self._aside = first.with_name(f"{first.name}-{number}")
        make_directory(self._aside.parent, 0o700)
        make_directory(self._aside, 0o700)
        self._has_aside = True
        self._report.notes.append(f"what does not belong there was moved to {self._aside}")

    def take(self, file: File, donor: Path) -> bool:
        """Put a file of another revision in the damaged one's place, where it is seen to be the right one."""
        draft = self._work / "file"
        draft.unlink(missing_ok=True)
        try:
            if not share(donor, draft, file.size):
                return False
            with draft.open("rb") as stream:
                if digest(stream.fileno(), file.size)[0] != file.sha256:
                    return False
                os.fchmod(stream.fileno(), FILE_MODE)
                os.fsync(stream.fileno())
        except (OSError, ShortFileError):  # it is damaged as well
            return False
        self._replace(file, draft)
        self._report.notes.append(f"{file.path} taken from {donor}")
        return True

    def mend(self, wrong: Sequence[tuple[File, list[int]]], refetch: Refetch | None = None) -> None:
        """Replace the files by whole ones; without a source nothing may be wrong in them but their length.

        Raises NotRepairedError, SourceError, OSError.
        """
        if not wrong:
            return
        _check_space(wrong, self._work)
        to_fetch = sum(end - start for file, numbers in wrong for start, end in _spans(file, numbers))
        with Meter(f"repair {self._report.name}@{self._report.revision[:12]}", to_fetch) as meter:
            for file, numbers in wrong:
                draft = self._work / "file"

                def fetch(target: int, file: File = file, numbers: Sequence[int] = numbers) -> None:
                    if refetch is not None:
                        refetch.fetch(target, file, numbers, meter)

                _make(self._path, draft, file, numbers, fetch)
                self._replace(file, draft)
        if refetch is not None:
            self._report.notes.append(f"{amount(meter.done)} taken from {refetch.source.description}")

    def _replace(self, file: File, draft: Path) -> None:
        findings = [each for each in self._report.findings if each.path == file.path]
        self.put_aside([each for each in findings if each.kind is Kind.NO_FILE])
        _make_folders(self._path, file.path)
        with _parent(self._path, file.path) as (folder, name):
            os.rename(draft, name, dst_dir_fd=folder)
            os.fsync(folder)
        self._done(findings)

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


def _check_space(wrong: Sequence[tuple[File, list[int]]], work: Path) -> None:
    status = os.statvfs(work)
    free = status.f_bavail * status.f_frsize
    if (needed := max(file.size for file, _ in wrong) + _SPARE) > free:
        raise NotRepairedError(
            f"{work} has {amount(free)} free, and a copy of the largest damaged file and 1 GiB take {amount(needed)}: "
            "make room (`aerie model prune`)"
        )


def _spans(file: File, numbers: Sequence[int]) -> list[tuple[int, int]]:
    return [spans(file.size)[number] for number in numbers]


def _make(path: Path, draft: Path, file: File, numbers: Sequence[int], fetch: Callable[[int], None]) -> None:
    """Write a whole file to `draft`: what is good of the damaged one, and the segments `numbers` from the source."""
    draft.unlink(missing_ok=True)
    target = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        good = [number for number in range(len(file.segments)) if number not in numbers]
        if good:
            with directory(path) as root:
                _copy(root, target, file, good)
        os.ftruncate(target, file.size)
        fetch(target)
        sha256, segments = digest(target, file.size)
        if sha256 != file.sha256:
            others = [number for number, each in enumerate(segments) if each != file.segments[number]]
            raise NotRepairedError(
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
