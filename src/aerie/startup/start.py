"""Follows one start by what its processes say and do: vLLM 0.16 to 0.32, either model runner, any number of ranks."""

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from aerie.startup.activity import Activity
from aerie.startup.bars import Bar, bar_in, prefetched_in
from aerie.startup.estimate import TYPICAL, Pace, later, left_in_phase
from aerie.startup.history import History, kind_of
from aerie.startup.lines import Line
from aerie.startup.phases import Phase, Start, StartPhase
from aerie.startup.ranks import Ranks, Speaker, speaker_of
from aerie.startup.stall import Movement


class _Marker(NamedTuple):
    phase: StartPhase
    says: tuple[str, ...]
    """Any of these, in a line that is neither a warning nor an error, and the phase begins."""
    of_all: str = ""
    """`ranks` or `engines`: each of them says it, and the phase begins with the last."""


_MARKERS = (
    _Marker(StartPhase.SPAWNING, ("Initializing a V1 LLM engine",)),
    _Marker(StartPhase.JOINING, ("vLLM is using nccl==", "is assigned as DP rank")),
    _Marker(
        StartPhase.LOADING_TARGET, ("Loading model from scratch", "Starting to load model", "Initializing model took")
    ),
    _Marker(StartPhase.LOADING_DRAFTER, ("Using Eagle3 auxiliary layers from",), of_all="ranks"),
    _Marker(StartPhase.LOADING_DRAFTER, ("Loading drafter model",)),
    _Marker(StartPhase.PROFILING, ("Model loading took",), of_all="ranks"),
    _Marker(StartPhase.PROFILING, ("GiB for KV cache on node",)),  # a CPU, which says nothing after loading
    _Marker(
        StartPhase.COMPILING,
        (
            "Starting torch.compile",
            "Dynamo bytecode transform time",
            "Directly load AOT compilation",
            "Warming up model for the compilation",
        ),
    ),
    _Marker(StartPhase.MEASURING_GRAPHS, ("Profiling CUDA graph memory",)),
    _Marker(StartPhase.WARMING_UP, ("KV cache size: ", "JIT kernel warmup starting", "Compile and warming up model")),
    _Marker(StartPhase.LISTENING, ("init engine (profile",), of_all="engines"),  # --data-parallel-size has several
    _Marker(StartPhase.LISTENING, ("Supported tasks: ", "Starting vLLM ", "Application startup complete")),
)
_PHASES = tuple(StartPhase)
_LOADING = frozenset({StartPhase.LOADING_TARGET, StartPhase.LOADING_DRAFTER})
_CAPTURING = frozenset({StartPhase.MEASURING_GRAPHS, StartPhase.CAPTURING_GRAPHS})
_COMPILED = {"[backbone] ": "target", "[eagle_head] ": "drafter"}
_NCCL = re.compile(r"vLLM is using nccl==([\w.]{1,20})")
_WITHOUT_DRAFTER = "speculative_config=None"
_EAGER = "enforce_eager=True"
_ON_A_CPU = "device_config=cpu"
_GB = 1e9
_ALL = 100  # percent
_ALMOST = 0.999  # all of a start is done when it is ready, and not before


