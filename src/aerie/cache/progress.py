"""Shows on stderr how far a fetch is: a bar on a terminal, a line every ten seconds elsewhere."""

import logging
import os
import threading
import time
from collections import deque
from typing import TextIO

from aerie.gate.drawing import Style, clip
from aerie.gate.screen import Screen, can_redraw, columns_of, style_of
from aerie.gate.words import clock, percent, plain, rough

LINE_EVERY = 10.0
"""Seconds."""
_WINDOW = 20.0
"""Seconds over which the rate is taken."""
_TROUBLE_SHOWN = 10.0  # seconds
_WIDEST_BAR = 60
_UNITS = ("B", "kB", "MB", "GB", "TB")


def amount(count: float) -> str:
    """Return bytes in words, with decimal units and three digits."""
    for unit in _UNITS:
        if count < 999.5 or unit == _UNITS[-1]:  # noqa: PLR2004 - what rounds to three digits
            digits = 0 if unit == "B" or count >= 99.95 else 1 if count >= 9.995 else 2  # noqa: PLR2004
            return f"{count:.{digits}f} {unit}"
        count /= 1000
    raise AssertionError


class Counts:
    """What the threads of a download tell; a Tally."""

    def __init__(self, total: int, there: int) -> None:
        """Begin with `total` bytes in all, of which so many are there."""
        self._lock = threading.Lock()
        self.total = total
        self.there = there
        self.arrived_bytes = 0
        self.hashed_bytes = 0
        self.files = 0
        self.last_trouble: tuple[float, str] | None = None
        """Monotonic time, and what it was."""
        self.troubles = 0

    def arrived(self, count: int) -> None:
        """See Tally."""
        with self._lock:
            self.arrived_bytes += count

    def dropped(self, count: int) -> None:
        """See Tally."""
        with self._lock:
            self.there -= count

    def hashed(self, count: int) -> None:
        """See Tally."""
        with self._lock:
            self.hashed_bytes += count

    def proven(self, path: str) -> None:  # noqa: ARG002 - of the protocol
        """See Tally."""
        with self._lock:
            self.files += 1

    def trouble(self, message: str) -> None:
        """See Tally."""
        with self._lock:
            self.last_trouble = time.monotonic(), message
            self.troubles += 1

    @property
    def here(self) -> int:
        """Bytes that are in the staging."""
        return min(self.there + self.arrived_bytes, self.total)


class Display:
    """Draws the counts when `tick` is called; log records of `aerie` come out above what is drawn."""

    def __init__(self, stream: TextIO, title: str, counts: Counts, *, files: int) -> None:
        """Begin; nothing is drawn yet."""
        self._stream = stream
        self._title = title
        self._counts = counts
        self._files = files
        self._began = time.monotonic()
        self._redraws = can_redraw(stream, os.environ)
        self._screen = Screen(stream) if self._redraws else None
        self._style: Style = style_of(stream, os.environ)
        self._told = self._began
        self._troubles_told = 0
        self._samples: deque[tuple[float, int]] = deque([(self._began, 0)])
        self._lock = threading.Lock()

    def tick(self) -> None:
        """Draw what there is now."""
        now = time.monotonic()
        self._samples.append((now, self._counts.arrived_bytes))
        while self._samples[0][0] < now - _WINDOW and len(self._samples) > 2:  # noqa: PLR2004 - a rate takes two
            self._samples.popleft()
        if self._screen is not None:
            with self._lock:
                self._screen.draw(self._frame(now, columns_of(self._stream)))
            return
        if now - self._told >= LINE_EVERY:
            self._told = now
            self.say(f"{self._title}: {self._how_far()}{self._trouble(now, only_new=True)}")

    def say(self, line: str) -> None:
        """Print a line that stays."""
        with self._lock:
            if self._screen is not None:
                self._screen.clear()
            print(line, file=self._stream, flush=True)

    def close(self) -> None:
        """Take away what is drawn."""
        with self._lock:
            if self._screen is not None:
                self._screen.clear()

    def seconds(self) -> float:
        """Return how long it has been."""
        return time.monotonic() - self._began

    def _rate(self) -> float:
        (first, before), (last, after) = self._samples[0], self._samples[-1]
        return (after - before) / (last - first) if last - first > 0.2 else 0.0  # noqa: PLR2004 - s; less is noise

    def _left(self) -> str:
        rate, missing = self._rate(), self._counts.total - self._counts.here
        return f"about {rough(missing / rate)} left" if missing and rate > 1 else ""

    def _how_far(self) -> str:
        counts = self._counts
        told = [f"{amount(counts.here)} of {amount(counts.total)} ({percent(self._fraction())})"]
        if counts.here < counts.total:
            told.append(f"{amount(self._rate())}/s")
        else:
            told.append(f"{amount(counts.hashed_bytes)} hashed")
        told.append(f"{counts.files} of {self._files} files proven")
        return ", ".join([*told, *filter(None, [self._left()])])

    def _fraction(self) -> float:
        return self._counts.here / self._counts.total if self._counts.total else 1.0

    def _trouble(self, now: float, *, only_new: bool = False) -> str:
        last = self._counts.last_trouble
        if last is None or (only_new and self._counts.troubles == self._troubles_told):
            return ""
        self._troubles_told = self._counts.troubles
        return f"; {plain(last[1])}" if only_new or now - last[0] < _TROUBLE_SHOWN else ""

    def _frame(self, now: float, columns: int) -> list[str]:
        room = max(1, columns - 1)
        counts, left = self._counts, self._left()
        if counts.here >= counts.total:
            proven = f"{counts.files} of {self._files} files proven"
            progress = f"all is here; {proven}, {amount(counts.hashed_bytes)} hashed"
        else:
            progress = f"{amount(counts.here)} of {amount(counts.total)}  {amount(self._rate())}/s"
        first = clip(f"{self._title}  {progress}", max(1, room - len(left) - 2))
        numbers = f" {percent(self._fraction()):>4}  {clock(now - self._began)}"
        bar = self._style.bar(self._fraction(), max(1, min(_WIDEST_BAR, room - len(numbers))))
        lines = [clip(f"{first}{' ' * max(2, room - len(first) - len(left))}{left}", room), f"{bar}{numbers}"]
        if trouble := self._trouble(now):
            lines.append(clip(trouble.removeprefix("; "), room))
        return lines


class Aloud(logging.Handler):
    """Prints the warnings of `aerie` above what is drawn."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.display: Display | None = None

    def emit(self, record: logging.LogRecord) -> None:
        """Print one."""
        line = f"aerie model fetch: {plain(record.getMessage())}"
        if self.display is not None:
            self.display.say(line)
        else:
            import sys  # noqa: PLC0415 - as it is now, which a test may have replaced

            print(line, file=sys.stderr, flush=True)
