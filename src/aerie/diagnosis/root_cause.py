"""How much each thing that a failing engine said tells about why it fails, and which of them is the root cause."""

import re
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

from aerie.diagnosis.tracebacks import Frame, Raised, Trace
from aerie.startup.lines import Line


@dataclass(frozen=True)
class RootCause:
    """The first cause, as it was said."""

    text: str
    """The exception with every line of its message, or the line that tells the cause; at most 4000 characters."""
    process: str
    """The process that said it, as vLLM names it; "" where the log names none."""
    pid: int | None
    file: str | None
    """The innermost frame in vLLM's or the model's code, else the innermost of all; from the package's folder on."""
    line: int | None
    function: str | None
    innermost: str | None
    """`file:line in function` of the true innermost frame."""
    chain: tuple[str, ...]
    """The first lines of everything chained to it, the first cause first."""
    excerpt: tuple[str, ...]
    """Lines of the log."""
    frames: tuple[str, ...] = ()
    """Every frame as `file in function`, the innermost first: what was being done when it happened."""
    beside: tuple[str, ...] = ()
    """Lines that others wrote and that go with it; the last ones of the chain."""

    @property
    def place(self) -> str:
        """Return `file:line in function`, or "" where none is known."""
        return _place(self.file, self.line, self.function) if self.file else ""

    def with_lines(self, lines: Iterable[str]) -> "RootCause":
        """Return it with lines beside it, unless it has them."""
        new = tuple(line for line in lines if line not in self.text and line not in self.chain)
        excerpt = (*(line for line in new if line not in self.excerpt), *self.excerpt)
        return replace(self, chain=(*self.chain, *new), excerpt=excerpt, beside=(*self.beside, *new))


class Telling(IntEnum):
    """How much a thing tells about why an engine dies: the most telling wins, and among equals the first."""

    STOPPED = 0
    """A stop was asked for."""
    ECHO = 1
    """One process says that another broke."""
    LOGGED = 2
    """An error that somebody caught and logged; the last one is taken, being nearest to the end."""
    PEER = 3
    """A connection to another process broke: true where nothing else was said."""
    VANISHED = 4
    """A process is gone, and nothing says how."""
    QUOTE = 5
    """One process repeats what another said."""
    RAISED = 6
    """An exception that may have ended something: the log does not say whether it was caught."""
    FATAL = 7
    """What a process died of."""


@dataclass(slots=True)
class Said:
    """One thing that may be the root cause: a trace, or a line alone."""

    order: int
    line: Line
    told: Telling
    """How much it told when it was said."""
    trace: Trace | None = None
    began: int = 0
    """As `order`: the trace's first line."""
    clock: str = ""
    """vLLM's by then."""
    outlived: bool = False
    """The engine went on."""

    @property
    def telling(self) -> Telling:
        """Return how much it tells by now, for what was chained to it since tells too."""
        telling = telling_of_trace(self.trace, self.line.level) if self.trace else self.told
        return min(telling, Telling.LOGGED) if self.outlived else telling


