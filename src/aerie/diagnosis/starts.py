"""A whole log, with as many starts in it as there were: what each failed of, read in bounded memory."""

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import BinaryIO

from aerie.diagnosis.collector import LIFE, Collector
from aerie.diagnosis.diagnosis import Diagnosis
from aerie.diagnosis.signatures import Severity, Signature, Where, signatures
from aerie.startup.lines import Line, LineReader

_BLOCK = 64 * 1024  # bytes that are read, or passed over, together
_WHOLE = 32 * 1024 * 1024  # bytes at the beginning of which nothing is passed over
_LAST_BLOCKS = 16  # at the end of which nothing is passed over either
_BEFORE = 16 * 1024  # bytes before a block that are read with it: a traceback's header, a compiler's own words
_AFTER = 2  # blocks after one that are read with it: a traceback goes on

_TITLES_KEPT = 5

# The API server logs its arguments once a start; argparse prints its usage instead. The supervisor comes before both.
_START = ("non-default args: ", "usage: vllm", "aerie: starting")
# Where a failure is told, one of these stands. Long ones are found faster than short ones.
_TELLING = (
    *_START,
    "Traceback (most recent call last)",
    "ERROR",
    "died unexpectedly",
    "died with exit code",
    "terminate called ",
    "Fatal Python error: ",
    "Watchdog caught collective operation",
    " NCCL WARN ",
    "Segmentation fault",
    "(core dumped)",
    "aerie: ",
    "kernel: NVRM",
    "Killed process",
    " exited with code ",
)
# The engine came to life, or somebody stopped it.
_SETTLED = (*LIFE, "[shutdown]", "aerie: stopping")


class Starts:
    """The starts in one log, told apart."""

    def __init__(self, known: tuple[Signature, ...] | None = None) -> None:
        self._known = signatures() if known is None else known
        self.now = Collector(self._known, carried=True)
        """The last start."""
        self.failures = 0
        """How many of those before it failed."""
        self.titles: deque[str] = deque(maxlen=_TITLES_KEPT)
        """What the latest of those failed of, in their order."""
        self.is_vllms = False
        """Whether any line was vLLM's or its supervisor's."""
        self.settled = True
        """The last start came to life or was stopped; or none was seen to begin."""
        self.begun = False
        """The last start was seen to begin."""
        self._failure: Diagnosis | None = None

    @property
    def failure(self) -> Diagnosis | None:
        """Why the last of those before it that failed did so."""
        return self._failure

    def feed(self, lines: Iterable[Line]) -> None:
        """Read what was said next."""
        for begins, said in groupby(lines, lambda line: line.text.startswith(_START)):
            if begins:
                if self.begun or self.now.is_vllms:
                    self._close()
                self.begun, self.settled = True, False
            together = list(said)
            if not self.settled:
                self.settled = any(sign in line.text for line in together for sign in _SETTLED)
            self.now.feed(together)
            self.settled = self.settled or self.now.stopped is not None
            self.is_vllms = self.is_vllms or self.now.is_vllms

    def _close(self) -> None:
        if diagnosis := self.now.diagnose():
            self._failure = diagnosis
            self.failures += 1
            self.titles.append(diagnosis.title)
        self.now = Collector(self._known, carried=True)


def read(log: BinaryIO) -> Starts:
    """Read a log of any size; of a large one, the blocks that may tell something. Raises OSError."""
    starts = Starts()
    # A fatal line tells only beside an error or at the end, where everything is read.
    needles = {
        known.needle for known in signatures() if known.where is Where.LINE and known.severity is not Severity.FATAL
    }
    telling = tuple(literal.encode() for literal in (*_TELLING, *sorted(needles)))
    alive = tuple(sign.encode() for sign in LIFE)
    reader = LineReader()
    passed_over: deque[bytes] = deque(maxlen=_LAST_BLOCKS)
    size = to_read = 0
    for block in _blocks(log):
        size += len(block)
        if size <= _WHOLE or _holds(block, telling) or (starts.now.undecided and _holds(block, alive)):
            to_read = 1 + _AFTER
        if to_read:
            if passed_over:
                starts.feed(reader.feed(passed_over[-1][-_BEFORE:]))
                passed_over.clear()
            starts.feed(reader.feed(block))
            to_read -= 1
        else:
            passed_over.append(block)
    for block in passed_over:
        starts.feed(reader.feed(block))
    starts.feed(reader.end())
    return starts


def _holds(block: bytes, literals: tuple[bytes, ...]) -> bool:
    return any(literal in block for literal in literals)


def _blocks(log: BinaryIO) -> Iterator[bytes]:
    """Cut a log behind newlines; a block without any ends where it ends."""
    rest = b""
    while data := log.read(_BLOCK):
        end = data.rfind(b"\n") + 1
        yield rest + data[:end] if end else rest + data
        rest = data[end:] if end else b""
    if rest:
        yield rest
