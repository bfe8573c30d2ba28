"""Reads an engine's lines as they come, in bounded memory, and says at any time why it failed."""

import re
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from aerie.diagnosis.diagnosis import Diagnosis, End, conclude
from aerie.diagnosis.evidence import BEFORE, Evidence, parse_bare, parse_kernel, seconds_between
from aerie.diagnosis.reported import SupervisorReader
from aerie.diagnosis.root_cause import (
    CORE_STOPPED,
    EXITED,
    Said,
    Telling,
    ends_the_engine,
    follows_from_another,
    is_silent,
    line_ends_the_engine,
    most_telling,
    of_line,
    root_cause,
    telling_of_line,
    telling_of_trace,
    where_cut,
    who_died,
    words,
)
from aerie.diagnosis.signatures import Kind, Severity, Signature, Where, signatures
from aerie.diagnosis.tracebacks import TraceReader
from aerie.startup.lines import KERNEL, Line

_STREAMS_KEPT = 128
_KEPT = 4  # of each degree of telling: the first ones, and of what was logged the last ones
_PROCESSES_KEPT = 64
_NCCL_KEPT = 4
_KERNELS_KEPT = 16
_CARRIERS_KEPT = 64
_LONGEST_SEEN = 1000  # characters of a signature's line
_CUT_WITHIN = 10  # lines at the end of a log, in which the last one of a traceback stands that was cut
_LAST = 20  # lines of a log, among which a kill stands that ended it: other processes may have gone on for a moment
_NEAR = 100  # lines between what belongs together: several processes say the same at the same time

_Key = tuple[str, str, int | None, str, str]

# Lines that only a living engine's API server writes.
_STARTED = "Application startup complete"
LIFE = (_STARTED, "throughput: ", '" 200 OK')
_LIVES_ON = 1.0  # seconds for which the API server of an engine that dies still answers and logs
# Somebody asked the engine to stop: what its processes say of one another from then on is no failure.
_STOP = "[shutdown] API server: shutdown triggered"
# All of its processes get a SIGTERM where a whole group is ended, and its core where the API server is killed.
_CORE_ASKED = "[shutdown] Process manager: send sigterm to process EngineCore"  # by its own parent
_API_ENDED = re.compile(r"INFO: +Shutting down$")  # uvicorn's: it was not killed
# Compose's service, or the container that is named after it.
_OUR_SERVICE = re.compile(r"(?:[\w.-]*[_-])?vllm(?:[_-]\d+)?")
_STOPPED_CODES = {0, 130, 143}
# How torch marks each line of an exception that ends a process of a distributed group.
_RANK = re.compile(r"\[(rank\d+)\]: ")
_NCCL_WARNING = " NCCL WARN "
_QUIET = frozenset({"DEBUG", "INFO", "WARNING"})
# Without a head of vLLM's, what nobody else writes.
_VLLMS = re.compile(
    r"aerie: |(?:usage: )?vllm\b|\s*File \".*(?:/vllm/|/bin/vllm\")"
    r"|.*(?:\bvllm\.\w|VLLM|EngineCore|Engine core|WorkerProc|Worker proc)"
)
_ABOUT_NCCL = re.compile(r"[Nn]ccl|NCCL|[Dd]istributed|CUDA")


@dataclass(slots=True)
class _Stream:
    """What one process prints, or the records that one place of its code logs."""

    reader: TraceReader
    clock: str
    began: int = 0
    """The number of the line with which what it reads began."""
    last: int = 0
    """The number of its last line."""


@dataclass(slots=True)
class _Seen:
    """Where the line of a signature stood, as the number of the line: at first, and lately."""

    first: int
    last: int
    clock: str
    """vLLM's when it was last seen."""
    text: str

    def near(self, begin: int, end: int) -> bool:
        return any(begin - _NEAR <= line <= end + _NEAR for line in (self.first, self.last))


@dataclass(slots=True)
class _Kernels:
    """What a line of the kernel's in the log says."""

    order: int
    clock: str
    """vLLM's by then."""
    evidence: Evidence
    of_a_start: bool
    """The engine had said something by then."""


