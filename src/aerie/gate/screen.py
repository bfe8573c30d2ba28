"""A few lines at the bottom of a terminal that are drawn again and again."""

import os
import re
import signal
from collections.abc import Mapping, Sequence
from shutil import get_terminal_size
from typing import TextIO

from aerie.gate.drawing import Style, cells

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def can_redraw(stream: TextIO, environment: Mapping[str, str]) -> bool:
    """Return whether `stream` is a terminal that understands cursor movements."""
    return stream.isatty() and environment.get("TERM", "") not in {"", "dumb"}


def style_of(stream: TextIO, environment: Mapping[str, str]) -> Style:
    """Return what may be shown on `stream`: no colour where it is no terminal, or where NO_COLOR is set."""
    try:
        "█░✓▸·".encode(stream.encoding or "ascii")
    except (LookupError, UnicodeEncodeError):
        blocks = False
    else:
        blocks = True
    return Style(colour=can_redraw(stream, environment) and not environment.get("NO_COLOR"), blocks=blocks)


def columns_of(stream: TextIO) -> int:
    """Return the width of the terminal behind `stream`, of COLUMNS or 80 where there is none."""
    try:
        return os.get_terminal_size(stream.fileno()).columns or get_terminal_size().columns
    except (OSError, ValueError):
        return get_terminal_size().columns


class Screen:
    """The last lines of the terminal behind `stream`; a change of its size ends a pause."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._widths: list[int] = []
        # Blocked, it stays pending until a pause takes it; a handler could run in the middle of a write.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGWINCH})

    def draw(self, lines: Sequence[str]) -> None:
        """Put `lines`, each narrower than the terminal, where the last ones were."""
        self._write(self._erasure() + "\n".join(lines))
        self._widths = [cells(_COLOUR.sub("", line)) for line in lines]

    def clear(self) -> None:
        """Take away what was drawn; the cursor stands where its first line began."""
        self._write(self._erasure())
        self._widths = []

    def pause(self, seconds: float) -> None:
        """Wait so long, or until the terminal has another size."""
        signal.sigtimedwait({signal.SIGWINCH}, seconds)

    def _erasure(self) -> str:
        # A terminal that was made narrower has wrapped what stands on it.
        columns = columns_of(self._stream)
        rows = sum(max(1, -(-width // columns)) for width in self._widths)
        return f"\r\x1b[{rows - 1}A\x1b[J" if rows > 1 else "\r\x1b[J"

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()
