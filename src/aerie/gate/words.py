"""The state in words: where a service is, how long its start will take. Pure."""

import re
from dataclasses import dataclass

from aerie.gate.state import State

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_MINUTE = 60
_HOUR = 60 * _MINUTE
_COUNTED_BELOW = 90  # seconds of an estimate that are worth counting one by one


@dataclass(frozen=True, slots=True)
class Outlook:
    """How far a start is and how many seconds it will still take, as far as that is known."""

    fraction: float | None
    seconds: float | None

    def __str__(self) -> str:
        whole = "" if self.fraction is None else f"start {percent(self.fraction)}"
        left = "" if self.seconds is None else f"about {rough(self.seconds)} left"
        return ", ".join(filter(None, (whole, left)))


@dataclass(frozen=True, slots=True)
class Step:
    """What a service does: `name` changes with what it is, `progress` with how far it is."""

    name: str
    progress: str = ""
    outlook: Outlook | None = None
    """Of a start that is going on, else None."""

    def __str__(self) -> str:
        told = f"{self.name}: {self.progress}" if self.progress else self.name
        return "; ".join(filter(None, (told, str(self.outlook or ""))))


def step_of(state: State) -> Step:
    """Return what the service does that has this state."""
    phase, start = state["phase"], state["start"]
    if phase not in {"starting", "checking"} or not start or not start["phase"]:
        again = f"; next start at {state['next_start']}" if state["next_start"] else ""
        return Step(": ".join(filter(None, (phase, plain(state["reason"] or "")))) + again)
    progress = next(
        ((each["detail"], percent(each["fraction"])) for each in start["phases"] if each["name"] == start["phase"]), ()
    )
    waiting = start["waiting_for"] and f"waiting for {start['waiting_for']}"
    return Step(
        start["phase"],
        plain(", ".join(filter(None, (*progress, waiting)))),
        Outlook(start["fraction"], start["remaining_seconds"]),
    )


def how_it_is(state: State) -> str:
    """Return the state's reason without the cause, for whoever shows the diagnosis as well."""
    reason, diagnosis = state["reason"] or "", state["diagnosis"]
    if diagnosis is None:
        return reason
    said = diagnosis["root"]["text"].partition("\n")[0] if diagnosis["root"] else ""
    for shown in filter(None, (diagnosis["title"], said)):
        reason = reason.removesuffix(f": {shown}")
    return reason


def plain(text: str) -> str:
    """Return `text` without control characters: a log's would reach the terminal that it is shown on."""
    return _CONTROL.sub(" ", text)


def percent(fraction: float | None) -> str:
    """Return a fraction as whole percent, 100 only where it is all; empty for None."""
    return "" if fraction is None else f"{int(fraction * 100 + 1e-9)}%"


def rough(seconds: float) -> str:
    """Return a time no finer than an estimate is."""
    if seconds < _COUNTED_BELOW:
        return f"{max(1, round(seconds))} s"
    if seconds < _HOUR:
        return f"{round(seconds / _MINUTE)} min"
    hours, minutes = divmod(round(seconds / _MINUTE), _MINUTE)
    return f"{hours} h {minutes} min"


def clock(seconds: float) -> str:
    """Return a measured time as m:ss or h:mm:ss."""
    minutes, rest = divmod(int(seconds), _MINUTE)
    hours, minutes = divmod(minutes, _MINUTE)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
