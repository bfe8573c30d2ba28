"""Reads exceptions out of one stream of lines: chained ones, groups, crashes of C++ and of the interpreter itself."""

import re
from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

_FRAMES_KEPT = 64
_LINES_KEPT = 32  # of each exception's part of a traceback, the last ones
_CHAIN_KEPT = 8
_LONGEST_KEPT = 1000  # characters of one line
_LONGEST_SAID = 8000  # characters of a line of an exception's message
_MESSAGE_LINES = 12  # of one exception, kept
_ERRORS_KEPT = 4  # of a compiler's, which stand below its command and many notes
_LINES_READ = 60  # after which what follows an exception is no longer taken for its message


class Frame(NamedTuple):
    """Where something was called: a file as it was logged, a line of it, a function ("" in a SyntaxError)."""

    file: str
    line: int
    function: str


@dataclass(slots=True)
class Raised:
    """One exception: its text with all lines of its message, its frames (outermost first), its own lines of the log."""

    text: str
    frames: tuple[Frame, ...] = ()
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=_LINES_KEPT))


@dataclass(slots=True)
class Trace:
    """One traceback with everything chained to it."""

    header: str
    """The line that stood before it, which tells who caught it; "" where none did."""
    headless: bool
    """Its first line is missing: somebody copied or filtered the log."""
    native: bool = False
    """The process died of it: C++ called terminate, or the interpreter itself crashed."""
    raised: list[Raised] = field(default_factory=list)
    """The first cause first."""

    @property
    def root(self) -> Raised:
        """Return what was raised first."""
        return self.raised[0]


class _Mode(Enum):
    IDLE = "idle"
    FRAMES = "frames"
    MESSAGE = "message"
    INTERPRETER = "interpreter"


_BEGIN = "Traceback (most recent call last):"
_GROUP_BEGIN = "+ Exception Group " + _BEGIN
_FRAME = re.compile(r'\s*File "([^"]{1,1000})", line (\d{1,9})(?:,? in (.{1,500}))?$')
# Neither a level (`INFO: `) nor the name of a program (`usage: `, `get_mempolicy: `), which stand between the lines.
_EXCEPTION = re.compile(r"(?!(?:[A-Z]+|[a-z_]+):)(?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*(?:: |:?$)")
# Without a traceback above it, only what is named like an exception is taken for one.
_BARE = re.compile(r"(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|OutOfResources|Interrupt|NotFound)(?:: \S|$)")
_CHAINED = re.compile(r"The above exception was the direct cause of|During handling of the above exception")
_GROUP_MARGIN = re.compile(r" {0,64}[|+] ?")
_GROUP_RULE = re.compile(r" *\+[-+]{3,}[^A-Za-z]*$")
_ERROR = re.compile(r"\berror: ")
# The interpreter's own crash, and C++'s.
_FATAL = re.compile(r"Fatal Python error: .+")
_TERMINATE = re.compile(r"terminate called (?:after throwing an instance of '([^']{1,200})'|without|recursively)")
_WHAT = re.compile(r"\s+what\(\):\s+(.+)")
# What stands behind an exception without belonging to its message.
_NO_MESSAGE = re.compile(
    r"Process \S+:$|Exception ignored|Exception in |terminate called|Fatal Python error|usage: |nanobind: "
    r"|\S+\.py:\d+: \w*Warning|sys:\d+: |\[rank\d+\]|[IWEF]\d{4} \d\d:|(?:INFO|WARNING|ERROR|DEBUG|CRITICAL)\b"
    r"|Loading |aerie: |!!!!|\*\*\* |Extension modules: |.{0,200} NCCL (?:WARN|INFO) |frame #\d"
)


