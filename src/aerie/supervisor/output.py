"""What one engine writes, read once: how far its start is, why it may have failed, and its last words."""

import asyncio
import contextlib
import time
from typing import Any

from aerie.diagnosis import Collector
from aerie.startup.lines import Line, LineReader
from aerie.startup.start import StartReader

_OPEN = "Application startup complete"  # uvicorn's: requests may come
_TAIL = 64 * 1024  # bytes kept for the report of a crash
# Seconds.
_QUIET = 0.3  # without a byte, then a dying engine has said what it will: a traceback is written in one go
_SETTLED = 0.6  # at most, however much more it says


class Output:
    """Hands every line to those who read it; `dying` is set once a line has said that the engine goes down."""

    def __init__(self, start: StartReader) -> None:
        self.start = start
        self.collector = Collector()
        self.dying = asyncio.Event()
        self.open = False
        """Whether the API takes requests."""
        self.last_line = ""
        """The last one of the start: later ones may quote a request."""
        self.tail = b""
        self._lines = LineReader()
        self._heard = time.monotonic()

    def feed(self, data: bytes) -> None:
        """Read a piece of output, of any size."""
        self._heard = time.monotonic()
        self.tail = (self.tail + data)[-_TAIL:]
        self._take(self._lines.feed(data))

    def end(self) -> None:
        """Read what stands after the last newline."""
        self._take(self._lines.end())

    async def settled(self, closed: asyncio.Event) -> None:
        """Wait until the engine has been quiet for a moment, or until its output is closed."""
        deadline = time.monotonic() + _SETTLED
        while not closed.is_set() and (pause := min(deadline, self._heard + _QUIET) - time.monotonic()) > 0:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(closed.wait(), pause)

    def progress(self) -> dict[str, Any]:
        """Return where the start is, in the form of the state's `start`."""
        return self.start.view(time.time()).to_json()

    def _take(self, lines: list[Line]) -> None:
        now = time.time()
        for line in lines:
            self.start.say(line, now)
            self.last_line = self.last_line if self.open else line.text
            self.open = self.open or _OPEN in line.text
        self.collector.feed(lines)
        if self.collector.dying:
            self.dying.set()
