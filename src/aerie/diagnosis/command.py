"""`aerie diagnose`: reads anybody's log and says why its engine failed."""

import errno
import io
import json
import os
import re
import shlex
import sys
from pathlib import Path
from typing import Any

from aerie.diagnosis.diagnosis import HANDBOOK, Diagnosis, wrap
from aerie.diagnosis.signatures import Severity
from aerie.diagnosis.starts import Starts, read

KNOWN, UNKNOWN, USAGE, NO_FAILURE = range(4)

_STDIN = "-"
_AGAIN = "aerie diagnose -"
_STDIN_NAME = "standard input"
_UNFINISHED = (
    "The start in {name} is not finished: the log ends in its middle, and names no failure so far. If the engine is "
    "gone, it was killed without a word: look for an out-of-memory kill in `dmesg`."
)
_CUT = "{name} ends inside a traceback{where}. What was raised there is missing: give the rest of the log."
_STOPPED = "No failure in {name}: the start was stopped from outside (SIGTERM) {when}."
_REVIVED = "The last start in this log has not failed, as far as it goes. The one before it did:"
_KERNELS_SHOWN = 3
_PEEKED = 4096  # bytes
_COMPRESSED = {b"\x1f\x8b": "zcat", b"\x28\xb5\x2f\xfd": "zstdcat", b"\xfd7zXZ": "xzcat", b"BZh": "bzcat"}
_JSON = b'{"'
# What jq has to be told, by what the first line holds: Docker's own files, journald's.
_JSON_FIELDS = {b'{"log":': "-rj .log", b'"MESSAGE"': "-r .MESSAGE"}
_CSV = re.compile(rb'"?[\w@ -]{1,64}"?(?:,"?[\w@ -]{1,64}"?)+\r?\n[^\n]*,')
_UTF16 = (b"\xff\xfe", b"\xfe\xff")


class LogError(Exception):
    """The log cannot be read as one; the message says what to do."""


def diagnose(path: str, *, as_json: bool) -> int:
    """Print the diagnosis of the log at `path`, "-" for standard input, and return the exit code.

    NO_FAILURE also where the log does not reach that far: one that ends inside a traceback may be that of an error that
    was caught, and says no cause. The text, and `no_failure` in JSON, tells these apart.
    """
    name = _STDIN_NAME if path == _STDIN else path
    try:
        starts = _read(path, name)
    except (LogError, OSError) as error:
        words = str(error) if isinstance(error, LogError) else f"{name} cannot be read: {_reason(error, path)}"
        words, *commands = words.split("\n")
        print(*_wrapped(f"aerie: {words}"), *commands, sep="\n", file=sys.stderr)
        return USAGE
    last = starts.now.diagnose()
    diagnosis = last or starts.failure
    _print(json.dumps(_as_json(starts, last, name), indent=1) if as_json else "\n".join(_words(starts, last, name)))
    if diagnosis is None:
        return NO_FAILURE
    return KNOWN if diagnosis.known else UNKNOWN


def _print(text: str) -> None:
    try:
        print(text, flush=True)
    except BrokenPipeError:  # whoever read it has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _reason(error: OSError, path: str) -> str:
    if error.errno == errno.ENOENT:
        return "there is no such file"
    if error.errno == errno.EISDIR:
        return f"it is a directory; name a file, or pipe several:\n  cat {shlex.quote(path)}/*.log | {_AGAIN}"
    return error.strerror or str(error)


def _read(path: str, name: str) -> Starts:
    if path == _STDIN:
        if sys.stdin is None:
            raise LogError(f"{name} is closed: pipe the log into it, or name a file")
        if sys.stdin.isatty():
            print("aerie: paste the log, then press Ctrl-D on a line of its own", file=sys.stderr)
        log = sys.stdin.buffer
        return _read_text(log if isinstance(log, io.BufferedReader) else io.BufferedReader(log), name)  # type: ignore[arg-type]
    with Path(path).open("rb") as log:
        return _read_text(log, name)


