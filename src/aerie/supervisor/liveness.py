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
core and of the GPU), so there the size of the one step is the measure: see `grace`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum

from aerie.engine_metrics import EngineMetrics
from aerie.startup.activity import Activity, ProcessActivity

# Seconds.
GRACE = 100.0  # without a sign of life while somebody waits; with _ASK_AFTER and the rest still under three minutes
_ASK_AFTER = 30.0  # of idleness, until a completion of our own shows that the engine can still answer
_UNSEEN = 15.0  # that one look may stand for: while we did not run, neither did the engine, or nobody knows

_FAULTS = 20.0  # a second; idle processes and an engine core that cannot schedule anything have up to 8
_BUSY = 0.1  # of a core: an idle worker looks into its queue for 0.02
_MARGIN = 2.0  # by which a step may take longer than its size says: attention costs more the longer a prompt is

_ENGINE_TITLE = "VLLM::"
_API_SERVER_TITLE = "VLLM::APIServer"


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

    `at` is in seconds since the epoch. `metrics` is None where the API server did not answer in time. `own_request`
    says that a completion of ours waits for its answer, and `gpus_busy` that kernels ran on any GPU.
    """

    at: float
    metrics: EngineMetrics | None
    activity: Activity
    own_request: bool = False
    gpus_busy: bool = False


class Judge:
    """Follows one engine from its first good answer on; the time passes only with the observations."""

    def __init__(self, api_server: int) -> None:
        """Watch the engine whose first process is `api_server`: its work is for callers, and no sign of a step."""
        self._api_server = api_server
        self._last: Observation | None = None
        self._metrics: EngineMetrics | None = None
        self._doing: dict[int, tuple[Doing, float]] = {}
        self._flat = 0.0
        self._idle = 0.0
        self._step_tokens = 0
        self._seconds_a_token: float | None = None

    def largest_step(self, tokens: int) -> None:
        """Learn how many tokens one step can process at most: `max_num_batched_tokens`."""
        self._step_tokens = tokens

    def measured(self, tokens: int, seconds: float) -> None:
        """Learn that a prompt of `tokens` took `seconds` to its first token; the fastest time has the least noise."""
        self._seconds_a_token = min(self._seconds_a_token or seconds / tokens, seconds / tokens)

    def saw(self, now: Observation) -> None:
        """Take one observation into account."""
        before, self._last = self._last or now, now
        elapsed = min(max(now.at - before.at, 0.0), _UNSEEN)
        self._follow_processes(before, now)
        stepped = now.metrics is not None and self._metrics is not None and _steps(now.metrics) != _steps(self._metrics)
        self._metrics = now.metrics or self._metrics
        alive = stepped or any(self._works(process, now) for process in now.activity.processes)
        self._flat = 0.0 if alive or not self._awaited else self._flat + elapsed
        self._idle = 0.0 if stepped or self._awaited else self._idle + elapsed

    @property
    def wants_request(self) -> bool:
        """Return whether the engine has been idle for so long that only a completion can show that it still answers.

        Without one, an engine that hung while idle would be found by the first user. It is one step of a few tokens
        each half minute, and none at all while requests keep the engine busy.
        """
        return self._idle >= _ASK_AFTER

    @property
    def grace(self) -> float:
        """Return the seconds without a sign of life that count as hung.

        A stopped process cannot compute, nor can an engine whose every process and GPU is quiet. Otherwise one step may
        be under way that began just after the last sign. It processes `max_num_batched_tokens` at most, pieces of
        prompts included (vllm/v1/core/sched/scheduler.py, `token_budget`), and takes no more time for each of them than
        a step with few tokens did, which shares the same fixed costs among fewer.
        """
        doing = {doing for doing, _ in self._doing.values()}
        busy = Doing.SPINNING in doing or (self._last is not None and self._last.gpus_busy)
        if Doing.STOPPED in doing or not busy:
            return GRACE
        return GRACE + _MARGIN * self._step_tokens * (self._seconds_a_token or 0.0)

    def verdict(self, waits_in: Callable[[int], str | None]) -> Hung | None:
        """Return what is wrong where the engine hangs; `waits_in` names the kernel function that a pid sleeps in."""
        if self._last is None or self._flat < self.grace:
            return None
        culprits = [text for doing, text in self._processes(waits_in) if doing is Doing.STOPPED]
        reason = "; ".join([f"the engine hangs: no step for {self._flat:.0f} s, {self._waiting()}", *culprits])
        return Hung(reason, (self._figures(), *(text for _, text in self._processes(waits_in))))

    @property
    def _awaited(self) -> bool:
        """Whether anybody waits for the engine; one who waits for the API server itself does."""
        now = self._last
        if now is None or now.own_request or now.metrics is None:
            return True
        return now.metrics.requests_running + now.metrics.requests_waiting > 0

    def _follow_processes(self, before: Observation, now: Observation) -> None:
        earlier = {process.pid: process for process in before.activity.processes}
        seconds = max(now.at - before.at, 0.001)
        followed = {}
        for process in now.activity.processes:
            doing = _doing(earlier.get(process.pid), process, seconds)
            was, since = self._doing.get(process.pid, (None, now.at))
            followed[process.pid] = (doing, since if was is doing else now.at)
        self._doing = followed

    def _works(self, process: ProcessActivity, now: Observation) -> bool:
        doing = self._doing[process.pid][0]
        of_api = process.pid == self._api_server or process.name.startswith(_API_SERVER_TITLE)
        if now.metrics is None:
            # Nobody gets an answer, whatever the engine does. A server too busy to give one proves nothing.
            return of_api and doing in {Doing.WORKING, Doing.SPINNING}
        return not of_api and doing is Doing.WORKING  # those who ask keep an API server busy, we among them

    def _waiting(self) -> str:
        if self._last and self._last.metrics is None:
            return "and the API server does not answer"
        running, waiting = (self._metrics.requests_running, self._metrics.requests_waiting) if self._metrics else (0, 0)
        ours = ", our own: 1" if self._last and self._last.own_request else ""
        return f"requests running: {running}, waiting: {waiting}{ours}"

    def _figures(self) -> str:
        if self._metrics is None:
            return "vLLM has given no figures"
        heartbeat, usage = self._metrics.heartbeat, self._metrics.kv_cache_usage
        return f"vllm:iteration_tokens_total_count stands at {heartbeat}, vllm:kv_cache_usage_perc at {usage:.4f}"

    def _processes(self, waits_in: Callable[[int], str | None]) -> Sequence[tuple[Doing, str]]:
        """Say of each process of vLLM, and of whatever else is stopped, what it does and since when."""
        told = []
        for process in self._last.activity.processes if self._last else ():
            doing, since = self._doing[process.pid]
            named = process.name.startswith(_ENGINE_TITLE) or process.pid == self._api_server
            if not named and doing is not Doing.STOPPED:
                continue
            where = waits_in(process.pid) if doing is Doing.QUIET else None
            clock = f"{datetime.fromtimestamp(since, UTC):%H:%M:%S} UTC"
            detail = f"state {process.state}" + (f", in {where}" if where else "")
            told.append((doing, f"{process.name} (pid {process.pid}) {doing.value} ({detail}) since {clock}"))
        return told


def _steps(metrics: EngineMetrics) -> tuple[float, ...]:
    """Return the figures of which every step moves at least one."""
    return metrics.heartbeat, metrics.kv_cache_usage, metrics.requests_running, metrics.requests_waiting


def _doing(before: ProcessActivity | None, now: ProcessActivity, seconds: float) -> Doing:
    if now.state == "T":
        return Doing.STOPPED
    if before is None:  # a process that has just begun
        return Doing.WORKING
    if now.faults - before.faults > _FAULTS * seconds or now.read_bytes > before.read_bytes:
        return Doing.WORKING
    return Doing.SPINNING if now.cpu_seconds - before.cpu_seconds > _BUSY * seconds else Doing.QUIET
