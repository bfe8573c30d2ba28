"""Reads an engine's lines as they come, in bounded memory, and says at any time why it failed."""

import re
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from aerie.diagnosis.diagnosis import Diagnosis, End, conclude
from aerie.diagnosis.evidence import Evidence
from aerie.diagnosis.root_cause import (
    Said,
    Telling,
    ends_the_engine,
    is_silent,
    line_ends_the_engine,
    most_telling,
    root_cause,
    telling_of_line,
    telling_of_trace,
    words,
)
from aerie.diagnosis.signatures import Kind, Severity, Signature, Where, signatures
from aerie.diagnosis.tracebacks import TraceReader
from aerie.startup.lines import Line

_STREAMS_KEPT = 128
_KEPT = 4  # of each degree of telling: the first ones, and of what was logged the last ones
_PROCESSES_KEPT = 64
_NCCL_KEPT = 4

_Key = tuple[str, int | None, str, str]

# Lines that only a living engine's API server writes.
LIFE = ("Application startup complete", "throughput: ", '" 200 OK')
# Somebody asked the engine to stop: what its processes say of one another from then on is no failure.
_STOP = "[shutdown] API server: shutdown triggered"
# How torch marks each line of an exception that ends a process of a distributed group.
_RANK = re.compile(r"\[(rank\d+)\]: ")
_NCCL_WARNING = " NCCL WARN "
_QUIET = frozenset({"DEBUG", "INFO", "WARNING"})
_ABOUT_NCCL = re.compile(r"[Nn]ccl|NCCL|[Dd]istributed|CUDA")


@dataclass(slots=True)
class _Stream:
    """What one process prints, or the records that one place of its code logs."""

    reader: TraceReader
    clock: str


class Collector:
    """What one engine said, from its start on, as far as it may tell why it failed."""

    def __init__(self, known: Sequence[Signature] | None = None) -> None:
        self._known = signatures() if known is None else known
        self._needles = [(known, known.needle) for known in self._known if known.where is Where.LINE]
        self._streams: OrderedDict[_Key, _Stream] = OrderedDict()
        self._said: dict[Telling, deque[Said]] = {}
        self._seen: dict[str, Line] = {}
        self._pids: OrderedDict[str, int] = OrderedDict()
        self._nccl: deque[str] = deque(maxlen=_NCCL_KEPT)
        self._order = 0
        self._dying = False
        self._stopping = False

    @property
    def dying(self) -> bool:
        """Whether the engine goes down for certain. What it says further belongs to the diagnosis all the same."""
        return self._dying

    @property
    def undecided(self) -> bool:
        """Whether something broke that a living engine may have caught."""
        return not self._dying and self.diagnose() is not None

    @property
    def noticed(self) -> tuple[Signature, ...]:
        """Signatures of lines seen that end nothing: harmless ones, and what makes the engine serve worse."""
        return tuple(known for known in self._known if known.id in self._seen and known.severity is not Severity.FATAL)

    def feed(self, lines: Iterable[Line]) -> None:
        """Read what the engine said next."""
        for line in lines:
            self._order += 1
            self._search(line)
            if line.pid is not None and line.process:
                self._remember(line.process, line.pid)
            if line.level in _QUIET:
                self._quiet(line)
            elif not self._stopping:
                self._read(line)

    def diagnose(
        self, ended: str | None = None, evidence: Sequence[Evidence] = (), kind: Kind | None = None
    ) -> Diagnosis | None:
        """Say why the engine failed; None where nothing says that it did.

        `ended` says how it ended, in words, where that is known: "ended with exit code 1". `evidence` is what stands
        outside its output about this end (see `evidence.relevant`). `kind` is what whoever saw the end knows
        already: KILLED, or HUNG.
        """
        said = most_telling(self._all_said())
        broke = self._dying or self._ending_lines() or (said is not None and said.telling >= Telling.RAISED)
        if ended is None and not broke:
            return None
        about_nccl = said is None or is_silent(said) or _ABOUT_NCCL.search(words(said))
        remarks = tuple(self._nccl) if about_nccl else ()
        root = root_cause(said, self._pids, remarks) if said else None
        end = End(ended, kind, tuple(evidence), silent=is_silent(said))
        return conclude(root, end, self._known, frozenset(self._seen))

    def _search(self, line: Line) -> None:
        for known, needle in self._needles:
            if needle in line.text and known.id not in self._seen and known.match.search(line.text):
                self._seen[known.id] = line

    def _remember(self, process: str, pid: int) -> None:
        if self._pids.get(process) != pid:
            self._pids[process] = pid
            self._pids.move_to_end(process)
            if len(self._pids) > _PROCESSES_KEPT:
                self._pids.popitem(last=False)

    def _quiet(self, line: Line) -> None:
        """Read a line that is no error: it ends what its process printed before, and may show that the engine lives."""
        if printed := self._streams.get((line.process, line.pid, "", "")):
            printed.reader.interrupt()
        self._stopping = self._stopping or (not self._dying and line.text.startswith(_STOP))
        self._look_for_life(line.text)

    def _look_for_life(self, text: str) -> None:
        """Take what the engine has outlived for no end of it."""
        if not self._dying and any(sign in text for sign in LIFE):
            for said in self._all_said():
                said.outlived = True
            for known in self._ending_lines():
                del self._seen[known.id]

    def _read(self, line: Line) -> None:
        if not line.level:
            self._look_for_life(line.text)
            if _NCCL_WARNING in line.text:
                self._nccl.append(line.text)
            if rank := _RANK.match(line.text):
                line = line._replace(text=line.text[rank.end() :] or " ", process=line.process or rank[1])
        reader = self._reader(line)
        was_idle = reader.idle
        if trace := reader.say(line.text):
            if len(trace.raised) == 1:
                self._keep(Said(self._order, line, telling_of_trace(trace, line.level), trace))
            self._dying = self._dying or ends_the_engine(trace, line.level)
        elif was_idle and reader.idle and (telling := telling_of_line(line)) is not None:
            self._keep(Said(self._order, line, telling))
            self._dying = self._dying or line_ends_the_engine(line, telling)

    def _reader(self, line: Line) -> TraceReader:
        key = (line.process, line.pid, line.level, line.source)
        stream = self._streams.get(key)
        if stream is None:
            if len(self._streams) >= _STREAMS_KEPT:
                self._streams.popitem(last=False)
            stream = self._streams[key] = _Stream(TraceReader(), line.clock)
        self._streams.move_to_end(key)
        if stream.clock != line.clock:  # another record of the same place
            stream.reader.cut()
            stream.clock = line.clock
        return stream.reader

    def _keep(self, said: Said) -> None:
        """Keep the first few of each sort, and the last few of what was outlived or only logged."""
        kept = self._said.setdefault(said.told, deque())
        if len(kept) >= _KEPT:
            if not (kept[0].outlived or said.told is Telling.LOGGED):
                return
            kept.popleft()
        kept.append(said)

    def _ending_lines(self) -> list[Signature]:
        """Return the fatal signatures whose line was seen."""
        return [known for known in self._known if known.id in self._seen and known.severity is Severity.FATAL]

    def _all_said(self) -> list[Said]:
        return [said for kept in self._said.values() for said in kept]
