"""A log, in pieces of any size and from wherever it was copied, into the lines that its processes said."""

import re
from typing import NamedTuple


class Line(NamedTuple):
    """One thing that one process said. A tuple, since a log can hold ten million of them."""

    text: str
    """Without prefixes, colours and trailing blanks; the indentation of a traceback stays. Never empty."""
    process: str = ""
    """As vLLM names it: APIServer, EngineCore, Worker_TP3, Worker_PP0_TP1; KERNEL; empty where the line names none."""
    pid: int | None = None
    level: str = ""
    """DEBUG, INFO, WARNING, ERROR or CRITICAL of vLLM's own logger; empty for everything else."""
    clock: str = ""
    """`11-29 13:34:58`, as logged: no year, the engine's time zone."""
    source: str = ""
    """`core.py:1010`, as logged."""
    carrier: str = ""
    """Whose output it was taken from: a service of compose, a pod, a unit of journald; empty where nothing says so."""


KERNEL = "kernel"
"""The process of the kernel's lines, whose text keeps the time and the host before it."""

LONGEST_LINE = 64 * 1024
"""Characters. A longer line is read as several rather than kept."""

_LINE_END = re.compile(rb"[\r\n]")

# `(EngineCore pid=7) ` and `INFO 11-29 13:34:58 [core.py:1010] `, either may be missing. 0.16 and 0.17 write the
# first before everything that a process prints, 0.32 before what is logged only. Ray adds the host.
_PROCESS = r"\(([A-Za-z][\w.-]{0,63}) pid=(\d{1,10})(?:, ip=[\w.:]{1,64})?\)(?: |$)"
_LOGGED = r"(DEBUG|INFO|WARNING|ERROR|CRITICAL) (\d\d-\d\d \d\d:\d\d:\d\d) \[([^\]\s]{1,200}:\d{1,6})\](?: |$)"
_HEAD = re.compile(f"{_PROCESS}(?:{_LOGGED})?|{_LOGGED}")

# What those who carry a log put before each line, in any nesting.
_ISO_TIME = r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?:Z|[+-]\d\d:?\d\d)? "
_OTHER_TIME = r"(?:[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d(?:\.\d{1,6})?|\d{10}\.\d{6}|\[ {0,9}\d{1,9}\.\d{6}\]) "
_HOST_AND_UNIT = r"[\w.-]{1,253} ([\w./@-]{1,128})"
_CARRIED = re.compile(
    r"\[(pod/[\w./-]{1,300})\] "  # kubectl logs --prefix
    r"|([A-Za-z][\w.@-]{0,127}) {0,64}\| "  # docker compose logs, docker service logs
    rf"|{_ISO_TIME}(?:std(?:out|err) [FP] |{_HOST_AND_UNIT}\[\d{{1,10}}\]: )?"  # --timestamps, CRI, journald
    rf"|{_OTHER_TIME}{_HOST_AND_UNIT}(?:\[\d{{1,10}}\])?: "  # journald and syslog
)

_KERNELS = re.compile(rf"(?:{_ISO_TIME}|{_OTHER_TIME})[\w.-]{{1,253}} kernel: \S")

# Terminals' colours and cursor moves; the second form is what is left of them in a paste that lost the escape.
_COLOUR = re.compile(r"(?:\x1b|\^\[)\[[0-9;?]{0,32}[ -/]?[@-~]|\[(?:\d;\d{1,2}|[39]\d|0)m(?!\])")


class LineReader:
    """Turns bytes into lines. Remembers at most one unfinished line."""

    def __init__(self) -> None:
        self._rest: list[bytes] = []
        self._size = 0
        self._process: tuple[str, int | None] = ("", None)

    def feed(self, data: bytes) -> list[Line]:
        """Return the lines that `data` completes; a newline or a carriage return ends one, as progress bars do."""
        lines: list[Line] = []
        start = 0
        for ending in _LINE_END.finditer(data):
            self._keep(data[start : ending.start()], lines)
            start = ending.end()
            self._flush(lines, returned=ending[0] == b"\r")
        self._keep(data[start:], lines)
        return lines

    def end(self) -> list[Line]:
        """Return the unfinished line, if there is one."""
        lines: list[Line] = []
        self._flush(lines, returned=False)
        return lines

    def _keep(self, piece: bytes, lines: list[Line]) -> None:
        while self._size + len(piece) > LONGEST_LINE:
            room = LONGEST_LINE - self._size
            self._rest.append(piece[:room])
            piece = piece[room:]
            self._flush(lines, returned=False)
        if piece:
            self._rest.append(piece)
            self._size += len(piece)

    def _flush(self, lines: list[Line], *, returned: bool) -> None:
        text = b"".join(self._rest).decode(errors="replace")
        self._rest, self._size = [], 0
        said, process = _read(text)
        # 0.17 writes `(EngineCore_DP0 pid=7) \rLoading ...`: the head stands before the carriage return.
        if said and not said[0].process and self._process[0]:
            said[0] = said[0]._replace(process=self._process[0], pid=self._process[1])
        self._process = process if returned and not said else ("", None)
        lines += said


def parse(text: str) -> list[Line]:
    """Read a whole log that is at hand as text."""
    reader = LineReader()
    return reader.feed(text.encode(errors="replace")) + reader.end()


def _read(text: str) -> tuple[list[Line], tuple[str, int | None]]:
    """Return what one physical line says, and the process that its last head names."""
    if "\x1b[" in text or "^[[" in text or "[0;" in text or "[0m" in text or "[1;" in text:
        text = _COLOUR.sub("", text)
    if " kernel: " in text and _KERNELS.match(text):
        return [Line(text.rstrip(), KERNEL)], ("", None)
    start, carrier = 0, ""
    while (head := _HEAD.match(text, start)) is None and (carried := _CARRIED.match(text, start)):
        start = carried.end()
        carrier = carried[carried.lastindex] if carried.lastindex else carrier
    if head:
        start = head.end()
    said: list[Line] = []
    # A question without a newline, or two processes that write at once, leave the next line's head mid-line.
    for following in _HEAD.finditer(text, start) if _may_hold_a_head(text, start) else ():
        _say(said, head, text[start : following.start()], carrier)
        head, start = following, following.end()
    _say(said, head, text[start:], carrier)
    return said, _process(head)


def _may_hold_a_head(text: str, start: int) -> bool:
    """Spare nearly every line the search, which costs more than all the rest."""
    return text.find(" pid=", start) >= 0 or text.find("] ", start) >= 0


def _say(said: list[Line], head: re.Match[str] | None, text: str, carrier: str) -> None:
    if not (text := text.rstrip()):
        return
    if head is None:
        said.append(Line(text, carrier=carrier))
        return
    level, clock, source = head.group(3, 4, 5) if head[3] else head.group(6, 7, 8)
    said.append(Line(text, *_process(head), level or "", clock or "", source or "", carrier))


def _process(head: re.Match[str] | None) -> tuple[str, int | None]:
    return (head[1], int(head[2])) if head and head[1] else ("", None)
