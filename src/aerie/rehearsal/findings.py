"""What a check or a step of the rehearsal came to."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """Of one finding; a rehearsal fails with any FAILED."""

    PASSED = "passed"
    WARNED = "warned"
    FAILED = "failed"
    SKIPPED = "skipped"
    """Not proven here, and why."""


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at; `check` names the check and stays the same between releases."""

    check: str
    verdict: Verdict
    text: str
    remedy: str = ""
    """What to change, and to what."""
    source: str = ""
    """Where the rule or the figure is from."""
    details: tuple[str, ...] = ()
    """Lines that show how the figures in the text came about."""


def passed(check: str, text: str, source: str = "") -> Finding:
    """Return a finding that all is well."""
    return Finding(check, Verdict.PASSED, text, source=source)


def warned(check: str, text: str, remedy: str, source: str = "") -> Finding:
    """Return a finding that serves, and might serve better."""
    return Finding(check, Verdict.WARNED, text, remedy, source)


def failed(check: str, text: str, remedy: str, source: str = "") -> Finding:
    """Return a finding that would end the real start, or make it serve wrongly."""
    return Finding(check, Verdict.FAILED, text, remedy, source)


def skipped(check: str, why: str) -> Finding:
    """Return what could not be looked at, and why."""
    return Finding(check, Verdict.SKIPPED, why)


def has_failed(findings: Iterable[Finding]) -> bool:
    """Return whether any of them fails the rehearsal."""
    return any(finding.verdict is Verdict.FAILED for finding in findings)
