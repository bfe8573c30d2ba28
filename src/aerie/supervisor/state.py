"""The service's state as a pure reducer: `reduce(state, event, at)` is the only place where a phase changes."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from signal import Signals
from typing import Any

from aerie.diagnosis import Kind
from aerie.engine_metrics import Serving, Speculation

SCHEMA = 2
BACK_OFF = (timedelta(seconds=10), timedelta(seconds=60), timedelta(seconds=300))
FORGIVEN_AFTER = timedelta(minutes=10)  # of being ready without a break, then the back-off starts from its first rung
USAGE_ERROR = 2  # argparse's exit code: starting again with the same arguments cannot help


class Phase(StrEnum):
    """What the service is doing; only `ready` serves."""

    STARTING = "starting"
    CHECKING = "checking"
    READY = "ready"
    UNREADY = "unready"
    FAILED = "failed"
    HELD = "held"
    STOPPING = "stopping"
    STOPPED = "stopped"


@dataclass(frozen=True)
class Exit:
    """How an engine ended: an exit code, or the signal that killed it."""

    code: int | None
    signal: str | None
    at: datetime

    @classmethod
    def of(cls, status: int, at: datetime) -> "Exit":
        """Read `status` as `os.waitstatus_to_exitcode` gives it: negative for a signal."""
        if status >= 0:
            return cls(status, None, at)
        try:
            return cls(None, Signals(-status).name, at)
        except ValueError:  # a real-time signal has a number and no name
            return cls(None, f"signal {-status}", at)

    def __str__(self) -> str:
        how = f"was killed by {self.signal}" if self.signal else f"ended with exit code {self.code}"
        return f"vllm serve {how}"


@dataclass(frozen=True)
class State:
    """Everything the status page, the gate and the probe know.

    `start` and `diagnosis` have the form of `aerie.startup`'s and `aerie.diagnosis`' own JSON; the diagnosis has `at`
    and `report` besides.
    """

    since: datetime
    model: str = ""
    models: tuple[Mapping[str, Any], ...] = ()
    """The checkpoints that the engine reads, held while it does: role, name, revision, directory."""
    warming: Mapping[str, Any] | None = None
    """How far the weights are read into the page cache, in the form of `aerie.cache.warm`; None where they are not."""
    loader: str | None = None
    """Which loader reads the weights, and why, in one sentence."""
    phase: Phase = Phase.STARTING
    reason: str | None = None
    start: Mapping[str, Any] | None = None
    pid: int | None = None
    starts: int = 0
    started: datetime | None = None
    served: bool = False
    """Whether the engine has been ready since its start: then its arguments were right."""
    exit: Exit | None = None
    diagnosis: Mapping[str, Any] | None = None
    last_line: str = ""
    next_start: datetime | None = None
    failures: int = 0
    hangs: int = 0
    serving: Serving | None = None
    speculation: Speculation | None = None


@dataclass(frozen=True)
class Started:
    """An engine process was started."""

    pid: int


@dataclass(frozen=True)
class Progressed:
    """How far the start is, in the form of `aerie.startup.Start.to_json()`, and the last line the engine wrote."""

    start: Mapping[str, Any]
    last_line: str


@dataclass(frozen=True)
class Warmed:
    """How far the weights are read into the page cache, or that nothing is being read."""

    warming: Mapping[str, Any] | None


@dataclass(frozen=True)
class Answered:
    """`/health` said 200, or takes its time: the engine listens, and the readiness check begins."""


@dataclass(frozen=True)
class Served:
    """The readiness check passed, or `/health` said 200 again afterwards."""

    speculation: Speculation | None
    serving: Serving | None = None


@dataclass(frozen=True)
class Refused:
    """The engine lives but cannot be used, or is about to be ended, for this reason."""

    reason: str


@dataclass(frozen=True)
class Ended:
    """The engine is no more.

    `reason` says how in one line; `status` is the first process' `os.waitstatus_to_exitcode`, None where the supervisor
    ended it for what had become of the others.
    """

    reason: str
    status: int | None
    diagnosis: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Held:
    """Another start cannot help; nothing starts until a person acts."""

    reason: str
    diagnosis: Mapping[str, Any] | None = None
    """None where no engine was started: an older one's would explain something else."""


@dataclass(frozen=True)
class RetryAsked:
    """A person asked for the next start at once."""


@dataclass(frozen=True)
class StopAsked:
    """A person or Docker asked the service to stop."""


@dataclass(frozen=True)
class Stopped:
    """Every engine process is gone after a stop was asked for."""


Event = Started | Progressed | Warmed | Answered | Served | Refused | Ended | Held | RetryAsked | StopAsked | Stopped

_GOING = frozenset({Phase.STOPPING, Phase.STOPPED})


