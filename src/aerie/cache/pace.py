"""A limit on bytes a second, over all threads that read from a source."""

import threading
import time

_BURST = 0.1  # seconds in which less came may be made up for


class Pace:
    """Lets through so many bytes a second; without a limit, all."""

    def __init__(self, limit: float | None, stop: threading.Event) -> None:
        """`stop` ends all waiting."""
        self._limit = limit
        self._stop = stop
        self._lock = threading.Lock()
        self._due = 0.0

    def take(self, count: int) -> None:
        """Wait until these bytes may have been read."""
        if self._limit is None:
            return
        with self._lock:
            now = time.monotonic()
            self._due = max(self._due, now - _BURST) + count / self._limit
            due = self._due
        self._stop.wait(max(0.0, due - now))
