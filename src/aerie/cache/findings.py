"""What a look at a published revision found: for people as lines, for programs as JSON. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from aerie.cache.progress import amount
from aerie.cache.words import counted, printable

_SHOWN_RANGES = 8


class Kind(StrEnum):
    """What is wrong with a file."""

    MISSING = "missing"
    TRUNCATED = "truncated"
    TOO_LONG = "too long"
    ALTERED = "altered"
    UNREADABLE = "unreadable"
    NO_FILE = "no file"
    """Something else stands there: a symlink, a directory, a pipe."""
    EXTRA = "extra"
    """Not in the manifest."""
    CLOSED = "closed"
    """The service may not read it."""
    WRITABLE = "writable"
    """Others than root may write to it."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is wrong with one path."""

    path: str
    kind: Kind
    detail: str
    segments: tuple[int, ...] = ()
    """Those with other content, by number."""


@dataclass(slots=True)
class Report:
    """What is known of one revision."""

    name: str
    revision: str
    """Empty where the model has none that could be looked at."""
    path: str
    quick: bool
    files: int = 0
    size: int = 0
    """Bytes of all files, by the manifest."""
    read: int = 0
    """Bytes that were compared."""
    seconds: float = 0.0
    findings: list[Finding] = field(default_factory=list)
    repaired: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    error: str = ""
    """Why it could not be looked at, or not be repaired; what to do."""

    @property
    def is_whole(self) -> bool:
        """Whether nothing is wrong any more."""
        return not self.findings and not self.error

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return {
            "name": self.name,
            "revision": self.revision or None,
            "path": self.path,
            "mode": "quick" if self.quick else "full",
            "whole": self.is_whole,
            "files": self.files,
            "size": self.size,
            "read": self.read,
            "seconds": round(self.seconds, 3),
            "findings": [_as_json(each) for each in self.findings],
            "repaired": [_as_json(each) for each in self.repaired],
            "notes": self.notes,
            "error": self.error or None,
        }


def _as_json(finding: Finding) -> dict[str, Any]:
    return {
        "path": finding.path,
        "kind": str(finding.kind),
        "detail": finding.detail,
        "segments": list(finding.segments),
    }


def lines_of(report: Report) -> list[str]:
    """Return the report for people."""
    title = f"{report.name}@{report.revision}" if report.revision else report.name
    how = f"{amount(report.read)} compared in {report.seconds:.1f} s"
    if report.seconds and report.read:
        how += f", {amount(report.read / report.seconds)}/s"
    if report.quick:
        how = f"a sample: {how}"
    if report.error and not report.files:
        return [f"{title}: cannot be verified", f"  {printable(report.error)}"]
    wrong = len({each.path for each in report.findings})
    state = "whole" if report.is_whole else f"{counted(wrong, 'path')} {'is' if wrong == 1 else 'are'} wrong"
    if report.is_whole and report.repaired:
        state = "whole again"
    lines = [f"{title}: {state} ({counted(report.files, 'file')}, {amount(report.size)}; {how})"]
    lines += _table(report.findings, "")
    lines += _table(report.repaired, "repaired: ")
    lines += [f"  {note}" for note in report.notes]
    if report.error:
        lines.append(f"  {report.error}")
    return [printable(line) for line in lines]


def _table(findings: Sequence[Finding], prefix: str) -> list[str]:
    if not findings:
        return []
    width = max(len(each.path) for each in findings)
    kinds = max(len(each.kind) for each in findings)
    return [f"  {prefix}{each.path:<{width}}  {each.kind:<{kinds}}  {each.detail}" for each in findings]


def ranges(numbers: Sequence[int]) -> str:
    """Return ascending numbers in words: `3, 5-9 and 2 more`."""
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    shown = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs[:_SHOWN_RANGES])
    more = sum(last - first + 1 for first, last in runs[_SHOWN_RANGES:])
    return shown + (f" and {more} more" if more else "")