_STOPPED = re.compile(r"(?:[a-z_]\w*\.)*(?:KeyboardInterrupt|SystemExit|CancelledError|GeneratorExit)\b")
_QUOTE = re.compile(r"Worker failed with error '(?!cancelled')")
_ECHO = re.compile(
    r"See root cause above|[Ss]ee stack trace|EngineDeadError|MQEngineDeadError|AsyncEngineDeadError"
    r"|check the stack ?trace above|Background loop has errored|Engine loop is not running"
    r"|Engine core process \S+ died unexpectedly|output_handler failed|Executor failed|^RuntimeError: cancelled$"
    r"|Process \S+ \(PID: \d+\) died with exit code [1-9]"
)
_PEER = re.compile(
    r"Connection reset by peer|[Cc]onnection closed by (?:remote )?peer|ncclRemoteError|remote process exited"
    r"|Broken ?pipe|recvValue failed"
)
EXITED = re.compile(r"(?P<name>[\w.-]{1,128}) exited with code (?P<container>\d{1,3})(?: \(\w+\))?$")
"""How compose says that a container has ended."""
CORE_STOPPED = "[shutdown] EngineCore: trigger received signal=SIGTERM"
"""What the core says where its API server is killed, and where all of the engine's processes are ended."""
_VANISHED = re.compile(
    r"(?:Worker proc|RayWorkerProc) .{1,100} died unexpectedly(?: \(exit code: (?P<code>-?\w+)\))?"
    r"|Process \S+ \(PID: \d+\) died with exit code (?P<status>-\d+)"
)
# How a shell says that a program was ended.
_SIGNALLED = r"(?:Segmentation fault|Bus error|Killed|Aborted|Illegal instruction)"
_SHELL = re.compile(rf"\S+: line \d+: +\d+ {_SIGNALLED}\b|{_SIGNALLED}(?: +\(core dumped\))?$")
_ASKED_TO_END = {"-2", "-15"}
# Lines that stand alone and end a process.
_FATAL_LINE = re.compile(
    r"(?:vllm(?: [\w-]+)?|[\w.-]+\.py): error: \S|\[.{1,100}\] .{0,80}Watchdog caught collective operation timeout"
    r"|!!!!!!! Segfault encountered|\*\*\* SIG[A-Z]+ .{0,40}received|\*\*\* Aborted at "
)
# What stands above the traceback of what an engine's process dies of ...
_FATAL_HEADER = re.compile(
    r"EngineCore failed to start|EngineCore encountered a fatal error|WorkerProc failed|WorkerProc hit an exception"
    r"|RayWorkerProc failed|Process \S+:$|Error in sys\.excepthook|Server failed:"
)
# ... and above what was caught, or could not be raised any more.
_CAUGHT_HEADER = re.compile(
    r"Exception ignored in|Exception in |Task exception was never retrieved|--- Logging error ---|Unclosed "
    r"|handle: |future: |Error in atexit|Module \S+ was found but failed to import|ERROR: +Exception in ASGI"
)
_TRACKER = "/multiprocessing/resource_tracker.py"
# Where a dying engine writes down its last requests: long, personal, and no cause.
_DUMP = "dump_input.py"
# An exception that nothing caught has gone through the first frame of its process.
_OUTERMOST = frozenset({"<module>", "_bootstrap", "_run_module_as_main"})
_MAIN = frozenset({"main", "cmd", "run_server"})

# The engine goes down for certain: who says so stands above the traceback, or is what was raised. It is at the
# beginning, for further on a request may be quoted.
_DYING_HEADER = re.compile(
    r"EngineCore failed to start|EngineCore encountered a fatal error|WorkerProc failed to start|WorkerProc failed\."
)
_CORES = re.compile(r"EngineCore failed to start|EngineCore encountered a fatal error")
_NO_ANSWER = "TimeoutError: RPC call to "
_START_FAILED = "Engine core initialization failed"
_DYING = re.compile(
    rf"(?:\w+\.)*EngineDeadError\b|RuntimeError: (?:{_START_FAILED}|Engine core process \S+ died unexpectedly)"
)

_PROCESS_OF_FUNCTION = {
    "run_engine_core": "EngineCore",
    "worker_main": "Worker",
    "worker_busy_loop": "Worker",
    "run_server": "APIServer",
    "run_server_worker": "APIServer",
}
_PACKAGE = re.compile(r".*/(?:(?:site|dist)-packages|lib)/")
_TELLING_FILE = re.compile(r"(?:^|/)(?:vllm|transformers_modules)/")
_SHOWN = 12  # lines of an excerpt above the exception's own
_LONGEST_TEXT = 4000


def telling_of_trace(trace: Trace, level: str) -> Telling:  # noqa: PLR0911 - one answer for each kind of trace
    """Judge a trace by what it says, by the line above it and by where it began."""
    root = trace.root.text
    if _STOPPED.match(root):
        return Telling.STOPPED
    if _PEER.search(root):
        return Telling.PEER
    if _QUOTE.search(root):
        return Telling.QUOTE
    if _ECHO.search(root) or any("EngineDeadError" in raised.text for raised in trace.raised):
        return Telling.ECHO
    if _is_native(trace, level):
        return Telling.FATAL
    if _CAUGHT_HEADER.match(trace.header) or _is_trackers(trace):
        return Telling.LOGGED
    if _FATAL_HEADER.match(trace.header):
        return Telling.FATAL
    if level:
        return Telling.RAISED if trace.headless else Telling.LOGGED
    return Telling.FATAL if is_uncaught(trace) else Telling.RAISED


