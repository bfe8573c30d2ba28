"""Compares a published revision with its manifest: every byte, or what shows the usual damage within seconds."""

import random
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path

from aerie.cache.findings import Finding, Kind, Report, ranges
from aerie.cache.hashing import Found, Task, compare
from aerie.cache.headers import WEIGHTS, odd_headers
from aerie.cache.inside import Entry, directory, walk
from aerie.cache.manifest import MANIFEST, File, Manifest, spans
from aerie.cache.meter import Meter
from aerie.cache.whose import SERVICE

_KINDS = {
    stat.S_IFREG: "a file",
    stat.S_IFLNK: "a symlink",
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
}


def inspect(path: Path, manifest: Manifest, *, quick: bool, threads: int) -> Report:
    """Return what is wrong with the revision at `path`; raises OSError where the directory itself cannot be read.

    A full look compares every byte. A quick one compares one segment of each file, another one each time, so that
    small files are compared whole. Both read the headers of safetensors files, and look for what is missing, extra,
    of another size, no file, or not the service's to read. Nothing is followed out of the directory.
    """
    # Named by its place: a manifest that was copied or renamed by hand names another one.
    report = Report(path.parent.name, path.name, str(path), quick, len(manifest.files), manifest.size)
    with directory(path) as root:
        entries = {entry.path: entry for entry in walk(root)}
        report.findings += _names(manifest, entries)
        for entry in (Entry(".", path.lstat()), *entries.values()):
            report.findings += _access(entry)
        there = [file for file in manifest.files if file.path in entries and _is_file(entries[file.path])]
        tasks = _sample(there) if quick else [Task(file, range(len(file.segments))) for file in there]
        _compare(root, tasks, threads, entries, report)
        if odd := _odd_headers(path, entries, manifest):
            if quick:
                _compare_heads(root, there, threads, entries, report)
            # What does not fit may have come so from where the model was made.
            report.notes += [each if report.findings else f"as it was fetched: {each}" for each in odd]
    report.findings.sort(key=lambda each: (each.path, each.kind))
    return report


def _names(manifest: Manifest, entries: Mapping[str, Entry]) -> list[Finding]:
    """Return what is missing, what stands in its place, and what is there besides (a directory for all in it)."""
    findings = []
    files = {file.path: file for file in manifest.files}
    for path, file in files.items():
        entry = entries.get(path)
        if entry is None:
            findings.append(Finding(path, Kind.MISSING, f"{file.size:,} bytes", tuple(range(len(file.segments)))))
        elif not _is_file(entry):
            findings.append(Finding(path, Kind.NO_FILE, f"it is {kind_of(entry)}"))
    folders = {str(parent) for path in files for parent in Path(path).parents}
    extra = set[str]()
    for path, entry in entries.items():
        if entry.error is not None:
            findings.append(Finding(path, Kind.UNREADABLE, entry.error.strerror or str(entry.error)))
        if path in files or path == MANIFEST or (path in folders and kind_of(entry) == "a directory"):
            continue
        extra.add(path)
        if str(Path(path).parent) not in extra:
            findings.append(Finding(path, Kind.EXTRA, f"{kind_of(entry)} that the manifest does not list"))
    return findings


def _is_file(entry: Entry) -> bool:
    return stat.S_ISREG(entry.status.st_mode)


def kind_of(entry: Entry) -> str:
    """Return in words what an entry is."""
    return _KINDS.get(stat.S_IFMT(entry.status.st_mode), "a device")


def _access(entry: Entry) -> list[Finding]:
    """Return whether the service cannot read it, or could write to it."""
    status = entry.status
    mode = stat.S_IMODE(status.st_mode)
    if stat.S_ISLNK(status.st_mode):
        return []
    if status.st_uid == SERVICE:
        granted = mode >> 6
    elif status.st_gid == SERVICE:
        granted = mode >> 3
    else:
        granted = mode
    needed = 0o5 if stat.S_ISDIR(status.st_mode) else 0o4
    owner = f"mode {mode:04o}, owner {status.st_uid}:{status.st_gid}"
    if granted & needed != needed:
        return [Finding(entry.path, Kind.CLOSED, f"{owner}: user {SERVICE}, the service, may not read it")]
    if granted & 0o2:
        return [Finding(entry.path, Kind.WRITABLE, f"{owner}: user {SERVICE}, the service, may write to it")]
    return []


def _sample(files: Sequence[File]) -> list[Task]:
    chosen = random.SystemRandom()
    return [Task(file, [chosen.randrange(len(file.segments))]) for file in files if file.segments] + [
        Task(file, []) for file in files if not file.segments
    ]


def _compare(root: int, tasks: Sequence[Task], threads: int, entries: Mapping[str, Entry], report: Report) -> None:
    total = sum(end - start for task in tasks for start, end in (spans(task.file.size)[each] for each in task.segments))
    with Meter(f"{report.name}@{report.revision[:12]}", total) as meter:
        found = compare(root, tasks, threads, meter.count)
        report.read += meter.done
        report.seconds += meter.seconds
    for task in tasks:
        report.findings += _content(task.file, found[task.file.path], entries[task.file.path].status.st_size)


def _content(file: File, found: Found, size: int) -> list[Finding]:
    findings = []
    wrong = tuple(found.wrong)
    told = _numbered(wrong, len(file.segments))
    if size != file.size:
        kind = Kind.TRUNCATED if size < file.size else Kind.TOO_LONG
        detail = f"{size:,} bytes, expected {file.size:,}" + (f"; wrong: {told}" if wrong else "")
        findings.append(Finding(file.path, kind, detail, wrong))
    elif wrong:
        findings.append(Finding(file.path, Kind.ALTERED, told, wrong))
    if found.unreadable:
        detail = f"{_numbered(found.unreadable, len(file.segments))}: {found.error}"
        findings.append(Finding(file.path, Kind.UNREADABLE, detail, tuple(found.unreadable)))
    return findings


def _numbered(segments: Sequence[int], count: int) -> str:
    if count <= 1:
        return "its only segment"
    return f"{'segment' if len(segments) == 1 else 'segments'} {ranges(segments)}, counted from 0, of {count:,}"


def _odd_headers(path: Path, entries: Mapping[str, Entry], manifest: Manifest) -> list[str]:
    if not all(_is_file(entry) for name, entry in entries.items() if name.endswith(WEIGHTS) and "/" not in name):
        return []
    return [fault.text for fault in odd_headers(path, entries, partly=bool(manifest.chosen))]


def _compare_heads(
    root: int, files: Sequence[File], threads: int, entries: Mapping[str, Entry], report: Report
) -> None:
    wrong = {each.path for each in report.findings}
    heads = [Task(file, [0]) for file in files if file.segments and file.path.endswith(WEIGHTS)]
    _compare(root, [task for task in heads if task.file.path not in wrong], threads, entries, report)