class TraceReader:
    """Turns the lines of one stream, such as one record of a log or what one process prints, into traces."""

    def __init__(self) -> None:
        self._mode = _Mode.IDLE
        self._last = ""
        self._trace = Trace("", headless=True)
        self._frames: deque[Frame] = deque(maxlen=_FRAMES_KEPT)
        self._lines: deque[str] = deque(maxlen=_LINES_KEPT)
        self._insert = 0
        self._raised = Raised("")
        self._chained = False
        self._in_group = False
        self._read = 0
        self._errors = 0
        self._current_thread = False

    @property
    def unfinished(self) -> tuple[Frame, ...] | None:
        """The frames so far of a traceback whose exception is still to come; None outside of one."""
        return tuple(self._frames) if self._mode is _Mode.FRAMES else None

    @property
    def idle(self) -> bool:
        """Whether the last line belonged to no traceback."""
        return self._mode is _Mode.IDLE

    def say(self, text: str) -> Trace | None:
        """Read a line; return a trace with each exception that becomes known of it."""
        if self._in_group:
            if _GROUP_RULE.match(text):
                self._chained = True
                return None
            margin = _GROUP_MARGIN.match(text)
            text = text[margin.end() :] if margin else text
        if text.endswith(_BEGIN):
            self._begin(text)
            return None
        match self._mode:
            case _Mode.FRAMES:
                return self._in_frames(text)
            case _Mode.MESSAGE:
                return self._in_message(text)
            case _Mode.INTERPRETER:
                return self._in_interpreter(text)
        return self._idle(text)

    def interrupt(self) -> None:
        """Say that the same process logged something in between, which no message outlasts."""
        if self._mode is not _Mode.FRAMES:
            self.cut()

    def cut(self) -> None:
        """Say that what follows belongs to something else."""
        self._mode, self._last, self._chained, self._in_group = _Mode.IDLE, "", False, False

    def _begin(self, text: str) -> None:
        before = text.removesuffix(_BEGIN).strip()
        group = text.endswith(_GROUP_BEGIN)
        original = before == "Original"  # how torch shows what another process raised: as part of the message
        if not ((self._chained or original) and self._mode is _Mode.MESSAGE and self._trace.raised):
            header = self._last if not before or group else before
            self._trace = Trace(header, headless=False)
            self._insert = 0
        else:
            self._trace.headless = False
            self._insert -= original
        self._in_group = group or (self._in_group and self._chained)
        self._chained = False
        self._start_frames()

    def _start_frames(self) -> None:
        self._mode, self._read = _Mode.FRAMES, 0
        self._frames.clear()
        self._lines.clear()

    def _idle(self, text: str) -> Trace | None:
        if _FRAME.match(text):
            self._trace = Trace("", headless=True)
            self._insert = 0
            self._start_frames()
            return self._in_frames(text)
        if _FATAL.match(text) or _TERMINATE.match(text):
            self._trace = Trace(self._last, headless=False, native=True)
            self._insert = 0
            self._start_frames()
            trace = self._raise(text)
            self._mode = _Mode.INTERPRETER if text.startswith("Fatal") else _Mode.MESSAGE
            self._current_thread = False
            return trace
        if _BARE.match(text):
            self._trace = Trace("", headless=True)
            self._insert = 0
            self._start_frames()
            return self._raise(text)
        self._last = text[:_LONGEST_KEPT]
        return None

    def _in_frames(self, text: str) -> Trace | None:
        self._lines.append(text[:_LONGEST_KEPT])
        if frame := _FRAME.match(text):
            self._frames.append(Frame(frame[1], int(frame[2]), frame[3] or ""))
            return None
        if text[0].isspace():
            return None
        if _EXCEPTION.match(text):
            return self._raise(text)
        self._lines.pop()
        self._read += 1  # another process spoke in between, unnamed
        if self._read > _LINES_READ:
            self.cut()
        return None

    def _raise(self, text: str) -> Trace:
        raised = Raised(text[:_LONGEST_SAID], tuple(self._frames), deque(self._lines, _LINES_KEPT))
        if not raised.lines or raised.lines[-1] != text[:_LONGEST_KEPT]:
            raised.lines.append(text[:_LONGEST_KEPT])
        if len(self._trace.raised) < _CHAIN_KEPT:
            self._trace.raised.insert(self._insert, raised)
        self._raised = raised
        # The members of a group are printed behind it, and are its causes.
        if not (self._in_group and "Group" in text.split(":", 1)[0]):
            self._insert += 1
        self._mode, self._read, self._errors, self._chained = _Mode.MESSAGE, 0, 0, False
        return self._trace

    def _in_message(self, text: str) -> Trace | None:  # noqa: PLR0911 - one return for each kind of line
        if _CHAINED.match(text):
            self._chained = True
            return None
        if self._chained and _EXCEPTION.match(text):  # it has no frames: raised elsewhere, or a member of a group
            self._start_frames()
            return self._raise(text)
        if self._chained and _FRAME.match(text):  # a chained traceback whose first line was filtered away
            self._chained = False
            self._start_frames()
            return self._in_frames(text)
        if what := _WHAT.match(text):
            thrown = _TERMINATE.match(self._raised.text)
            self._raised.text = f"{thrown[1]}: {what[1]}" if thrown and thrown[1] else what[1]
            self._raised.lines.append(text[:_LONGEST_KEPT])
            return None
        self._read += 1
        if self._read > _LINES_READ or _NO_MESSAGE.match(text) or (_FRAME.match(text) and not self._in_group):
            self.cut()
            return self._idle(text)
        if _BARE.match(text) and not self._raised.frames:
            self.cut()
            return self._idle(text)
        is_error = self._read > _MESSAGE_LINES and self._errors < _ERRORS_KEPT and _ERROR.search(text) is not None
        self._errors += is_error
        if is_error or self._read <= _MESSAGE_LINES:
            self._raised.text += "\n" + text[:_LONGEST_SAID]
            self._raised.lines.append(text[:_LONGEST_KEPT])
        return None

    def _in_interpreter(self, text: str) -> Trace | None:
        """Read the threads of `Fatal Python error`: the innermost frame stands first there."""
        self._read += 1
        if "thread 0x" in text.lower():
            self._current_thread = text.startswith("Current")
        elif frame := _FRAME.match(text):
            if self._current_thread and len(self._raised.frames) < _FRAMES_KEPT:
                self._raised.frames = (Frame(frame[1], int(frame[2]), frame[3] or ""), *self._raised.frames)
                self._raised.lines.append(text[:_LONGEST_KEPT])
        elif not text[0].isspace() or self._read > 10 * _LINES_READ:
            self.cut()
            return self._idle(text)
        return None