def _is_native(trace: Trace, level: str) -> bool:
    """Tell whether a process died of it in C++ or in the interpreter, neither of which logs: who logs it quotes it."""
    return trace.native and not level


def _is_trackers(trace: Trace) -> bool:
    """Tell whether Python's resource tracker wrote it, which prints each exception of its loop and goes on.

    It misses names that a killed process had registered, or never came to (multiprocessing/resource_tracker.py, 3.11).
    """
    frames = trace.raised[-1].frames
    return len(trace.raised) == 1 and bool(frames) and frames[0].file.endswith(_TRACKER)


def is_uncaught(trace: Trace) -> bool:
    """Tell whether the outermost frame of the last exception is a program's own first line."""
    frames = trace.raised[-1].frames
    return bool(frames) and not trace.headless and frames[0].function in _OUTERMOST


def telling_of_line(line: Line) -> Telling | None:  # noqa: PLR0911 - one return for each kind of line
    """Judge a line that belongs to no traceback; None where it tells nothing."""
    text = line.text
    if found := _VANISHED.match(text):
        code = found["code"] or found["status"]
        if code in _ASKED_TO_END:
            return Telling.STOPPED
        # A signal tells more than a guess: whatever others say afterwards follows from it.
        return Telling.FATAL if code and code.startswith("-") else Telling.VANISHED
    if not line.level and _SHELL.match(text):
        return Telling.VANISHED
    if not line.level and _FATAL_LINE.match(text):
        return Telling.FATAL
    if line.source.startswith(_DUMP):
        return None
    if line.level in {"ERROR", "CRITICAL"} and not text[0].isspace():
        return Telling.ECHO if _FATAL_HEADER.search(text) or _ECHO.search(text) else Telling.LOGGED
    if not line.level and text.startswith("ERROR: "):  # uvicorn's own
        return Telling.LOGGED
    return None


def ends_the_engine(trace: Trace, level: str) -> bool:
    """Tell whether the engine goes down for certain, once this trace was said."""
    if _is_native(trace, level):
        return True
    if _CAUGHT_HEADER.match(trace.header):
        return False
    if _DYING_HEADER.match(trace.header) or _DYING.match(trace.root.text):
        return True
    if level or telling_of_trace(trace, level) is not Telling.FATAL:
        return False
    return any("vllm/entrypoints/" in frame.file and frame.function in _MAIN for frame in trace.raised[-1].frames)


def follows_from_another(trace: Trace) -> bool:
    """Tell whether the engine's core died of what another process had said, or of waiting in vain for its answer."""
    if not _CORES.match(trace.header):
        return False
    return telling_of_trace(trace, "ERROR") in {Telling.ECHO, Telling.PEER, Telling.QUOTE} or any(
        raised.text.startswith(_NO_ANSWER) for raised in trace.raised
    )


def line_ends_the_engine(line: Line, telling: Telling) -> bool:
    """Tell whether the engine goes down for certain, once this line was said."""
    if telling is Telling.ECHO:
        return line.text.startswith(_START_FAILED)
    return telling in {Telling.FATAL, Telling.VANISHED} and not _SHELL.match(line.text)


def words(said: Said) -> str:
    """Return everything that it says."""
    return "\n".join(raised.text for raised in said.trace.raised) if said.trace else said.line.text


def who_died(said: Said) -> bool:
    """Tell whether it is a line about a process that is gone."""
    text = said.line.text
    return said.trace is None and bool(_VANISHED.match(text) or EXITED.match(text) or text.startswith(CORE_STOPPED))


def is_silent(said: Said | None) -> bool:
    """Tell whether nothing said why: then what stands outside the log may explain it."""
    if said is None or said.telling < Telling.RAISED:
        return True
    return who_died(said)


