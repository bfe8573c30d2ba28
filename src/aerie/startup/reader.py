"""Reads vLLM's output (0.17 to 0.32, both model runners) as it comes, in pieces of any size."""

import re
from dataclasses import dataclass, replace
from typing import NamedTuple

from aerie.startup.errors import Severity, error_of


@dataclass(frozen=True)
class Report:
    """Where a start is: `step` in words, `fraction` of its shard bar (0 to 1), the last line and the error seen."""

    step: str = "starting vLLM"
    fraction: float | None = None
    last_line: str = ""
    error: str | None = None


class _Marker(NamedTuple):
    step: str
    pattern: re.Pattern[str]
    after_kv_cache: bool = False


_COMPILE_TARGET = re.compile(r"\[backbone\] Starting torch\.compile")
_COMPILE_DRAFTER = re.compile(r"\[eagle_head\] Starting torch\.compile")
_CAPTURE = re.compile(r"Capturing (\w+ )?CUDA graphs|Capturing model for speculator")

# In the order of a start. CUDA compiles and captures once to measure memory and again once the KV cache stands; a CPU
# does it only then. So these steps stand twice, and the second row counts only after the KV cache line: a slow
# rank that speaks late must not push the start forward.
_MARKERS = (
    _Marker("reading the configuration", re.compile(r"non-default args: ")),
    _Marker("starting the engine core", re.compile(r"Initializing a V1 LLM engine")),
    _Marker("joining the ranks", re.compile(r"world_size=\d+ rank=")),
    _Marker("loading target", re.compile(r"Loading model from scratch|Starting to load model|% Completed \| \d+/")),
    _Marker("loading drafter", re.compile(r"Using Eagle3 auxiliary layers|Loading drafter model")),
    _Marker("profiling", re.compile(r"Model loading took")),
    _Marker("compiling target", _COMPILE_TARGET),
    _Marker("compiling drafter", _COMPILE_DRAFTER),
    _Marker("capturing graphs to measure memory", _CAPTURE),
    _Marker("sizing the KV cache", re.compile(r"KV cache size: ")),
    _Marker("warming up", re.compile(r"Warming up model for the compilation|JIT kernel warmup starting")),
    _Marker("compiling target", _COMPILE_TARGET, after_kv_cache=True),
    _Marker("compiling drafter", _COMPILE_DRAFTER, after_kv_cache=True),
    _Marker("capturing graphs", _CAPTURE, after_kv_cache=True),
    _Marker("finishing the engine core", re.compile(r"init engine \(.*\) took")),
    _Marker("starting the API server", re.compile(r"Starting vLLM (API )?server")),
    _Marker("waiting for /health", re.compile(r"Application startup complete")),
)
_KV_CACHE = next(index for index, marker in enumerate(_MARKERS) if marker.step == "sizing the KV cache")
_LOADING = frozenset({"loading target", "loading drafter"})
_SHARD_BAR = re.compile(r": +\d+% Completed \| (\d+)/(\d+) ")

_LINE_END = re.compile(rb"[\r\n]+")
_LONGEST_LINE = 64 * 1024  # bytes; a longer line is read in pieces rather than kept


class StartupReader:
    """Turns one engine's output into a `Report` that never goes backwards."""

    def __init__(self) -> None:
        self.report = Report()
        self._position = -1
        self._severity = Severity.NONE
        self._rest = b""

    def feed(self, data: bytes) -> Report:
        """Read a piece of output; lines end in a newline or a carriage return, as progress bars do."""
        *lines, self._rest = _LINE_END.split(self._rest + data)
        if len(self._rest) > _LONGEST_LINE:
            lines.append(self._rest)
            self._rest = b""
        for line in lines:
            self._line(line.decode(errors="replace"))
        return self.report

    def _line(self, line: str) -> None:
        if not line.strip():
            return
        step, fraction = self._progress(line)
        severity, error = error_of(line)
        if severity is Severity.NONE or severity < self._severity:
            error = self.report.error
        else:
            self._severity = severity
        self.report = replace(self.report, step=step, fraction=fraction, last_line=line.strip(), error=error)

    def _progress(self, line: str) -> tuple[str, float | None]:
        step, fraction = self.report.step, self.report.fraction
        for index in range(self._position + 1, len(_MARKERS)):
            marker = _MARKERS[index]
            if marker.after_kv_cache and self._position < _KV_CACHE:
                continue
            if marker.pattern.search(line):
                self._position = index
                step, fraction = marker.step, None
                break
        bar = _SHARD_BAR.search(line)
        if bar and step in _LOADING:
            done, total = map(int, bar.groups())
            fraction = max(fraction or 0.0, done / total)
        return step, fraction
