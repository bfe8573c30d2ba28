"""What is made of a crash: a report on the state volume, what is shown to anybody, an exit code."""

import signal
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from aerie.diagnosis import Diagnosis, Kind, RootCause
from aerie.supervisor.state import USAGE_ERROR

Shown = Mapping[str, Any]
"""A diagnosis in the form of the state's `diagnosis`."""

_DIRECTORY = "crashes"
_KEPT = 5  # reports; the newest
_KILLED_BY = 128  # plus the signal's number, as a shell reports it
STUCK = 4
"""The exit code where the hardware or its driver failed."""
NOT_STARTED = 5
"""The exit code where there is nothing but to try again; an engine's crash has the same."""
_CODES = {Kind.CONFIGURATION: USAGE_ERROR, Kind.MEMORY: 3, Kind.HARDWARE: STUCK, Kind.CRASH: NOT_STARTED, Kind.HUNG: 6}


def write_report(state_dir: Path, diagnosis: Diagnosis, last_output: bytes, at: datetime) -> Path:
    """Write the diagnosis and the engine's last output, drop the oldest reports, and return the report's path.

    Raises OSError where it cannot be written.
    """
    directory = state_dir / _DIRECTORY
    directory.mkdir(exist_ok=True)
    report = directory / f"{at.astimezone(UTC):%Y-%m-%dT%H-%M-%SZ}.txt"
    text = last_output.decode(errors="replace")
    report.write_text(f"{diagnosis.text()}\n\nThe engine's last output:\n\n{text}\n", encoding="utf-8")
    for old in sorted(directory.glob("*.txt"))[:-_KEPT]:
        old.unlink(missing_ok=True)
    return report


def reason(how: str, diagnosis: Diagnosis, *, listened: bool) -> str:
    """Return in one line how an engine ended, and why."""
    # A root cause that is not known says more than that it is not; but see `shown`.
    said = diagnosis.root.text.partition("\n")[0] if diagnosis.root and not diagnosis.known and not listened else ""
    return f"{how}: {said or diagnosis.title}"


def shown(diagnosis: Diagnosis, at: datetime, report: Path | None, *, listened: bool) -> Shown:
    """Return the diagnosis as `/status` shows it, which asks for no key.

    Once an engine has listened, what it said may quote requests: then an exception is shown by its type alone. The
    report and the log have the rest.
    """
    if listened and diagnosis.root:
        diagnosis = replace(diagnosis, root=_without_words(diagnosis.root))
    stamp = at.astimezone(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
    # With the text, so that every reader who cannot lay it out, as the gate, shows what the container printed last.
    return diagnosis.to_json() | {"text": diagnosis.text(), "at": stamp, "report": report and str(report)}


def _without_words(root: RootCause) -> RootCause:
    chain = tuple(filter(None, map(_type, root.chain)))
    return replace(root, text=_type(root.text), chain=chain, excerpt=(), beside=())


def _type(raised: str) -> str:
    """Return `ValueError` of `ValueError: the prompt is too long: ...`; nothing of a line that names no exception."""
    name = raised.partition(":")[0]
    return name if name.replace(".", "").replace("_", "").isalnum() else ""


def exit_code(diagnosis: Diagnosis, status: int | None, *, served: bool) -> int:
    """Return the exit code of `aerie serve --once` after an engine's end; `status` is that of its first process.

    One that has served had the right arguments, whatever it says at its end.
    """
    if diagnosis.kind is Kind.KILLED:
        return _KILLED_BY + (-status if status is not None and status < 0 else signal.SIGKILL)
    code = USAGE_ERROR if status == USAGE_ERROR else _CODES[diagnosis.kind]
    return _CODES[Kind.CRASH] if served and code == USAGE_ERROR else code