class StartReader:
    """Reads one start. Times are seconds since the epoch; one that lies before an earlier one counts as that.

    A start in which nothing has moved for `stall_timeout` seconds has stalled. Of the time between two calls only
    `UNSEEN` seconds count for that, so somebody has to look that often.
    """

    def __init__(self, began: float, history: History, stall_timeout: float) -> None:
        self._history = history
        self._stall_timeout = stall_timeout
        self._kind = ""
        self._left_out: frozenset[StartPhase] = frozenset()
        self._began = self._now = began
        self._ended: float | None = None
        self._past: dict[StartPhase, Phase] = {}
        self._phase = StartPhase.CONFIGURING
        self._phase_began = began
        self._detail = ""
        self._pace = Pace()
        self._ranks = Ranks()
        self._engines: set[Speaker] = set()
        self._have_said: dict[StartPhase, set[Speaker]] = {}
        self._bar: Bar | None = None
        self._bars_drawn: list[str] = []
        self._bars_measured = 0
        self._prefetched: dict[Speaker, int] = {}
        self._load_is_long = False
        self._movement = Movement(began)
        self._fraction = 0.0

    def say(self, line: Line, at: float) -> None:
        """Take one line of the engine's output into account."""
        if self._ended is not None:
            return
        at = self._clock(at)
        bar = bar_in(line.text)
        if bar is not None:
            self._draw(bar, at)
        elif line.level not in {"WARNING", "ERROR", "CRITICAL"}:
            self._hear(line, at)
        self._movement.said(line, at, progress=f"{bar.what} {bar.done}" if bar else "")

    def observe(self, activity: Activity, at: float) -> None:
        """Take what the kernel and the driver show into account."""
        if self._ended is not None:
            return
        at = self._clock(at)
        self._movement.observed(activity, at)
        self._ranks.observe(activity)
        if self._phase in _LOADING:
            self._show_loaded(at)

    def answered(self, at: float) -> None:
        """Take into account that /health has answered 200: one completion is left."""
        if self._ended is None:
            self._enter(StartPhase.ANSWERING, self._clock(at))

    def ready(self, at: float) -> None:
        """End the start: the service is ready."""
        if self._ended is None:
            self.answered(at)
            self._ended = self._now
            self._past[self._phase] = Phase(self._phase, self._phase_began, self._ended, 1.0, self._detail)
            self._fraction = 1.0

    def view(self, at: float) -> Start:
        """Return where the start is."""
        ended = self._ended
        at = self._clock(at) if ended is None else ended
        remaining = self._remaining(at) if ended is None else None
        silent = self._movement.silent_seconds if ended is None else 0.0
        self._fraction = max(self._fraction, self._weighed(at))
        return Start(
            phases=tuple(self._picture()),
            phase=self._phase,
            fraction=self._fraction,
            began=self._began,
            ended=ended,
            eta=None if remaining is None else at + remaining,
            remaining_seconds=remaining,
            moved=self._movement.moved,
            moved_by=self._movement.moved_by,
            silent_seconds=silent,
            stalled=silent >= self._stall_timeout,
            waiting_for=self._waiting_for() if ended is None else None,
            kind=self._kind,
        )

    def _clock(self, at: float) -> float:
        self._movement.looked(at)
        self._now = max(self._now, at)
        return self._now

    def _hear(self, line: Line, at: float) -> None:
        if self._ranks.arrives(line):
            self._show_arrived(at)
            return
        if (percent := prefetched_in(line.text)) is not None:
            self._prefetched[speaker_of(line)] = percent
            self._show_loaded(at)
            return
        for marker in _MARKERS:
            if any(said in line.text for said in marker.says):
                if self._is_the_last_to_say(marker, speaker_of(line)):
                    self._enter(marker.phase, at)
                    self._tell(marker, line)
                return

    def _is_the_last_to_say(self, marker: _Marker, speaker: Speaker) -> bool:
        if marker.phase is StartPhase.SPAWNING:
            self._engines.add(speaker)
        if not marker.of_all:
            return True
        speakers = self._have_said.setdefault(marker.phase, set())
        speakers.add(speaker)
        return not (self._engines - speakers if marker.of_all == "engines" else self._ranks.silent(speakers))

    def _tell(self, marker: _Marker, line: Line) -> None:
        """Keep what else the line of a marker says."""
        if marker.phase is StartPhase.SPAWNING and not self._kind:
            self._kind = kind_of(line.text)
            self._left_out = frozenset(_left_out(line.text))
        elif nccl := _NCCL.search(line.text):
            self._detail = f"{self._detail}, NCCL {nccl[1]}".removeprefix(", ")
        elif self._phase in {StartPhase.COMPILING, StartPhase.WARMING_UP}:
            self._detail = next((what for tag, what in _COMPILED.items() if line.text.startswith(tag)), self._detail)

    def _show_arrived(self, at: float) -> None:
        arrived, world_size = self._ranks.arrived, self._ranks.world_size
        self._enter(StartPhase.SPAWNING, at)
        if arrived >= world_size:
            self._enter(StartPhase.JOINING, at)
            self._detail = f"{arrived} rank{'s' if arrived > 1 else ''}"
        elif self._phase is StartPhase.SPAWNING:
            self._detail = f"{arrived} of {world_size} ranks"
            self._pace.show(arrived / world_size, at, 1 / world_size)

    def _draw(self, bar: Bar, at: float) -> None:
        if bar.loads:
            self._enter(StartPhase.LOADING_TARGET, at)
            if self._starts_over(bar):
                self._enter(StartPhase.LOADING_DRAFTER, at)
            if self._phase in _LOADING:
                self._bar = bar
                self._show_loaded(at)
            return
        final = self._begun(StartPhase.WARMING_UP)
        self._enter(StartPhase.CAPTURING_GRAPHS if final else StartPhase.MEASURING_GRAPHS, at)
        if self._phase in _CAPTURING:
            self._show_captured(bar, at)

    def _starts_over(self, bar: Bar) -> bool:
        """Return whether this is the drafter's bar, for those who load one and do not say so (0.16 on a CPU)."""
        return (
            self._phase is StartPhase.LOADING_TARGET
            and StartPhase.LOADING_DRAFTER not in self._left_out
            and bool(self._kind)
            and not self._have_said
            and self._bar is not None
            and self._bar.fraction == 1.0
            and bar.fraction == 0.0
        )

    def _show_loaded(self, at: float) -> None:
        """Show rank 0's bar, and as much less of the phase as the slowest rank holds less than rank 0."""
        if self._phase not in _LOADING:
            return
        told = []
        if self._bar is not None:
            lag = self._ranks.lag()
            self._pace.show(self._bar.fraction * (lag.ratio if lag else 1.0), at, self._bar.step)
            told.append(str(self._bar))
        elif read := self._ranks.read_bytes():
            told.append(f"{read / _GB:.1f} GB read")
        if self._prefetched and (slowest := min(self._prefetched.values())) < _ALL:
            told.append(f"{slowest}% prefetched")
        self._detail = ", ".join(told)

    def _show_captured(self, bar: Bar, at: float) -> None:
        """Show a bar; how many there are, so that it is a share of a whole, is known once the measuring is over."""
        if bar.what not in self._bars_drawn:
            self._bars_drawn.append(bar.what)
        before = self._bars_drawn.index(bar.what)
        if len(self._bars_drawn) <= self._bars_measured:
            self._pace.show((before + bar.fraction) / self._bars_measured, at)
        self._detail = str(bar)

    def _begun(self, phase: StartPhase) -> bool:
        return _PHASES.index(self._phase) >= _PHASES.index(phase)

    def _enter(self, phase: StartPhase, at: float) -> None:
        if self._begun(phase):
            return
        loading = self._ranks.silent(self._have_said.get(StartPhase.PROFILING, set()))
        if phase is StartPhase.COMPILING and loading and StartPhase.PROFILING in self._have_said:
            return  # a rank that is through compiles while others still load
        self._past[self._phase] = Phase(self._phase, self._phase_began, at, 1.0, self._detail)
        if self._phase is StartPhase.MEASURING_GRAPHS:
            self._bars_measured = len(self._bars_drawn)
        if self._phase in _LOADING:
            self._bar = None
        self._phase, self._phase_began, self._detail = phase, at, ""
        self._pace = Pace()
        self._bars_drawn = []
        self._movement.entered_phase()
        if phase is StartPhase.LOADING_TARGET:
            self._ranks.begin_loading()

    def _picture(self) -> Iterator[Phase]:
        for phase in _PHASES:
            if phase in self._past:
                yield self._past[phase]
            elif phase is self._phase:
                yield Phase(phase, self._phase_began, None, self._pace.fraction, self._detail)
            elif phase not in self._left_out:
                yield Phase(phase)

    def _waiting_for(self) -> str | None:
        if self._phase is StartPhase.SPAWNING and self._ranks.arrived:
            return _ranks(self._ranks.missing())
        if self._phase is StartPhase.JOINING and self._ranks.world_size > 1:
            return f"{self._ranks.world_size} ranks to connect"
        if self._phase in _LOADING:
            if lag := self._ranks.lag():
                return f"rank {lag.rank}: {lag.holds / _GB:.1f} GB loaded, rank 0 {lag.rank_0_holds / _GB:.1f} GB"
            if loaded := self._have_said.get(StartPhase.PROFILING):
                return _ranks(self._ranks.silent(loaded))
        if self._phase is StartPhase.ANSWERING:
            return "a first completion"
        return None

    def _expected(self) -> Mapping[StartPhase, float]:
        """Return how long phases take, as far as that is known.

        Where no earlier start tells, a load that outweighs all the rest is enough to estimate the end by.
        """
        expected = self._history.expected(self._kind)
        if expected:
            return expected
        rest = self._typical()
        del rest[StartPhase.LOADING_TARGET]  # how long that takes, its bar must tell
        if self._phase is StartPhase.LOADING_TARGET and self._pace.whole() > later(self._phase, rest):
            self._load_is_long = True
        return rest if self._load_is_long else {}

    def _typical(self) -> dict[StartPhase, float]:
        return {phase: seconds for phase, seconds in TYPICAL.items() if phase not in self._left_out}

    def _remaining(self, at: float) -> float | None:
        expected = self._expected()
        if not expected:
            return None
        left = left_in_phase(self._pace, at - self._phase_began, expected.get(self._phase), at)
        return None if left is None else left + later(self._phase, expected)

    def _weighed(self, at: float) -> float:
        expected = self._history.expected(self._kind) or self._typical()
        past, elapsed = self._phase_began - self._began, at - self._phase_began
        left = left_in_phase(self._pace, elapsed, expected.get(self._phase, elapsed), at) or 0.0
        whole = past + elapsed + left + later(self._phase, expected)
        own = self._pace.fraction if self._pace.fraction is not None else elapsed / (elapsed + left or 1.0)
        return min((past + own * (elapsed + left)) / whole, _ALMOST) if whole else 0.0


def _left_out(configuration: str) -> Iterator[StartPhase]:
    """Return the phases that a start with this configuration does without."""
    if _WITHOUT_DRAFTER in configuration:
        yield StartPhase.LOADING_DRAFTER
    if _EAGER in configuration:
        yield StartPhase.COMPILING
    if _EAGER in configuration or _ON_A_CPU in configuration:
        yield from (StartPhase.MEASURING_GRAPHS, StartPhase.CAPTURING_GRAPHS)


def _ranks(ranks: list[int]) -> str | None:
    """Return `rank 3` or `ranks 3, 5`; None for none."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}" if ranks else None