class Collector:
    """What one engine said, from its start on, as far as it may tell why it failed."""

    def __init__(self, known: Sequence[Signature] | None = None, *, carried: bool = False) -> None:
        """Read what an engine says; or, `carried`, a log in which lines of the kernel and of compose may stand as well.

        An engine itself says nothing of the kind, but for what it quotes of a request.
        """
        self._carried = carried
        self._known = signatures() if known is None else known
        self._fatal = frozenset(known.id for known in self._known if known.severity is Severity.FATAL)
        self._needles = [(known, known.needle) for known in self._known if known.where is Where.LINE]
        self._streams: OrderedDict[_Key, _Stream] = OrderedDict()
        self._said: OrderedDict[tuple[str, Telling], deque[Said]] = OrderedDict()
        self._seen: dict[str, _Seen] = {}
        self._vllms: set[str] = set()
        self._engines: set[str] = set()
        self._kernels: deque[_Kernels] = deque(maxlen=_KERNELS_KEPT)
        self._clock = ""
        self._supervisor = SupervisorReader(self._known)
        self._pids: OrderedDict[str, int] = OrderedDict()
        self._nccl: deque[str] = deque(maxlen=_NCCL_KEPT)
        self._order = 0
        self._dying: set[str] = set()
        self._stopping = False
        self._is_up = self._has_served = self._core_asked = self._was_stopped = False
        self._core_stopped: Said | None = None
        self._exited: Said | None = None

    @property
    def dying(self) -> bool:
        """Whether the engine goes down for certain. What it says further belongs to the diagnosis all the same."""
        return any(map(self._is_own, self._dying))

    @property
    def is_vllms(self) -> bool:
        """Whether any line was vLLM's or its supervisor's."""
        return bool(self._vllms)

    @property
    def undecided(self) -> bool:
        """Whether something broke that a living engine may have caught."""
        return not self.dying and self.diagnose() is not None

    @property
    def noticed(self) -> tuple[Signature, ...]:
        """Signatures of lines seen that end nothing: harmless ones, and what makes the engine serve worse."""
        return tuple(known for known in self._known if known.id in self._seen and known.severity is not Severity.FATAL)

    @property
    def stopped(self) -> str | None:
        """When somebody stopped it, in words; None for an engine that has served, and for one that nobody stopped."""
        asked = self._stopping or self._was_stopped
        if self._has_served or not (asked or self._core_stopped):
            return None
        if self._is_up:
            return "before it served anything"
        killed = ", or its API server was killed: `dmesg` tells an out-of-memory kill"
        return "before it was ready" + ("" if asked else killed)

    @property
    def cut(self) -> str | None:
        """Whose traceback the log ends in before it says what was raised, and where; None where it does not."""
        unfinished = [
            (stream.last, key, stream.reader.unfinished)
            for key, stream in self._streams.items()
            if stream.reader.unfinished is not None and self._is_own(key[0])
        ]
        last, key, frames = max(unfinished, default=(0, None, None), key=lambda one: one[0])
        if key is None or self._order - last > _CUT_WITHIN:
            return None
        return where_cut(key[1], key[2], frames or ())

    def feed(self, lines: Iterable[Line]) -> None:
        """Read what the engine said next."""
        for line in lines:
            self._order += 1
            if self._is_of_others(line):
                continue
            self._clock = line.clock or self._clock
            self._recognise(line)
            if not (line.process or line.level) and self._supervisor.say(line.text):
                if self._supervisor.stopping:
                    self._stop()
                continue
            self._search(line)
            if line.pid is not None and line.process:
                self._remember(line.process, line.pid)
            if line.level in _QUIET:
                self._quiet(line)
            elif not self._stopping:
                self._read(line)

    def _recognise(self, line: Line) -> None:
        """Take note of whose line it is."""
        if line.process or line.source:
            self._engines.add(line.carrier)
        if line.carrier not in self._vllms and (line.process or line.source or _VLLMS.match(line.text)):
            self._vllms.add(line.carrier)

    def _is_of_others(self, line: Line) -> bool:
        """Read what the kernel or compose may say of the engine, and tell whether it was one of them."""
        if line.process == KERNEL:
            self._hear(parse_kernel(line.text) if self._carried else [])
            return True
        if not self._carried or line.process or line.level:
            return False
        if exited := EXITED.match(line.text):
            return self._exit(line, exited["name"], int(exited["container"]))
        found = parse_bare(line.text) if self._stream(line).reader.idle else []  # else it belongs to a message
        self._hear(found)
        return bool(found)

    def _hear(self, found: Iterable[Evidence]) -> None:
        self._kernels.extend(_Kernels(self._order, self._clock, one, bool(self._engines)) for one in found)

    def diagnose(
        self, ended: str | None = None, evidence: Sequence[Evidence] = (), kind: Kind | None = None
    ) -> Diagnosis | None:
        """Say why the engine failed; None where nothing says that it did.

        `ended` says how it ended, in words, where that is known: "ended with exit code 1". `evidence` is what stands
        outside its output about this end (see `evidence.relevant`). `kind` is what whoever saw the end knows
        already: KILLED, or HUNG.
        """
        reported = self._supervisor if ended is None else None  # whoever saw the end knows it
        if reported:
            told, evidence = reported.end, (*reported.evidence, *evidence)
            ended, kind = (told.words, kind or told.kind) if told else (None, kind)
        gone = self._gone if ended is None else None
        said = most_telling([*self._all_said(), *([gone] if gone else ())])
        ending = self._ending_lines(said)
        broke = self.dying or self._killed or gone or ending or (said is not None and said.telling >= Telling.RAISED)
        if ended is None and not broke and not (reported and reported.report):
            return None
        about_nccl = said is None or is_silent(said) or _ABOUT_NCCL.search(words(said))
        remarks = tuple(self._nccl) if about_nccl else ()
        root = root_cause(said, self._pids, (*remarks, *self._died_of(said))) if said else None
        end = End(ended, kind, (*self._of_the_kernel(), *evidence), silent=is_silent(said))
        found = conclude(root, end, self._known, ending)
        if line := ending.get(found.signature or ""):
            found = replace(found, root=root.with_lines([line]) if root else of_line(line))
        return (reported and reported.diagnosis(root, found)) or found

    @property
    def _gone(self) -> Said | None:
        """A line that shows that the engine is gone, though nobody stopped it and nothing says why.

        It is compose's, or of the core that was ended while it served, where the API server says nothing of any stop.
        """
        if self._stopping:
            return None
        return self._exited or (self._core_stopped if self._is_up or self._has_served else None)

    @property
    def _killed(self) -> bool:
        """Whether the log ends soon after the kernel has killed a process of the engine's to free memory."""
        return not self._stopping and any(
            one.of_a_start and one.evidence.kind is Kind.MEMORY and self._order - one.order <= _LAST
            for one in self._kernels
        )

    def _died_of(self, said: Said) -> list[str]:
        """Return the line that names the process, where its own last words name none."""
        raised = said.trace is not None and not said.trace.native
        if said.line.process or said.telling is not Telling.FATAL or raised or who_died(said):
            return []
        after = (one for one in self._all_said() if who_died(one) and 0 < one.order - said.order <= _NEAR)
        first = min(after, key=lambda one: one.order, default=None)
        return [first.line.text] if first else []

    def _of_the_kernel(self) -> list[Evidence]:
        """Return what stands near the end in the log, or came not long before it by vLLM's clock."""
        return [
            one.evidence
            for one in self._kernels
            if self._order - one.order <= _NEAR or (one.clock and seconds_between(one.clock, self._clock) <= BEFORE)
        ]

    def _exit(self, line: Line, name: str, code: int) -> bool:
        """Take note of how a container ended; return whether it was the engine's: another service's does not count."""
        if not (name in self._engines or (self._engines == {""} and _OUR_SERVICE.fullmatch(name))):
            return False
        carrier = name if name in self._engines else ""
        self._stream(line).reader.cut()
        self._core_stopped, self._was_stopped = None, code in _STOPPED_CODES  # this says more
        ended = Said(self._order, line._replace(carrier=carrier), Telling.VANISHED, clock=self._clock)
        self._exited = None if self._was_stopped else ended
        return True

    def _stop(self) -> None:
        """Take note that somebody asked it to stop; what it dies of is none of that."""
        self._stopping = self._stopping or not self.dying

    def _is_own(self, carrier: str) -> bool:
        """Tell whether a carrier's lines are the engine's: all are, until one has said something of vLLM's."""
        return not self._vllms or carrier in self._vllms

    def _search(self, line: Line) -> None:
        for known, needle in self._needles:
            if needle in line.text and self._counts(known, line) and known.match.search(line.text):
                seen = self._seen.get(known.id)
                if seen is None:
                    text = line.text[:_LONGEST_SEEN]
                    seen = self._seen[known.id] = _Seen(self._order, self._order, self._clock, text)
                seen.last, seen.clock = self._order, self._clock

    def _counts(self, known: Signature, line: Line) -> bool:
        """Tell whether a line may show it: what is only logged ends nothing, as little as what others say."""
        return known.severity is not Severity.FATAL or (
            line.level not in _QUIET and (not line.carrier or self._is_own(line.carrier))
        )

    def _remember(self, process: str, pid: int) -> None:
        if self._pids.get(process) != pid:
            self._pids[process] = pid
            self._pids.move_to_end(process)
            if len(self._pids) > _PROCESSES_KEPT:
                self._pids.popitem(last=False)

    def _quiet(self, line: Line) -> None:
        """Read a line that is no error: it ends what its process printed before, and may show that the engine lives."""
        if printed := self._streams.get((line.carrier, line.process, line.pid, "", "")):
            printed.reader.interrupt()
        if line.text.startswith(CORE_STOPPED):
            if not self._core_asked:
                self._core_stopped = Said(self._order, line, Telling.VANISHED, clock=self._clock)
        elif line.text.startswith(_CORE_ASKED):
            self._core_asked, self._core_stopped = True, None
        elif line.text.startswith(_STOP):
            self._stop()
        self._look_for_life(line)

    def _look_for_life(self, line: Line) -> None:
        """Take what the engine has outlived for no end of it."""
        if _API_ENDED.match(line.text):
            self._core_asked, self._core_stopped = True, None
        elif any(sign in line.text for sign in LIFE) and self._is_own(line.carrier) and not self.dying:
            started = _STARTED in line.text
            self._is_up, self._has_served = self._is_up or started, self._has_served or not started
            self._core_stopped = self._exited = None
            for said in self._all_said():
                said.outlived = (
                    said.outlived or started or said.telling is not Telling.FATAL or self._is_over(said.clock)
                )
            for name in self._fatal & self._seen.keys():
                if started or self._is_over(self._seen[name].clock):
                    del self._seen[name]

    def _is_over(self, clock: str) -> bool:
        """Tell whether it is longer ago than an engine seems to live once a process of it has died."""
        return _apart(clock, self._clock) > _LIVES_ON

    def _take_up_again(self, end: Line) -> None:
        """Take what the core's end follows from for its cause: the last that processes died of, outlived or not."""
        died = [
            said
            for said in self._all_said()
            if said.outlived and said.trace and telling_of_trace(said.trace, said.line.level) is Telling.FATAL
            if said.line.carrier == end.carrier and _apart(said.clock, self._clock) <= BEFORE
        ]
        last = max(died, key=lambda said: said.order, default=None)
        for said in died:
            if last and _apart(said.clock, last.clock) <= _LIVES_ON:
                said.outlived = False

    def _read(self, line: Line) -> None:
        if not line.level:
            self._look_for_life(line)
            if _NCCL_WARNING in line.text:
                self._nccl.append(line.text)
            if rank := _RANK.match(line.text):
                line = line._replace(text=line.text[rank.end() :] or " ", process=line.process or rank[1])
        stream = self._stream(line)
        stream.last = self._order
        reader = stream.reader
        if was_idle := reader.idle:
            stream.began = self._order
        if trace := reader.say(line.text):
            if len(trace.raised) == 1:
                self._keep(
                    Said(self._order, line, telling_of_trace(trace, line.level), trace, stream.began, self._clock)
                )
            if follows_from_another(trace):
                self._take_up_again(line)
            self._die(line, ends_the_engine(trace, line.level))
        elif was_idle and reader.idle and (telling := telling_of_line(line)) is not None:
            self._keep(Said(self._order, line, telling, clock=self._clock))
            self._die(line, line_ends_the_engine(line, telling))

    def _die(self, line: Line, ends: bool) -> None:  # noqa: FBT001 - what was judged of the line
        if ends and len(self._dying) < _CARRIERS_KEPT:
            self._dying.add(line.carrier)

    def _stream(self, line: Line) -> _Stream:
        key = (line.carrier, line.process, line.pid, line.level, line.source)
        stream = self._streams.get(key)
        if stream is None:
            if len(self._streams) >= _STREAMS_KEPT:
                self._streams.popitem(last=False)
            stream = self._streams[key] = _Stream(TraceReader(), line.clock)
        self._streams.move_to_end(key)
        if stream.clock != line.clock:  # another record of the same place
            stream.reader.cut()
            stream.clock = line.clock
        return stream

    def _keep(self, said: Said) -> None:
        """Keep the first few of each sort, and the last few of what was outlived or only logged."""
        kept = self._said.setdefault((said.line.carrier, said.told), deque())
        if len(self._said) > _STREAMS_KEPT:
            self._said.popitem(last=False)
        if len(kept) >= _KEPT:
            if not (kept[0].outlived or said.told is Telling.LOGGED):
                return
            kept.popleft()
        kept.append(said)

    def _ending_lines(self, said: Said | None) -> dict[str, str]:
        """Return the fatal signatures whose line goes with the root cause, or where nothing said why with the end.

        Each has its line with it.
        """
        places = [(said.began or said.order, said.order)] if said else []
        places += [(self._order, self._order)] if is_silent(said) else []
        traced = [text for raised in said.trace.raised for text in raised.lines] if said and said.trace else []
        return {
            known.id: seen.text
            for known in self._known
            if known.id in self._fatal and (seen := self._seen.get(known.id))
            if any(seen.near(*place) for place in places) or any(map(known.match.search, traced))
        }

    def _all_said(self) -> list[Said]:
        return [said for (carrier, _), kept in self._said.items() if self._is_own(carrier) for said in kept]


def _apart(clock: str, other: str) -> float:
    """Return the seconds between two of vLLM's clocks, of which either may be the earlier: logs of processes mix."""
    return min(seconds_between(clock, other), seconds_between(other, clock))