def most_telling(candidates: Iterable[Said]) -> Said | None:
    """Return the root cause among everything that was said: the first of the most telling, the last of the logged."""
    found = [(said.telling, said) for said in sorted(candidates, key=lambda said: said.order)]
    top = max((telling for telling, _ in found), default=Telling.STOPPED)
    equals = [said for telling, said in found if telling is top]
    if top is Telling.STOPPED:
        return None
    if top is Telling.ECHO:  # a traceback at least has a place
        equals = [said for said in equals if said.trace] or equals
    return equals[-1] if top is Telling.LOGGED else equals[0]


def root_cause(said: Said, pids: Mapping[str, int], remarks: Iterable[str]) -> RootCause:
    """Write out what was picked. `pids` are the processes' last known ones, `remarks` NCCL's lines that go with it."""
    process, pid = said.line.process, said.line.pid
    before = tuple(remarks)
    if said.trace is None:
        text = said.line.text[:_LONGEST_TEXT]
        return of_line(text, process, pid).with_lines(before)
    raised = said.trace.raised
    if not process and (process := _process_of(raised)):
        pid = next((pids[name] for name in reversed(list(pids)) if name.startswith(process)), None)
    telling, innermost = _telling_frame(raised)
    return RootCause(
        text=_without_link(said.trace.root.text)[:_LONGEST_TEXT],
        process=process,
        pid=pid,
        file=telling and _PACKAGE.sub("", telling.file),
        line=telling and telling.line,
        function=telling and (telling.function or None),
        innermost=innermost and _place(_PACKAGE.sub("", innermost.file), innermost.line, innermost.function),
        chain=tuple(_first_line(one.text) for one in raised),
        excerpt=tuple(_excerpt(said.trace)),
        frames=tuple(_frame(frame) for one in raised for frame in reversed(one.frames)),
    ).with_lines(before)


def of_line(text: str, process: str = "", pid: int | None = None) -> RootCause:
    """Write out a line that tells the cause alone."""
    return RootCause(text, process, pid, None, None, None, None, (text,), (text,))


def where_cut(process: str, pid: int | None, frames: Sequence[Frame]) -> str:
    """Say whose traceback it is that a log ends in, and the last place that it has."""
    process = process or _process_of([Raised("", tuple(frames))])
    who = f" of {process}" + (f" (pid {pid})" if pid else "") if process else ""
    last = frames[-1] if frames else None
    return who + (f", at {_place(_PACKAGE.sub('', last.file), last.line, last.function)}" if last else "")


def _telling_frame(raised: list[Raised]) -> tuple[Frame | None, Frame | None]:
    """Return the most telling and the innermost frame: of the first cause, or of what it was raised through."""
    frames = [one.frames for one in raised if one.frames]
    if not frames:
        return None, None
    ours = (frame for group in frames for frame in reversed(group) if _TELLING_FILE.search(frame.file))
    return next(ours, frames[0][-1]), frames[0][-1]


def _process_of(raised: list[Raised]) -> str:
    functions = (frame.function for one in raised for frame in reversed(one.frames))
    return next((_PROCESS_OF_FUNCTION[name] for name in functions if name in _PROCESS_OF_FUNCTION), "")


def _excerpt(trace: Trace) -> list[str]:
    lines = deque(trace.root.lines)
    message = trace.root.text.count("\n") + 1
    while len(lines) > _SHOWN + message:
        lines.popleft()
    shown = [trace.header, *lines] if trace.header else [*lines]
    return shown + [_first_line(chained.text) for chained in trace.raised[1:]]


def _frame(frame: Frame) -> str:
    return f"{_PACKAGE.sub('', frame.file)} in {frame.function}"


def _place(file: str | None, line: int | None, function: str | None) -> str:
    return f"{file}:{line}" + (f" in {function}" if function else "")


def _without_link(text: str) -> str:
    return text.split("\n    For further information visit", 1)[0]


def _first_line(text: str) -> str:
    """Return an exception's first line, with pydantic's reason, which stands on the second."""
    first, _, rest = text.partition("\n")
    reason = rest.split("\n", 1)[0]
    return f"{first}: {reason.strip()}" if reason.startswith("  Value error") else first
