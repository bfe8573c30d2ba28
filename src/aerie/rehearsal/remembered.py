"""Which rehearsals have passed: by a digest of all that decides how one ends."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import aerie
from aerie import patches
from aerie.rehearsal.subject import Subject
from aerie.supervisor.json_file import JsonFile

_FILE = "rehearsals.json"
_KEPT = 20
_ELSEWHERE = frozenset({"HOSTNAME", "PWD", "OLDPWD", "SHLVL", "_", "TERM", "COLUMNS", "LINES"})
"""Environment variables that differ between two containers or terminals, and that no engine reads."""
_COVERED_BY = {"full": ("full",), "beside": ("full", "beside"), "static": ("full", "beside", "static")}
"""Which kinds of rehearsal prove all that one of this kind would."""
_READ = 64 * 2**20
"""Bytes up to which a file's content counts; of larger ones, size and time."""


class Remembered:
    """The file in the cache directory that keeps them."""

    def __init__(self, directory: Path) -> None:
        self._file = JsonFile(directory / _FILE, "the next start is rehearsed again")

    def passed_at(self, kind: str, digest: str) -> str | None:
        """Return when this passed, or a kind that proves more of the same; None where none did yet."""
        passed = self._file.read()
        times = (passed.get(f"{each} {digest}") for each in _COVERED_BY[kind])
        return next((at for at in times if isinstance(at, str)), None)

    def keep(self, kind: str, digest: str) -> None:
        """Remember that it passed now."""
        passed = {**self._file.read(), f"{kind} {digest}": datetime.now(UTC).isoformat(timespec="seconds")}
        newest = sorted(passed.items(), key=lambda item: str(item[1]))[-_KEPT:]
        self._file.write(dict(newest))


def digest_of(subject: Subject, asked: Sequence[str], machine: str, environment: Mapping[str, str]) -> str:
    """Return what changes with software, arguments, hardware and checkpoints.

    `asked` says what was left out and what was accepted, `machine` what the hardware is. Raises OSError
    where a checkpoint's file cannot be read.
    """
    setup = subject.setup
    parts: list[Any] = [_software(), patches.summary(), *asked, machine, setup.hardware]
    parts += [sorted(item for item in environment.items() if item[0] not in _ELSEWHERE)]
    parts += [subject.words, setup.settings.given]
    for value in _texts(setup.settings.given):
        parts += _named(value)
    for model in (setup.target, setup.drafter):
        parts += _files(model.directory) if model else []
    # As Python writes it: a YAML file may hold what JSON has no form for, a date for instance.
    return hashlib.sha256(repr(parts).encode("utf-8", "surrogateescape")).hexdigest()


def _software() -> list[str]:
    """Return all packages with their versions, and what Aerie's own code is: an image does not know its own name."""
    packages = sorted(f"{each.name} {each.version}" for each in metadata.distributions())
    own = hashlib.sha256()
    for path in sorted(Path(aerie.__file__).parent.rglob("*.py")):
        own.update(path.read_bytes())
    return [*packages, own.hexdigest()]


def _texts(value: Any, depth: int = 3) -> Iterator[str]:
    """Yield every text among the arguments: some name a file, a template or a parser's code for instance."""
    match value:
        case str():
            yield value
        case dict() if depth:
            for each in value.values():
                yield from _texts(each, depth - 1)
        case list() if depth:
            for each in value:
                yield from _texts(each, depth - 1)


def _named(text: str) -> list[Any]:
    """Return what is in the file or directory that an argument may name."""
    try:
        path = Path(text)
        if path.is_file():
            return [_file(path)]
        return [*_files(path)] if path.is_absolute() and path.is_dir() else []
    except (OSError, ValueError):  # a template as long as a book is an argument, and no path
        return []


def _files(directory: Path) -> Iterator[list[Any]]:
    for path in sorted(directory.iterdir()):
        if path.is_file():
            yield _file(path)


def _file(path: Path) -> list[Any]:
    seen = path.stat()
    content = hashlib.sha256(path.read_bytes()).hexdigest() if seen.st_size <= _READ else seen.st_mtime_ns
    return [path.name, seen.st_size, content]