def reduce(state: State, event: Event, at: datetime) -> State:  # noqa: C901, PLR0911 - a table: one case, one return
    """Return the state after `event`, which happened `at`."""
    match event:
        case Started(pid):
            idle = replace(state, start=None, last_line="", next_start=None, speculation=None, serving=None)
            return _enter(replace(idle, pid=pid, started=at, starts=state.starts + 1, served=False), Phase.STARTING, at)
        case Progressed(start, last_line):
            # Once it serves, its lines are about requests, and not for a page that asks for no key.
            shown = last_line if state.phase is Phase.STARTING else state.last_line
            return replace(state, start=start, last_line=shown)
        case Warmed(warming):
            return replace(state, warming=warming)
        case Answered() if state.phase is Phase.STARTING:
            return _enter(state, Phase.CHECKING, at)
        case Served(speculation, serving) if state.phase not in _GOING:
            served = replace(state, served=True, speculation=speculation, serving=serving)
            if state.phase is not Phase.READY:
                return replace(_enter(served, Phase.READY, at), diagnosis=None)
            return replace(served, failures=0 if at - state.since >= FORGIVEN_AFTER else state.failures)
        case Refused(reason) if state.phase not in _GOING:
            return _enter(state, Phase.UNREADY, at, reason)
        case Ended():
            return _ended(state, event, at)
        case Held(reason, diagnosis):
            return _enter(replace(state, next_start=None, diagnosis=diagnosis), Phase.HELD, at, reason)
        case RetryAsked() if state.phase in {Phase.HELD, Phase.FAILED}:
            return replace(_enter(state, Phase.STARTING, at), next_start=None)
        case StopAsked():
            return _enter(replace(state, next_start=None), Phase.STOPPING, at, "a stop was asked for")
        case Stopped():
            return _enter(state, Phase.STOPPED, at, "stopped")
    return state


def _enter(state: State, phase: Phase, at: datetime, reason: str | None = None) -> State:
    """Change the phase; `since` stays when only the reason changes."""
    since = state.since if state.phase is phase and phase is not Phase.STARTING else at
    return replace(state, phase=phase, since=since, reason=reason)


def _ended(state: State, event: Ended, at: datetime) -> State:
    ended = None if event.status is None else Exit.of(event.status, at)
    gone = replace(state, pid=None, exit=ended, speculation=None, serving=None)
    if state.phase in _GOING:
        return gone
    gone = replace(gone, diagnosis=event.diagnosis)
    kind = event.diagnosis["kind"] if event.diagnosis else None
    if not state.served and (kind == Kind.CONFIGURATION or event.status == USAGE_ERROR):
        return _enter(gone, Phase.HELD, at, event.reason)
    failures = state.failures + 1
    pause = BACK_OFF[min(failures, len(BACK_OFF)) - 1]
    hangs = state.hangs + (kind == Kind.HUNG)
    return _enter(replace(gone, failures=failures, hangs=hangs, next_start=at + pause), Phase.FAILED, at, event.reason)


def to_json(state: State, versions: Mapping[str, str | None], supervisor: int) -> dict[str, Any]:
    """Return the state in the form of `state.json` and of `/status`; `supervisor` is the service's own pid."""
    return {
        "schema": SCHEMA,
        "phase": str(state.phase),
        "since": _timestamp(state.since),
        "reason": state.reason,
        "model": state.model,
        "models": list(state.models),
        "start": state.start,
        "warming": state.warming,
        "loader": state.loader,
        "supervisor": {"pid": supervisor},
        "engine": {
            "pid": state.pid,
            "starts": state.starts,
            "started": _timestamp(state.started),
            "exit": state.exit
            and {"code": state.exit.code, "signal": state.exit.signal, "at": _timestamp(state.exit.at)},
        },
        "diagnosis": state.diagnosis,
        "serving": state.serving and asdict(state.serving),
        "speculation": state.speculation and asdict(state.speculation),
        "last_line": state.last_line,
        "next_start": _timestamp(state.next_start),
        "failures": state.failures,
        "hangs": state.hangs,
        "versions": versions,
    }


def _timestamp(moment: datetime | None) -> str | None:
    return None if moment is None else moment.astimezone(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def resume(saved: Mapping[str, Any], state: State) -> State:
    """Carry failures and diagnosis over a container restart, and the pause too where nobody had asked for a stop.

    A supervisor that was killed comes back by Docker's restart policy, not by a person who mended something, so its
    back-off goes on. Anything unreadable in `saved`, or of another schema, counts as nothing saved.
    """
    failures, diagnosis = saved.get("failures"), saved.get("diagnosis")
    if saved.get("schema") != SCHEMA or not isinstance(failures, int) or failures < 0:
        return state
    resumed = replace(state, failures=failures, diagnosis=diagnosis if isinstance(diagnosis, dict) else None)
    try:
        next_start = datetime.fromisoformat(saved["next_start"])
    except (KeyError, TypeError, ValueError):
        return resumed
    if saved.get("phase") != Phase.FAILED or not state.since < next_start <= state.since + BACK_OFF[-1]:
        return resumed
    reason = f"before the container started anew: {saved.get('reason')}"
    return replace(resumed, phase=Phase.FAILED, next_start=next_start, reason=reason)
