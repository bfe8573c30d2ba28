"""Tells an error line that names a cause from one that only reports a consequence."""

import re
from enum import IntEnum


class Severity(IntEnum):
    """How much a line says about why an engine died."""

    NONE = 0
    CONSEQUENCE = 1
    LOGGED = 2
    EXCEPTION = 3


_PROCESS = re.compile(r"^.*?\([\w-]+ pid=\d+\) ")
_LEVEL = re.compile(r"^(DEBUG|INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d [\d:]+ \[[^\]]+\] ?")
# `module.SomeError: message` of a traceback, pydantic's indented reason, argparse's one-liner.
_EXCEPTION = re.compile(
    r"^(?:[a-z_][\w.]*\.)?[A-Z]\w*(?:Error|Exception|Exit)(?:: .*)?$|^  Value error, .*|^[\w ./-]+: error: .*"
)
# What one process says when another broke: true, and better than nothing only where nothing else was said.
_CONSEQUENCE = re.compile(
    r"See root cause above|See stack trace|check the stack trace above|EngineDeadError"
    r"|output_handler failed|Executor failed"
)


def error_of(line: str) -> tuple[Severity, str | None]:
    """Return how much `line` tells about a failure, and what it tells."""
    text = _PROCESS.sub("", line, count=1)
    level = _LEVEL.match(text)
    if level:
        if level[1] not in {"ERROR", "CRITICAL"}:
            return Severity.NONE, None
        text = text[level.end() :]
    if _CONSEQUENCE.search(text):
        return Severity.CONSEQUENCE, text.strip()
    if _EXCEPTION.match(text):
        return Severity.EXCEPTION, text.strip()
    if level and text and not text[0].isspace() and not text.startswith("Traceback "):
        return Severity.LOGGED, text.strip()
    return Severity.NONE, None
