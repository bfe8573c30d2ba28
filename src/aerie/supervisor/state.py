"""The service's state as a pure reducer: `reduce(state, event, at)` is the only place where a phase changes."""

from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from signal import Signals
from typing import Any

from aerie.speculation import Speculation

SCHEMA = 1
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
    """Everything the status page, the gate and the probe know."""

    since: datetime
    model: str = ""
    phase: Phase = Phase.STARTING
    step: str = ""
    progress: float | None = None
    reason: str | None = None
    pid: int | None = None
    starts: int = 0
    started: datetime | None = None
    exit: Exit | None = None
    last_error: str | None = None
    last_line: str = ""
    next_start: datetime | None = None
    failures: int = 0
    speculation: Speculation | None = None


@dataclass(frozen=True)
class Started:
    """An engine process was started."""

    pid: int


@dataclass(frozen=True)
class Said:
    """The engine wrote something; the fields are those of `aerie.startup.Report`."""

    step: str
    progress: float | None
    last_line: str
    error: str | None


@dataclass(frozen=True)
class Answered:
    """`/health` said 200 and the readiness check has begun."""


@dataclass(frozen=True)
class Served:
    """The readiness check passed, or `/health` said 200 again afterwards."""

    speculation: Speculation | None


@dataclass(frozen=True)
class Refused:
    """The engine lives but cannot be used, for this reason."""

    reason: str


@dataclass(frozen=True)
class Ended:
    """The engine's processes are gone; the first ended with this `os.waitstatus_to_exitcode`, after this error."""

    status: int
    error: str | None = None


@dataclass(frozen=True)
class Held:
    """The configuration is wrong; nothing starts until a person acts and the container starts anew."""

    reason: str


@dataclass(frozen=True)
class StopAsked:
    """A person or Docker asked the service to stop."""


@dataclass(frozen=True)
class Stopped:
    """Every engine process is gone after a stop was asked for."""


Event = Started | Said | Answered | Served | Refused | Ended | Held | StopAsked | Stopped

_GOING = frozenset({Phase.STOPPING, Phase.STOPPED})


def reduce(state: State, event: Event, at: datetime) -> State:  # noqa: C901, PLR0911 - a table: one case, one return
    """Return the state after `event`, which happened `at`."""
    match event:
        case Started(pid):
            fresh = replace(state, pid=pid, started=at, starts=state.starts + 1, next_start=None, speculation=None)
            return _enter(fresh, Phase.STARTING, at, step="starting vLLM")
        case Said():
            return _said(state, event)
        case Answered() if state.phase is Phase.STARTING:
            return _enter(state, Phase.CHECKING, at, step="waiting for the first completion")
        case Served(speculation) if state.phase not in _GOING:
            if state.phase is not Phase.READY:
                return replace(_enter(state, Phase.READY, at), speculation=speculation, last_error=None)
            failures = 0 if at - state.since >= FORGIVEN_AFTER else state.failures
            return replace(state, speculation=speculation, failures=failures)
        case Refused(reason) if state.phase not in _GOING:
            return _enter(state, Phase.UNREADY, at, reason=reason)
        case Ended():
            return _ended(state, event, at)
        case Held(reason):
            return _enter(state, Phase.HELD, at, reason=reason)
        case StopAsked():
            return _enter(replace(state, next_start=None), Phase.STOPPING, at, reason="a stop was asked for")
        case Stopped():
            return _enter(state, Phase.STOPPED, at, reason="stopped")
    return state


def _enter(state: State, phase: Phase, at: datetime, *, step: str = "", reason: str | None = None) -> State:
    """Change the phase; `since` stays when only the step or the reason changes."""
    since = state.since if state.phase is phase and phase is not Phase.STARTING else at
    return replace(state, phase=phase, since=since, step=step, progress=None, reason=reason)


def _said(state: State, said: Said) -> State:
    error = said.error or state.last_error
    if state.phase is not Phase.STARTING:
        # Once it serves, its lines are about requests: no progress, and not for a page that asks for no key.
        return replace(state, last_error=error)
    return replace(state, step=said.step, progress=said.progress, last_line=said.last_line, last_error=error)


def _ended(state: State, event: Ended, at: datetime) -> State:
    ended = Exit.of(event.status, at)
    gone = replace(state, pid=None, exit=ended, speculation=None)
    if state.phase in _GOING:
        return gone
    reason = f"{ended}: {event.error}" if event.error else str(ended)
    if ended.code == USAGE_ERROR:
        remedy = "correct the engine's arguments and start the container anew"
        return _enter(gone, Phase.HELD, at, reason=f"{reason}; {remedy}")
    failures = state.failures + 1
    pause = BACK_OFF[min(failures, len(BACK_OFF)) - 1]
    return _enter(replace(gone, failures=failures, next_start=at + pause), Phase.FAILED, at, reason=reason)


def to_json(state: State, versions: dict[str, str | None]) -> dict[str, Any]:
    """Return the state in the form of `state.json` and of `/status`."""
    return {
        "schema": SCHEMA,
        "phase": str(state.phase),
        "step": state.step,
        "progress": state.progress,
        "reason": state.reason,
        "since": _timestamp(state.since),
        "model": state.model,
        "engine": {
            "pid": state.pid,
            "starts": state.starts,
            "started": _timestamp(state.started),
            "exit": state.exit
            and {"code": state.exit.code, "signal": state.exit.signal, "at": _timestamp(state.exit.at)},
        },
        "last_error": state.last_error,
        "last_line": state.last_line,
        "next_start": _timestamp(state.next_start),
        "failures": state.failures,
        "speculation": state.speculation and asdict(state.speculation),
        "versions": versions,
    }


def _timestamp(moment: datetime | None) -> str | None:
    return None if moment is None else moment.astimezone(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def resume(saved: dict[str, Any], state: State) -> State:
    """Carry the failure count over a container restart, and the pause too where nobody had asked for a stop.

    A supervisor that was killed comes back by Docker's restart policy, not by a person who mended something, so its
    back-off goes on. Anything unreadable in `saved` counts as nothing saved.
    """
    failures = saved.get("failures")
    if not isinstance(failures, int) or failures < 0:
        return state
    resumed = replace(state, failures=failures)
    try:
        next_start = datetime.fromisoformat(saved["next_start"])
    except (KeyError, TypeError, ValueError):
        return resumed
    if saved.get("phase") != Phase.FAILED or not state.since < next_start <= state.since + BACK_OFF[-1]:
        return resumed
    reason = f"before the container started anew: {saved.get('reason')}"
    return replace(resumed, phase=Phase.FAILED, next_start=next_start, reason=reason)
