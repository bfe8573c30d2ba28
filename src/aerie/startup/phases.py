"""The phases of a start, and a picture of one start at one moment."""

from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any


class StartPhase(StrEnum):
    """In the order of a start. Eager starts leave some out, and so do starts without a drafter or a GPU."""

    CONFIGURING = "configuring"
    SPAWNING = "spawning workers"
    JOINING = "joining ranks"
    LOADING_TARGET = "loading target"
    LOADING_DRAFTER = "loading drafter"
    PROFILING = "profiling memory"
    COMPILING = "compiling"
    MEASURING_GRAPHS = "capturing graphs (measuring)"
    WARMING_UP = "warming up"
    CAPTURING_GRAPHS = "capturing graphs"
    LISTENING = "listening"
    ANSWERING = "answering"


@dataclass(frozen=True, slots=True)
class Phase:
    """One phase; times in seconds since the epoch."""

    name: StartPhase
    began: float | None = None
    """None for a phase that has not begun, or that this start left out."""
    ended: float | None = None
    fraction: float | None = None
    """How much of it is done, 0 to 1; None where its output does not tell."""
    detail: str = ""

    @property
    def seconds(self) -> float | None:
        """How long it took; None before its end."""
        return None if self.began is None or self.ended is None else self.ended - self.began


@dataclass(frozen=True, slots=True)
class Start:
    """One start at one moment; times in seconds since the epoch."""

    phases: tuple[Phase, ...]
    phase: StartPhase
    fraction: float
    """How much of the whole start is done, 0 to 1, weighed by how long its phases are expected to take; never falls."""
    began: float
    ended: float | None
    """When the service was ready; None before."""
    eta: float | None
    remaining_seconds: float | None
    """None where nothing is known yet, and once the start has ended."""
    moved: float
    """When anything moved last."""
    moved_by: str
    """log, read, faults, memory or gpu memory."""
    silent_seconds: float
    stalled: bool
    """Nothing has moved for the stall timeout."""
    waiting_for: str | None
    kind: str
    """What makes it comparable with other starts, see `history`; empty before the engine has told."""

    def to_json(self) -> dict[str, Any]:
        """Return it as /status shows it, with times as ISO 8601 in UTC."""
        return {
            "phases": [
                {
                    "name": phase.name.value,
                    "began": _iso(phase.began),
                    "ended": _iso(phase.ended),
                    "fraction": _rounded(phase.fraction, 4),
                    "detail": phase.detail,
                }
                for phase in self.phases
            ],
            "phase": self.phase.value,
            "fraction": _rounded(self.fraction, 4),
            "began": _iso(self.began),
            "ended": _iso(self.ended),
            "eta": _iso(self.eta),
            "remaining_seconds": _rounded(self.remaining_seconds, 1),
            "moved": _iso(self.moved),
            "moved_by": self.moved_by,
            "silent_seconds": _rounded(self.silent_seconds, 1),
            "stalled": self.stalled,
            "waiting_for": self.waiting_for,
        }


def _iso(at: float | None) -> str | None:
    if at is None:
        return None
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)
