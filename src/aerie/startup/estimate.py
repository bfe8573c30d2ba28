"""How long what is left of a start will take."""

from collections.abc import Mapping

from aerie.startup.phases import StartPhase

TYPICAL: Mapping[StartPhase, float] = {
    StartPhase.CONFIGURING: 20,
    StartPhase.SPAWNING: 25,
    StartPhase.JOINING: 15,
    StartPhase.LOADING_TARGET: 1500,
    StartPhase.LOADING_DRAFTER: 10,
    StartPhase.PROFILING: 20,
    StartPhase.COMPILING: 50,
    StartPhase.MEASURING_GRAPHS: 10,
    StartPhase.WARMING_UP: 20,
    StartPhase.CAPTURING_GRAPHS: 25,
    StartPhase.LISTENING: 5,
    StartPhase.ANSWERING: 5,
}
"""Seconds, for the first start on a host, where the shares are all that is used. The load: 595 GB at 0.4 GB/s, as
people report it for eight PCIe GPUs; the rest together: the 200 s that are left of a 4-minute start whose load took
42 s (fastsafetensors, eight PCIe GPUs), shared out as a compiled start on one H200 shares them."""

_OVERDUE = 0.1  # of the time a phase has taken: what is left of it once it has taken longer than ever before


class Pace:
    """How fast the current phase goes, from the fractions that it shows."""

    def __init__(self) -> None:
        self.fraction: float | None = None
        self._first = (0.0, 0.0)  # when, fraction
        self._last = (0.0, 0.0)
        self._step = 0.0

    def show(self, fraction: float, at: float, step: float = 0.0) -> None:
        """Take a fraction into account; a lower one than before changes nothing."""
        if self.fraction is None:
            self._first = (at, fraction)
        elif fraction <= self.fraction:
            return
        self.fraction, self._last, self._step = fraction, (at, fraction), step

    def seconds_left(self, at: float) -> float | None:
        """Return what this pace leaves, in seconds; None before it can be told.

        Between two steps it counts down, and as soon as the next step is late it counts up.
        """
        (first_at, first), (last_at, last) = self._first, self._last
        if last <= first:
            return None
        by_steps = (1 - last) * (last_at - first_at) / (last - first) - (at - last_at)
        at_best = min(1.0, last + self._step)  # a moment before the next step
        by_clock = (1 - at_best) * (at - first_at) / (at_best - first)
        return max(by_steps, by_clock, 0.0)

    def whole(self) -> float:
        """Return how long all of it takes at this pace, in seconds; 0 before it can be told."""
        seconds, share = self._last[0] - self._first[0], self._last[1] - self._first[1]
        return seconds / share if share > 0 else 0.0


def left_in_phase(pace: Pace, elapsed: float, expected: float | None, at: float) -> float | None:
    """Return the seconds that are left of a phase `elapsed` seconds old; None where nothing tells.

    The further it has come, the more its own pace counts, and the less what earlier starts took.
    """
    own = pace.seconds_left(at)
    if own is None:
        return None if expected is None else max(expected - elapsed, _OVERDUE * elapsed)
    if expected is None:
        return own
    share = pace.fraction or 0.0
    return share * own + (1 - share) * (1 - share) * expected


def later(phase: StartPhase, expected: Mapping[StartPhase, float]) -> float:
    """Return the seconds that the phases after this one are expected to take."""
    phases = tuple(StartPhase)
    return sum(expected.get(each, 0.0) for each in phases[phases.index(phase) + 1 :])