def _read_text(log: io.BufferedReader, name: str) -> Starts:
    first = log.peek(_PEEKED)[:_PEEKED]
    if not first:
        raise LogError(f"{name} is empty: give the whole output of `vllm serve`, stderr included")
    for magic, tool in _COMPRESSED.items():
        if first.startswith(magic):
            raise LogError(_again(f"{name} is compressed", tool, name))
    if first.startswith(_UTF16):
        raise LogError(_again(f"{name} is UTF-16", "iconv -f UTF-16 -t UTF-8", name))
    if first.startswith(_JSON):
        what = next((what for sign, what in _JSON_FIELDS.items() if sign in first.partition(b"\n")[0]), "-r .FIELD")
        raise LogError(_again(f"{name} has each line in JSON", f"jq {what}", name))
    if _CSV.match(first):
        raise LogError(f"{name} is CSV: give the column that holds the log's lines, alone and without quotes")
    if b"\0" in first:
        raise LogError(f"{name} is no text: a log is expected, such as the output of `docker compose logs`")
    starts = read(log)
    if not starts.is_vllms:
        raise LogError(_not_vllms(name, starts))
    return starts


def _again(problem: str, tool: str, name: str) -> str:
    """Say how to give the log in text; the command stands on a line of its own, whole, to be copied."""
    file = "FILE" if name == _STDIN_NAME else shlex.quote(name)
    return f"{problem}; again with:\n  {tool} {file} | {_AGAIN}"


def _not_vllms(name: str, starts: Starts) -> str:
    """Say what a log that holds nothing of an engine's holds instead; no remedy of an engine's fits it."""
    found = starts.now.diagnose("ended")
    said = found.root.text.partition("\n")[0] if found and found.root else ""
    told = [f"What broke is another program's, or lines are missing: {said}."] if said else []
    told += [f"It has this of the {one}." for one in found.evidence[:_KERNELS_SHOWN]] if found else []
    whole = "Give the whole output of `vllm serve`, stderr included, or of its container."
    return " ".join((f"{name} is no log of vLLM: nothing in it is vLLM's.", *told, whole))


def _as_json(starts: Starts, last: Diagnosis | None, name: str) -> dict[str, Any]:
    shown, noticed = last or starts.failure, starts.now.noticed
    return {
        "diagnosis": shown and shown.to_json(),
        "no_failure": None if last else _no_failure(starts, name),
        "of_the_last_start": last is not None,
        "other_failures": _others(starts, last),
        "noticed": [{"signature": known.id, "severity": known.severity, "title": known.title} for known in noticed],
    }


def _others(starts: Starts, last: Diagnosis | None) -> int:
    return starts.failures if last else max(0, starts.failures - 1)


def _no_failure(starts: Starts, name: str) -> str:
    """Say how the last start ended, as far as the log goes, where nothing failed in it."""
    if (where := starts.now.cut) is not None:
        return _CUT.format(name=name, where=where)
    if not starts.settled:
        return _UNFINISHED.format(name=name)
    when = starts.now.stopped if starts.begun else None
    return _STOPPED.format(name=name, when=when) if when else f"No failure in {name}."


def _words(starts: Starts, last: Diagnosis | None, name: str) -> list[str]:
    diagnosis = last or starts.failure
    lines = [_REVIVED] if diagnosis and not last else []
    if diagnosis:
        lines += [diagnosis.text() + "\n"]
    else:
        lines += _wrapped(_no_failure(starts, name))
    if others := _others(starts, last):
        titles = list(starts.titles)[: None if last else -1]
        which = ", the latest" if others > len(titles) else ""
        lines += [f"{others} earlier {'start' if others == 1 else 'starts'} in this log failed too{which}:"]
        lines += [part for title in titles for part in _wrapped(f"  - {title}")]
    for known in starts.now.noticed:
        if known.severity is Severity.DEGRADED:
            lines += _wrapped(f"Seen, and worth a look: {known.title}. {known.remedy}")
    if harmless := [known.id for known in starts.now.noticed if known.severity is Severity.HARMLESS]:
        lines += _wrapped(f"Seen, and harmless: {', '.join(harmless)} (see {HANDBOOK})")
    return lines


def _wrapped(text: str) -> list[str]:
    return wrap(text, "", "  ")
