"""What came over a connection and is not in its file yet: many small pieces are one write."""

import threading
import time
from collections.abc import Callable, Sequence

_BYTES = 256 * 1024
_SECONDS = 0.05


class Held:
    """Pieces of one segment, for a moment; `flush_old` may be called by another thread than `add`."""

    def __init__(self, write: Callable[[Sequence[bytes]], None]) -> None:
        """`write` takes the pieces in order; what it raises comes from `add`, `flush` or `flush_old`."""
        self._write = write
        self._lock = threading.Lock()
        self._pieces: list[bytes] = []
        self._size = 0
        self._since = time.monotonic()

    def add(self, piece: bytes) -> None:
        """Take a piece; write what is held where that is much, or has been held long."""
        with self._lock:
            self._pieces.append(piece)
            self._size += len(piece)
            if self._size >= _BYTES or time.monotonic() - self._since > _SECONDS:
                self._flush()

    def flush_old(self) -> None:
        """Write what is held where no other piece has come for a while."""
        with self._lock:
            if time.monotonic() - self._since > _SECONDS:
                self._flush()

    def flush(self) -> None:
        """Write what is held."""
        with self._lock:
            self._flush()

    def _flush(self) -> None:
        pieces, self._pieces, self._size, self._since = self._pieces, [], 0, time.monotonic()
        if pieces:
            self._write(pieces)
