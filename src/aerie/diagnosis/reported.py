"""Reads what `aerie serve` says between its engine's lines: how it ended, and the diagnosis that was printed of it."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from aerie.diagnosis.diagnosis import HANDBOOK, ROOT_CAUSE, RULE, SEE, SEEN_OUTSIDE, WHAT_TO_DO, WHY, Diagnosis
from aerie.diagnosis.evidence import Evidence, parse_kernel
from aerie.diagnosis.root_cause import RootCause
from aerie.diagnosis.signatures import Kind, Severity, Signature

_OURS = "aerie: "
_LONGEST_REPORT = 300  # lines
_LONGEST_LINE = 1000  # characters
_PHASE = re.compile(
    r"aerie: (?P<phase>starting|checking|ready|unready|failed|held|stopping|stopped)\b(?:; )?(?P<reason>.*?)"
    r"(?:; next start \S+ UTC|; `aerie retry` in this container starts it anew)?$"
)
_OVER = frozenset({"starting", "checking", "ready"})
_HUNG = re.compile(r"the start has stalled: |the engine hangs: |no step for \d")
_KILLED = re.compile(r"\(pid \d+\) died\b|was killed by SIG(?:KILL|TERM|INT|HUP|QUIT)\b")
_STUCK = "an engine before has not gone"
_TITLE = re.compile(rf"DIAGNOSIS: (?P<title>.+) \((?P<kind>{'|'.join(Kind)})\)$")
_SIGNATURE = re.compile(rf"{re.escape(HANDBOOK)}#([a-z0-9-]+)")
_END = re.compile(r"It is known that (.+?)\.(?= [A-Z]|$)")
_ITEM = re.compile(r"(kernel|cgroup|supervisor)(?: \d\d:\d\d:\d\d)?: (.+)")
_PLACE = re.compile(
    r"in (?:(?P<process>[A-Za-z][\w.-]*)(?: \(pid (?P<pid>\d+)\))?)?"
    r"(?:(?: at )?(?P<file>\S+):(?P<line>\d+)(?: in (?P<function>\S+))?)?$"
)
_HEADINGS = frozenset({ROOT_CAUSE, WHY, WHAT_TO_DO, SEEN_OUTSIDE, SEE})


@dataclass(frozen=True)
class Told:
    """What the supervisor said last of an engine's end."""

    words: str
    held: bool

    @property
    def kind(self) -> Kind | None:
        """Return what it saw: HUNG, or KILLED for a process that died."""
        if _HUNG.match(self.words):
            return Kind.HUNG
        return Kind.KILLED if _KILLED.search(self.words) else None

    @property
    def evidence(self) -> tuple[Evidence, ...]:
        """Return its words where they are an observation of its own."""
        kind = Kind.HARDWARE if self.words.startswith(_STUCK) else self.kind
        seen = kind in {Kind.HARDWARE, Kind.HUNG}
        return (Evidence("supervisor", None, self.words, kind=kind),) if seen else ()

    def of_the_configuration(self) -> Diagnosis:
        """Return the diagnosis where it has started no engine."""
        return Diagnosis(
            signature=None,
            title="The supervisor holds the engine back until something is mended",
            cause=self.words,
            remedy="Mend what it names, then `docker compose exec vllm aerie retry`; after a change of .env or of the "
            "engine's configuration, recreate the container.",
            kind=Kind.CONFIGURATION,
            severity=Severity.FATAL,
            source="",
            root=None,
            evidence=(),
            known=True,
        )


