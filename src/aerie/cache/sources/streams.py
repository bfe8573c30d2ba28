"""Files whose server sends them from the beginning only."""

import contextlib
import threading
from collections.abc import Iterator

_PATIENCE = 0.5  # seconds


class Stream:
    """A file that its server sends from the beginning only: those who want parts of it take turns, in order."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: list[int] = []
        self._busy = False
        self.stack = contextlib.ExitStack()
        self.pieces: Iterator[bytes] | None = None
        self.at = 0
        self.rest = b""

    @contextlib.contextmanager
    def turn(self, start: int) -> Iterator[None]:
        """Wait until this part is the first of those that are wanted, and nobody reads."""
        with self._changed:
            # The parts before it may be about to come.
            self._changed.wait_for(lambda: self.at >= start, _PATIENCE)
            self._waiting.append(start)
            self._changed.wait_for(lambda: not self._busy and start == min(self._waiting))
            self._waiting.remove(start)
            self._busy = True
        try:
            yield
        finally:
            with self._changed:
                self._busy = False
                self._changed.notify_all()

    def close(self) -> None:
        """Give the connection up."""
        self.stack.close()
        self.pieces, self.rest = None, b""
