"""Which rehearsals have passed: by a digest of all that decides how one ends."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aerie
from aerie import patches
from aerie.rehearsal.subject import Subject
from aerie.supervisor.json_file import JsonFile

_FILE = "rehearsals.json"
_KEPT = 20
_DECIDING = ("VLLM_", "NCCL_", "CUDA_", "TORCH", "TRITON_", "OMP_", "FLASHINFER_")
"""How names of environment variables begin that change what an engine does."""
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
    deciding = {name: value for name, value in environment.items() if name.startswith(_DECIDING)}
    parts: list[Any] = [aerie.__version__, patches.summary(), *asked, machine, sorted(deciding.items())]
    parts += [setup.hardware, list(subject.words), dict(setup.settings.given)]
    for model in (setup.target, setup.drafter):
        parts += _files(model.directory) if model else []
    return hashlib.sha256(json.dumps(parts, default=str).encode()).hexdigest()


def _files(directory: Path) -> Iterator[list[Any]]:
    for path in sorted(directory.iterdir()):
        if path.is_file():
            seen = path.stat()
            content = hashlib.sha256(path.read_bytes()).hexdigest() if seen.st_size <= _READ else seen.st_mtime_ns
            yield [path.name, seen.st_size, content]
