"""Whether a serving engine works, idles or hangs: a pure judge, fed with what was seen of it and when.

`/health` cannot tell: it is 200 as long as no process has said that it failed. What can:

- The heartbeat counts the steps that gave a token to a request. A step that only fills a part of a long prompt moves
  the KV cache's usage instead, since the scheduler's figures come back with every step, outputs or not
  (`Scheduler.update_from_output`, `AsyncLLM.output_handler`, vLLM 0.32.0). So between two signs of life lies at most
  one step. No sign comes before a step's end: during a request's first step the gauges still say that none runs.
- A process works when it touches memory that it did not have, or reads. CPU time is no work: whoever waits for a
  stopped rank, in a collective on the CPU or on a GPU, waits in a loop, and such a GPU counts as busy. On the CPU a
  waiting rank has no page fault in minutes, a computing one hundreds to hundreds of thousands a second.

A rank that computes on a GPU has few page faults (1 to 4 a second on H200s, where a waiting one had none at 100 % of a
core and of the GPU), so there the size of the one step is the measure: see `Judge.grace`.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from enum import Enum

from aerie.engine_metrics import EngineMetrics, Steps
from aerie.startup.activity import FAULTS_A_SECOND, READ, UNSEEN, Activity, ProcessActivity
from aerie.supervisor.tree import TITLE

# Seconds.
GRACE = 100.0  # without a sign of life while somebody waits; with _ASK_AFTER and the rest still under three minutes
_FIRST = 150.0  # the same until the first completion is there, which may wait for a disk on which kernels' code lies
_ASK_AFTER = 30.0  # of idleness, until a completion of our own shows that the engine can still answer
_USUAL_STEP = 30.0  # at most, that the grace is longer for a step of up to _USUAL_TOKENS: still three minutes in all
_LONGEST = 1500.0  # grace: vLLM ends a step after VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS, for which the service says 1800

_USUAL_TOKENS = 16_384  # the most that vLLM chooses by itself (vllm/engine/arg_utils.py): 130 s are 126 tokens/s
_MARGIN = 2.0  # by which a step may take longer than its size, or the step before it, says
_BUSY = 0.1  # of a core: an idle worker looks into its queue for 0.02

_API_SERVER_TITLE = f"{TITLE}APIServer"
_NUMBERED = re.compile(rf"{TITLE}\w*_DP(\d+)")  # processes of one engine among several


class Doing(Enum):
    """What a process does; the values are words of a sentence."""

    STOPPED = "is stopped"
    WORKING = "works"
    SPINNING = "computes nothing and waits in a loop"
    QUIET = "does nothing"


@dataclass(frozen=True)
class Dead:
    """The engine said itself that it has failed, and its API server stays."""

    reason: str

    def __str__(self) -> str:
        return self.reason


@dataclass(frozen=True)
class Hung:
    """The engine makes no step, and requests wait for one; `evidence` names the processes and what they do."""

    reason: str
    evidence: tuple[str, ...]

    def __str__(self) -> str:
        return self.reason


@dataclass(frozen=True, slots=True)
class Observation:
    """One look at the engine.

    `at` is in seconds since the epoch. `metrics` is None where the API server did not answer in time. `asked` is the
    number of the engine for whose answer a completion of ours waits, `""` where it is not known, and `gpus_busy` says
    that kernels ran on any GPU.
    """

    at: float
    metrics: EngineMetrics | None
    activity: Activity
    asked: str | None = None
    gpus_busy: bool = False


@dataclass
class _Clock:
    """What is measured of one engine, in seconds."""

    flat: float = 0.0
    """Without a sign of life while somebody waits."""
    idle: float = 0.0
    step: float = 0.0
    """Since the last step while somebody waits."""
    last_step: float = 0.0
    """What the step before that took."""


class Judge:
    """Follows the engines behind one API from their first good answer on; time passes only with the observations."""

    def __init__(self, api_server: int, until_served: float) -> None:
        """Watch the engines whose first process is `api_server`: its work is for callers, and no sign of a step.

        Until they have served, an API server that answers nobody has `until_served` seconds, however busy it is: the
        requests that waited for its start may all come at once.
        """
        self._api_server = api_server
        self._until_served: float | None = until_served
        self._last: Observation | None = None
        self._metrics = EngineMetrics()
        self._doing: dict[int, tuple[Doing, float]] = {}
        self._clocks = {"": _Clock()}
        self._step_tokens = 0
        self._seconds_a_token: float | None = None

    def served(self, step_tokens: int) -> None:
        """Learn that a completion came back, and how many tokens a step can process: `max_num_batched_tokens`."""
        self._until_served = None
        self._step_tokens = step_tokens

    def answered(self, engine: str, tokens: int, seconds: float) -> None:
        """Learn that a prompt of `tokens` took `seconds` to its first token; the fastest time has the least noise."""
        if clock := self._clocks.get(engine):
            clock.flat = clock.idle = 0.0
        self._seconds_a_token = min(self._seconds_a_token or seconds / tokens, seconds / tokens)

    def saw(self, now: Observation) -> None:
        """Take one observation into account."""
        before, self._last = self._last or now, now
        elapsed = min(max(now.at - before.at, 0.0), UNSEEN)
        self._follow_processes(before, now)
        known, self._metrics = self._metrics.engines, now.metrics or self._metrics
        self._clocks = {engine: self._clocks.get(engine, _Clock()) for engine in self._metrics.engines or {"": Steps()}}
        for engine, clock in self._clocks.items():
            figures = self._metrics.engines.get(engine)
            stepped = engine in known and figures != known[engine]
            alive = stepped or any(self._works(process, engine) for process in now.activity.processes)
            awaited = self._awaited(engine)
            clock.flat = 0.0 if alive or not awaited else clock.flat + elapsed
            clock.idle = 0.0 if stepped or awaited else clock.idle + elapsed
            clock.step = clock.step + elapsed if awaited else 0.0
            if stepped:
                clock.last_step, clock.step = clock.step, 0.0

    @property
    def engines(self) -> Sequence[str]:
        """Return the engines' numbers; one without a number where vLLM has given no figures yet."""
        return tuple(self._clocks)

    @property
    def to_ask(self) -> str | None:
        """Return an engine that has been idle for so long that only a completion can show that it still answers.

        Without one, an engine that hung while idle would be found by the first user. It is one step of a few tokens
        each half minute, and none at all while requests keep the engine busy.
        """
        longest = max(self._clocks, key=lambda engine: self._clocks[engine].idle)
        return longest if self._clocks[longest].idle >= _ASK_AFTER else None

    def grace(self, engine: str) -> float:
        """Return the seconds without a sign of life that count as hung.

        A stopped process cannot compute, nor can an engine whose every process and GPU is quiet. Otherwise one step may
        be under way that began just after the last sign, and whose requests no figure shows yet: that none was waiting,
        and that all have their first token, says nothing of a prompt that has just come. A step processes
        `max_num_batched_tokens` at most, pieces of prompts included (vllm/v1/core/sched/scheduler.py, `token_budget`).
        How long may that take?

        - For each token no more than in a step with few tokens, which shares the same fixed costs among fewer. On slow
          hosts that is far too much, so for steps of a usual size it counts up to `_USUAL_STEP`.
        - What lies before a piece of a prompt costs time, too, and grows by a piece with each step. So a step of a long
          prompt takes at most twice as long as the one before it, whose time has been seen.
        """
        if self._until_served is not None:
            silent = self._last is not None and self._last.metrics is None
            return self._until_served if silent else min(self._until_served, _FIRST)
        doing = {self._doing[process.pid][0] for process in self._processes_of(engine)}
        busy = Doing.SPINNING in doing or (self._last is not None and self._last.gpus_busy)
        if Doing.STOPPED in doing or not busy:
            return GRACE
        by_size = _MARGIN * self._step_tokens * (self._seconds_a_token or 0.0)
        if self._step_tokens <= _USUAL_TOKENS:
            by_size = min(by_size, _USUAL_STEP)
        return min(GRACE + max(by_size, _MARGIN * self._clocks[engine].last_step), _LONGEST)

    def verdict(self, waits_in: Callable[[int], str | None]) -> Hung | None:
        """Return what is wrong where an engine hangs; `waits_in` names the kernel function that a pid sleeps in."""
        engine = max(self._clocks, key=lambda engine: self._clocks[engine].flat - self.grace(engine))
        flat = self._clocks[engine].flat
        if self._last is None or flat < self.grace(engine):
            return None
        culprits = [text for doing, text in self._processes(waits_in) if doing is Doing.STOPPED]
        which = f" of engine {engine}" if len(self._clocks) > 1 else ""
        reason = "; ".join([f"the engine hangs: no step for {flat:.0f} s{which}, {self._waiting(engine)}", *culprits])
        return Hung(reason, (self._figures(engine), *(text for _, text in self._processes(waits_in))))

    def _awaited(self, engine: str) -> bool:
        """Whether anybody waits for the engine; one who waits for the API server itself does."""
        now = self._last
        if now is None or now.metrics is None or self._asked(engine):
            return True
        figures = self._metrics.engines.get(engine, Steps())
        return figures.requests_running + figures.requests_waiting > 0

    def _asked(self, engine: str) -> bool:
        """Whether our own completion waits for it; one whose way is not known counts as the first engine's."""
        asked = self._last and self._last.asked
        if asked is None:
            return False
        return engine == (asked if asked in self._clocks else self.engines[0])

    def _processes_of(self, engine: str) -> Sequence[ProcessActivity]:
        """Return its processes, and those that are nobody's."""
        processes = self._last.activity.processes if self._last else ()
        return [each for each in processes if not (of := _NUMBERED.match(each.name)) or of[1] == engine]

    def _follow_processes(self, before: Observation, now: Observation) -> None:
        earlier = {process.pid: process for process in before.activity.processes}
        seconds = max(now.at - before.at, 0.001)
        followed = {}
        for process in now.activity.processes:
            doing = _doing(earlier.get(process.pid), process, seconds)
            was, since = self._doing.get(process.pid, (None, now.at))
            followed[process.pid] = (doing, since if was is doing else now.at)
        self._doing = followed

    def _works(self, process: ProcessActivity, engine: str) -> bool:
        doing = self._doing[process.pid][0]
        of_api = process.pid == self._api_server or process.name.startswith(_API_SERVER_TITLE)
        if self._last and self._last.metrics is None:
            # Nobody gets an answer, whatever the engine does. A server too busy to give one proves nothing, once it has
            # served; a start must not take for ever.
            busy = {Doing.WORKING} if self._until_served is not None else {Doing.WORKING, Doing.SPINNING}
            return of_api and doing in busy
        # Those who ask keep an API server busy, we among them.
        return not of_api and doing is Doing.WORKING and process in self._processes_of(engine)

    def _waiting(self, engine: str) -> str:
        if self._last and self._last.metrics is None:
            return "and the API server does not answer"
        figures = self._metrics.engines.get(engine, Steps())
        ours = ", our own: 1" if self._asked(engine) else ""
        return f"requests running: {figures.requests_running}, waiting: {figures.requests_waiting}{ours}"

    def _figures(self, engine: str) -> str:
        figures = self._metrics.engines.get(engine)
        if figures is None:
            return "vLLM has given no figures"
        usage = f"vllm:kv_cache_usage_perc at {figures.kv_cache_usage:.4f}"
        return f"vllm:iteration_tokens_total_count stands at {figures.heartbeat}, {usage}"

    def _processes(self, waits_in: Callable[[int], str | None]) -> Sequence[tuple[Doing, str]]:
        """Say of each process of vLLM, and of whatever else is stopped, what it does and since when."""
        told = []
        for process in self._last.activity.processes if self._last else ():
            doing, since = self._doing[process.pid]
            named = process.name.startswith(TITLE) or process.pid == self._api_server
            if not named and doing is not Doing.STOPPED:
                continue
            where = waits_in(process.pid) if doing is Doing.QUIET else None
            clock = f"{datetime.fromtimestamp(since, UTC):%H:%M:%S} UTC"
            detail = f"state {process.state}" + (f", in {where}" if where else "")
            told.append((doing, f"{process.name} (pid {process.pid}) {doing.value} ({detail}) since {clock}"))
        return told


def _doing(before: ProcessActivity | None, now: ProcessActivity, seconds: float) -> Doing:
    if now.state == "T":
        return Doing.STOPPED
    since = before or replace(now, faults=0, read_bytes=0, cpu_seconds=0.0)
    works = now.faults - since.faults > FAULTS_A_SECOND * seconds or now.read_bytes - since.read_bytes >= READ
    if works and (before or now.name.startswith(TITLE)):  # beginning costs faults: a helper may come and go for ever
        return Doing.WORKING
    return Doing.SPINNING if now.cpu_seconds - since.cpu_seconds > _BUSY * seconds else Doing.QUIET
