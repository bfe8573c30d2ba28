"""Shows on stderr how far a reading of many bytes is: one line that changes on a terminal, elsewhere one every 10 s."""

import sys
import threading
import time
from types import TracebackType
from typing import Self, TextIO

from aerie.cache.progress import amount
from aerie.gate.words import rough

_ON_TERMINAL = 0.5  # seconds
_ELSEWHERE = 10.0  # seconds


class StoppedError(Exception):
    """There is no use in going on."""


class Meter:
    """Counts bytes from any thread; `with` it, the line on a terminal is cleared at the end."""

    def __init__(self, what: str, total: int, stream: TextIO | None = None) -> None:
        """Begin with nothing of `total` bytes done; `what` begins the line."""
        self._what = what
        self._total = total
        self._stream = sys.stderr if stream is None else stream
        self._terminal = self._stream.isatty()
        self._every = _ON_TERMINAL if self._terminal else _ELSEWHERE
        self._lock = threading.Lock()
        self._began = self._next = time.monotonic()
        self._next += self._every
        self._stopped = False
        self.done = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._terminal:
            print("\r\x1b[K", end="", file=self._stream, flush=True)

    @property
    def seconds(self) -> float:
        """Since the begin."""
        return time.monotonic() - self._began

    def stop(self) -> None:
        """Let whoever counts next get a StoppedError: the others have given up."""
        self._stopped = True

    def count(self, count: int) -> None:
        """Add bytes that are done, and show it where it is time; raises StoppedError."""
        with self._lock:
            if self._stopped:
                raise StoppedError
            self.done += count
            if (now := time.monotonic()) < self._next:
                return
            self._next = now + self._every
            line = self._line()
            start, end = ("\r", "\x1b[K") if self._terminal else ("", "\n")
            print(start + line, end=end, file=self._stream, flush=True)

    def _line(self) -> str:
        rate = self.done / max(self.seconds, 1e-9)
        left = f", about {rough((self._total - self.done) / rate)} left" if rate else ""
        fraction = self.done / self._total if self._total else 1.0
        return f"{self._what}: {fraction:.0%} of {amount(self._total)}, {amount(rate)}/s{left}"
