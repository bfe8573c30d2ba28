"""The report of a rehearsal: as text while it goes on, as JSON, and as JUnit's XML for a CI server."""

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any
from xml.etree import ElementTree as ET

from aerie.checkpoint.shrink import Change
from aerie.gate.words import plain
from aerie.patches import vllm_version
from aerie.rehearsal.findings import Finding, Verdict, has_failed
from aerie.rehearsal.overrides import Override
from aerie.rehearsal.static.hardware import Hardware

SCHEMA = 1
_WIDTH = 110  # columns
_NAMES = 26  # columns for the names of checks
_MARKS = {Verdict.PASSED: "ok", Verdict.WARNED: "warn", Verdict.FAILED: "FAIL", Verdict.SKIPPED: "-"}


@dataclass(frozen=True)
class Told:
    """A finding in its place: `seconds` are those of its step, None where it is one of many."""

    section: str
    finding: Finding
    seconds: float | None = None


@dataclass
class Report:
    """All that a rehearsal came to."""

    kind: str
    """static, full or beside."""
    target: str
    drafter: str | None
    hardware: Hardware | None = None
    """That the plan is for."""
    arguments: Sequence[str] = ()
    """For vLLM, as they were given."""
    profile: str | None = None
    """Of the engine that was started, None where none was."""
    told: list[Told] = field(default_factory=list)
    overrides: Sequence[Override] = ()
    changes: Sequence[Change] = ()
    not_proven: Sequence[str] = ()
    diagnosis: Mapping[str, Any] | None = None
    seconds: float = 0.0
    passed_before: str | None = None
    """When the same passed, where it was not done again."""
    is_complete: bool = False
    """Whether it came to its end, and was not interrupted."""

    @property
    def verdict(self) -> str:
        """One of failed, passed, interrupted."""
        if has_failed(each.finding for each in self.told):
            return "failed"
        return "passed" if self.is_complete else "interrupted"

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return {
            "schema": SCHEMA,
            "verdict": self.verdict,
            "ran": self.passed_before is None,
            "passed_before": self.passed_before,
            "seconds": round(self.seconds, 1),
            "kind": self.kind,
            "profile": self.profile,
            "hardware": asdict(self.hardware) if self.hardware else None,
            "arguments": list(self.arguments),
            "vllm": vllm_version(),
            "target": self.target,
            "drafter": self.drafter,
            "findings": [
                {"section": each.section, **asdict(each.finding), "seconds": each.seconds} for each in self.told
            ],
            "overrides": [asdict(each) for each in self.overrides],
            "changes": [asdict(each) for each in self.changes],
            "not_proven": list(self.not_proven),
            "diagnosis": self.diagnosis,
        }

    def to_junit(self) -> str:
        """Return it in the form that JUnit's readers take: a suite for each section, a case for each check."""
        root = ET.Element("testsuites", name="aerie rehearse", time=f"{self.seconds:.1f}")
        for section in dict.fromkeys(each.section for each in self.told):
            told = [each for each in self.told if each.section == section]
            suite = ET.SubElement(
                root,
                "testsuite",
                name=section,
                tests=str(len(told)),
                failures=str(sum(each.finding.verdict is Verdict.FAILED for each in told)),
                skipped=str(sum(each.finding.verdict is Verdict.SKIPPED for each in told)),
            )
            for each in told:
                _add_case(suite, each)
        ET.indent(root)
        return ET.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def lines_of(told: Told) -> Iterator[str]:
    """Yield the lines of one finding."""
    finding = told.finding
    took = "" if told.seconds is None else f"  ({told.seconds:.1f} s)"
    head = f"  {_MARKS[finding.verdict]:<4} {finding.check:<{_NAMES}} "
    blank = " " * len(head)
    yield from _wrapped(finding.text + took, head, blank)
    for line in finding.details:
        yield from _wrapped(line, f"{blank}  ", f"{blank}    ")
    if finding.verdict in {Verdict.FAILED, Verdict.WARNED}:
        for name, text in (("do", finding.remedy), ("see", finding.source)):
            if text:
                yield from _wrapped(f"{name}: {text}", blank, f"{blank}  ")


def end_of(report: Report) -> Iterator[str]:
    """Yield the lines that stand below the findings."""
    if report.overrides:
        yield "Told differently to this engine"
        for override in report.overrides:
            yield from _item(f"{override.argument}: {_here(override)}, {_given(override)}; {override.why}")
    if report.changes:
        yield "Smaller than the real pair"
        for change in report.changes:
            yield from _item(f"{change.field}: {change.here} for {change.real}")
    if report.not_proven:
        yield "Not proven here"
        for text in report.not_proven:
            yield from _item(text)
    counts = {verdict: sum(each.finding.verdict is verdict for each in report.told) for verdict in Verdict}
    numbers = ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count)
    if report.passed_before:
        yield f"Nothing has changed since the rehearsal that passed at {report.passed_before}"
    else:
        ended = {"failed": "FAILED", "interrupted": "was interrupted"}.get(report.verdict, report.verdict)
        yield f"The rehearsal {ended} after {report.seconds:.0f} s" + (f": {numbers}" if numbers else "")


def _here(override: Override) -> str:
    return "left out" if override.here is None else str(override.here)


def _given(override: Override) -> str:
    return "which was left to vLLM" if override.given is None else f"for {override.given}"


def _item(text: str) -> list[str]:
    return _wrapped(text, "  - ", "    ")


def _wrapped(text: str, first: str, others: str) -> list[str]:
    """Return `text` in lines of their width; its own lines stay lines, and no path is broken."""
    lines: list[str] = []
    for line in text.split("\n"):
        indent = others if lines else first
        lines += textwrap.wrap(
            _legible(line), _WIDTH, initial_indent=indent, subsequent_indent=others, break_long_words=False,
            break_on_hyphens=False,
        )  # fmt: skip
    return lines


def _add_case(suite: ET.Element, told: Told) -> None:
    finding = told.finding
    case = ET.SubElement(
        suite, "testcase", classname=f"rehearsal.{told.section}", name=finding.check, time=f"{told.seconds or 0:.1f}"
    )
    text, *more = (_legible(each) for each in (finding.text, *finding.details, finding.remedy, finding.source) if each)
    match finding.verdict:
        case Verdict.FAILED:
            ET.SubElement(case, "failure", message=text).text = "\n".join(more)
        case Verdict.SKIPPED:
            ET.SubElement(case, "skipped", message=text)
        case _:
            ET.SubElement(case, "system-out").text = "\n".join([f"{finding.verdict}: {text}", *more])


def _legible(text: str) -> str:
    """Return one line of what any terminal and any XML reader take, whatever a log or a file's name has in it."""
    return plain(text).encode("utf-8", "backslashreplace").decode()
