"""How long the phases of earlier starts on this host took."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from aerie.startup.phases import Start, StartPhase

_KEPT_STARTS = 5  # of one kind: the median of so many forgets a first start with cold caches
_KEPT_KINDS = 16
_LONGEST = 7 * 86400.0  # seconds; what took longer was a clock that was set

# What decides how long a start takes, as `Initializing a V1 LLM engine (v...) with config: ...` lists it.
_SETTINGS = re.compile(
    r"(?<![\w.])(model|speculative_config|load_format|tensor_parallel_size|pipeline_parallel_size|data_parallel_size"
    r"|quantization|enforce_eager|device_config)=('[^']*'|SpeculativeConfig\([^)]*\)|[^,\s]+)"
)
_RELEASE = re.compile(r"\(v([^)\s]{1,40})\)")


def kind_of(text: str) -> str:
    """Return what makes a start comparable, out of the line in which the engine lists its configuration."""
    found: dict[str, str] = {}
    for name, value in _SETTINGS.findall(text[: text.find("compilation_config=")]):
        found.setdefault(name, value)
    release = _RELEASE.search(text)
    return " ".join([release[1] if release else "", *(f"{name}={value}" for name, value in sorted(found.items()))])


@dataclass(frozen=True, slots=True)
class History:
    """Seconds by phase of the last starts of each kind, the newest kind and the newest start last."""

    starts: Mapping[str, tuple[Mapping[StartPhase, float], ...]] = field(default_factory=dict)

    def expected(self, kind: str) -> dict[StartPhase, float]:
        """Return how long each phase is likely to take, in seconds; empty where no such start has been seen.

        A kind that is not known yet (empty) stands for the newest.
        """
        if not kind and self.starts:
            kind = list(self.starts)[-1]
        starts = self.starts.get(kind, ())
        phases = starts[-1] if starts else {}
        return {phase: median(start[phase] for start in starts if phase in start) for phase in phases}

    def record(self, start: Start) -> "History":
        """Return the history with a start that has come to its end added; one that has not changes nothing."""
        if start.ended is None or not start.kind:
            return self
        seconds = {phase.name: phase.seconds for phase in start.phases if phase.seconds is not None}
        earlier = {kind: starts for kind, starts in self.starts.items() if kind != start.kind}
        kept = (*self.starts.get(start.kind, ()), seconds)[-_KEPT_STARTS:]
        newest = list((earlier | {start.kind: kept}).items())[-_KEPT_KINDS:]
        return History(dict(newest))

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {
            "schema": 1,
            "starts": {
                kind: [{phase.value: round(seconds, 3) for phase, seconds in start.items()} for start in starts]
                for kind, starts in self.starts.items()
            },
        }

    @classmethod
    def from_json(cls, data: object) -> "History":
        """Read `to_json`'s form. What does not have it is left out: all that a lost history costs is an estimate."""
        if not isinstance(data, dict) or data.get("schema") != 1 or not isinstance(data.get("starts"), dict):
            return cls()
        starts = {
            kind: tuple(_seconds(start) for start in starts[-_KEPT_STARTS:] if isinstance(start, dict))
            for kind, starts in list(data["starts"].items())[-_KEPT_KINDS:]
            if isinstance(kind, str) and isinstance(starts, list)
        }
        return cls({kind: kept for kind, kept in starts.items() if kept})


def _seconds(start: dict[Any, Any]) -> dict[StartPhase, float]:
    phases = {phase.value: phase for phase in StartPhase}
    return {phases[name]: float(seconds) for name, seconds in start.items() if name in phases and _is_time(seconds)}


def _is_time(seconds: object) -> bool:
    return isinstance(seconds, int | float) and not isinstance(seconds, bool) and 0 <= seconds <= _LONGEST
