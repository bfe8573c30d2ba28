"""How a download deals with a source that does not answer well: when it asks again, and when it gives up."""

import random
import threading
import time

from aerie.cache.sources.source import TryAgainError

ATTEMPTS = 10
"""Attempts without a byte in between, then it is given up: about five minutes."""
FIRST_PAUSE = 1.0
"""Seconds before the second attempt; each further pause is twice as long, but LONGEST_PAUSE at most."""
LONGEST_PAUSE = 60.0
LONGEST_RETRY_AFTER = 900.0
"""Seconds for which a source may let us wait."""
_SPREAD = 5.0
"""Seconds over which the connections come back that were all sent away at once."""


class GaveUpError(Exception):
    """The source did not answer well for so long that it was given up; the message says what it did last."""


class StoppedError(Exception):
    """Another thread has failed, or the user wants it."""


class Patience:
    """Shared by all connections to a source; every wait ends with `stop`."""

    def __init__(self, stop: threading.Event) -> None:
        self._stop = stop
        self._lock = threading.Lock()
        self._not_before = 0.0
        """Monotonic time before which the source is left alone."""

    def wait_for_leave(self) -> None:
        """Wait until the source may be asked; raises StoppedError."""
        while (left := self._not_before - time.monotonic()) > 0:
            self._sleep(left + random.uniform(0.0, min(left, _SPREAD)))  # noqa: S311 - not all at once
        self._sleep(0.0)

    def failed(self, path: str, error: TryAgainError, failures: int) -> float:
        """Return for how many seconds to wait after so many failures; raises GaveUpError."""
        if failures >= ATTEMPTS:
            raise GaveUpError(f"{path}: {ATTEMPTS} attempts brought nothing; the last one: {error}")
        if error.after is None:
            pause = min(FIRST_PAUSE * 2.0 ** (failures - 1), LONGEST_PAUSE)
            return pause * random.uniform(0.75, 1.25)  # noqa: S311
        if error.after > LONGEST_RETRY_AFTER:
            raise GaveUpError(f"{error}; it wants to be left alone for {error.after:.0f} s: run fetch again then")
        return max(error.after, 0.0)

    def pause(self, error: TryAgainError, seconds: float) -> None:
        """Wait; what a server asks for itself holds for all connections. Raises StoppedError."""
        if error.after is None:
            self._sleep(seconds)
            return
        with self._lock:
            self._not_before = max(self._not_before, time.monotonic() + seconds)

    def _sleep(self, seconds: float) -> None:
        if self._stop.wait(seconds) if seconds else self._stop.is_set():
            raise StoppedError