class SupervisorReader:
    """Reads the supervisor's lines; remembers what it said of the last end."""

    def __init__(self, known: Sequence[Signature]) -> None:
        self._known = known
        self._lines: list[str] = []
        self.told: Told | None = None
        self.report: Diagnosis | None = None
        self.stopping = False

    def say(self, text: str) -> bool:
        """Read a line without a head of vLLM's, and tell whether it was the supervisor's."""
        if text.startswith(_OURS):
            self._lines = []  # a report is written in one piece
            if found := _PHASE.match(text):
                self._enter(found["phase"], found["reason"])
            return True
        if text == RULE:
            return self._rule()
        if len(self._lines) == 1:
            ours = text.startswith("DIAGNOSIS: ")
        else:
            ours = bool(self._lines) and (text.startswith("  ") or text in _HEADINGS)
        if not ours:
            return False
        self._lines.append(text[:_LONGEST_LINE])
        if len(self._lines) > _LONGEST_REPORT:
            self._lines = []
        return True

    @property
    def end(self) -> Told | None:
        """What it said last of the end, in a line of its own or in its report."""
        said = None if self.told or not self.report else _END.search(self.report.cause)
        return Told(said[1], held=False) if said else self.told

    @property
    def evidence(self) -> tuple[Evidence, ...]:
        """What it has seen itself, and what it printed of others."""
        printed = self.report.evidence if self.report and not self.report.known else ()
        items = (one for text in printed for one in self._seen(text))
        return (*(self.end.evidence if self.end else ()), *items)

    def diagnosis(self, own: RootCause | None, found: Diagnosis) -> Diagnosis | None:
        """Return what was printed last, with the log's `own` root cause where that is the same.

        What was `found` by reading the log anew is better where its cause is known and that of the printed one is not.
        Where nothing was printed, return why no engine is started, unless something else tells.
        """
        if self.told and self.told.held and not self.report and not own and not found.evidence:
            return self.told.of_the_configuration()
        if self.report and found.known and not self.report.known:
            return replace(found, root=found.root or self.report.root, evidence=self.report.evidence)
        if self.report and self.report.root and own and _begin(own.text) == _begin(self.report.root.text):
            return replace(self.report, root=own)
        return self.report

    def _seen(self, item: str) -> list[Evidence]:
        """Read an item of the report's evidence; what it would explain was not printed."""
        if not (said := _ITEM.match(item)) or not self.report:
            return []
        if said[1] == "kernel":
            return parse_kernel(said[2])
        if said[1] == "cgroup":
            return [Evidence("cgroup", None, said[2], kind=Kind.MEMORY)]
        kind = self.report.kind if self.report.kind in {Kind.HARDWARE, Kind.HUNG} else None
        return [Evidence("supervisor", None, said[2], kind=kind)]

    def _enter(self, phase: str, reason: str) -> None:
        self.stopping = phase in {"stopping", "stopped"}
        if phase in _OVER:
            self.told = self.report = None
        elif reason and not self.stopping:
            self.told = Told(reason, held=phase == "held")

    def _rule(self) -> bool:
        """Read a rule: one begins a report, one stands below its title, one ends it."""
        body = self._lines[1:]
        if RULE in body:
            below = body.index(RULE)
            self.report = self._read(_joined(body[:below]), body[below + 1 :]) or self.report
            self._lines = []
        elif body and body[0].startswith("DIAGNOSIS: "):
            self._lines.append(RULE)
        else:
            self._lines = [RULE]
        return True

    def _read(self, title: str, body: list[str]) -> Diagnosis | None:
        said = _TITLE.match(title)
        if said is None:
            return None
        sections: dict[str, list[str]] = {}
        for line in body:
            if line in _HEADINGS:
                sections[line] = []
            elif sections:
                sections[next(reversed(sections))].append(line)
        see = _joined(sections.get(SEE, []))
        name = _SIGNATURE.match(see)
        known = next((one for one in self._known if (name and one.id == name[1]) or one.title == said["title"]), None)
        return Diagnosis(
            signature=known.id if known else None,
            title=said["title"],
            cause=_joined(sections.get(WHY, [])) or (known.cause if known else ""),
            remedy=_joined(sections.get(WHAT_TO_DO, [])) or (known.remedy if known else ""),
            kind=Kind(said["kind"]),
            severity=Severity.FATAL,
            source=known.source if known else "",
            root=_root(sections.get(ROOT_CAUSE, [])),
            evidence=_items(sections.get(SEEN_OUTSIDE, [])),
            known=known is not None and known.known,
        )


def _begin(text: str) -> str:
    """Return the beginning of a root cause, which no wrapping has changed."""
    return "".join(text.split())[:40]


def _joined(lines: list[str]) -> str:
    return " ".join(line.strip() for line in lines)


def _items(lines: list[str]) -> tuple[str, ...]:
    items: list[str] = []
    for line in lines:
        if line.startswith("  - "):
            items.append(line[4:])
        elif items:
            items[-1] += " " + line.strip()
    return tuple(items)


def _root(lines: list[str]) -> RootCause | None:
    quoted = [line[4:] for line in lines if line.startswith("  > ")]
    if not quoted:
        return None
    place = _PLACE.match(lines[0].strip())
    said = place.groupdict() if place else {}
    text = "\n".join(quoted)
    return RootCause(
        text=text,
        process=said.get("process") or "",
        pid=int(said["pid"]) if said.get("pid") else None,
        file=said.get("file"),
        line=int(said["line"]) if said.get("line") else None,
        function=said.get("function"),
        innermost=None,
        chain=(quoted[0],),
        excerpt=tuple(quoted),
    )
