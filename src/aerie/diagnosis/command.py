"""`aerie diagnose`: reads anybody's log and says why its engine failed."""

import errno
import io
import json
import os
import sys
import textwrap
from pathlib import Path
from typing import Any

from aerie.diagnosis.diagnosis import WIDTH, Diagnosis
from aerie.diagnosis.signatures import Severity
from aerie.diagnosis.starts import Starts, read

KNOWN, UNKNOWN, USAGE, NO_FAILURE = range(4)

_STDIN = "-"
_CUT = (
    "The log ends in the middle of a start. If the engine is gone, it was killed without a word: look for an "
    "out-of-memory kill in `dmesg`."
)
_PEEKED = 4096  # bytes
_COMPRESSED = {b"\x1f\x8b": "zcat", b"\x28\xb5\x2f\xfd": "zstdcat", b"\xfd7zXZ": "xzcat", b"BZh": "bzcat"}
_DOCKERS_JSON = b'{"log":'
_UTF16 = (b"\xff\xfe", b"\xfe\xff")


class LogError(Exception):
    """The log cannot be read as one; the message says what to do."""


def diagnose(path: str, *, as_json: bool) -> int:
    """Print the diagnosis of the log at `path`, "-" for standard input, and return the exit code."""
    name = "standard input" if path == _STDIN else path
    try:
        starts = _read(path, name)
    except (LogError, OSError) as error:
        words = error if isinstance(error, LogError) else f"{name} cannot be read: {_reason(error)}"
        print(f"aerie: {words}", file=sys.stderr)
        return USAGE
    last = starts.now.diagnose()
    diagnosis = last or starts.failure
    _print(json.dumps(_as_json(starts, last), indent=1) if as_json else "\n".join(_words(starts, last, name)))
    if diagnosis is None:
        return NO_FAILURE
    return KNOWN if diagnosis.known else UNKNOWN


def _print(text: str) -> None:
    try:
        print(text, flush=True)
    except BrokenPipeError:  # whoever read it has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _reason(error: OSError) -> str:
    if error.errno == errno.ENOENT:
        return "there is no such file"
    if error.errno == errno.EISDIR:
        return "it is a directory; name a file, or pipe several: cat DIRECTORY/*.log | aerie diagnose -"
    return error.strerror or str(error)


def _read(path: str, name: str) -> Starts:
    if path == _STDIN:
        if sys.stdin.isatty():
            print("aerie: paste the log, then press Ctrl-D on a line of its own", file=sys.stderr)
        log = sys.stdin.buffer
        return _read_text(log if isinstance(log, io.BufferedReader) else io.BufferedReader(log), name)  # type: ignore[arg-type]
    with Path(path).open("rb") as log:
        return _read_text(log, name)


def _read_text(log: io.BufferedReader, name: str) -> Starts:
    first = log.peek(_PEEKED)
    if not first:
        raise LogError(f"{name} is empty: give the whole output of `vllm serve`, stderr included")
    for magic, tool in _COMPRESSED.items():
        if first.startswith(magic):
            raise LogError(f"{name} is compressed: {tool} {name} | aerie diagnose -")
    if first.startswith(_UTF16):
        raise LogError(f"{name} is UTF-16: iconv -f UTF-16 -t UTF-8 {name} | aerie diagnose -")
    if first.startswith(_DOCKERS_JSON):
        raise LogError(f"{name} is Docker's own file, with each line in JSON: jq -rj .log {name} | aerie diagnose -")
    if b"\0" in first:
        raise LogError(f"{name} is no text: a log is expected, such as the output of `docker compose logs`")
    return read(log)


def _as_json(starts: Starts, last: Diagnosis | None) -> dict[str, Any]:
    shown, noticed = last or starts.failure, starts.now.noticed
    return {
        "diagnosis": shown and shown.to_json(),
        "of_the_last_start": last is not None,
        "other_failures": _others(starts, last),
        "noticed": [{"signature": known.id, "severity": known.severity, "title": known.title} for known in noticed],
    }


def _others(starts: Starts, last: Diagnosis | None) -> int:
    return starts.failures if last else max(0, starts.failures - 1)


def _words(starts: Starts, last: Diagnosis | None, name: str) -> list[str]:
    diagnosis = last or starts.failure
    lines = [diagnosis.text() + "\n" if diagnosis else f"No failure in {name}."]
    if diagnosis and not last:
        lines += ["The start after this one has not failed, as far as the log goes."]
    if others := _others(starts, last):
        lines += [f"{others} earlier {'start' if others == 1 else 'starts'} in this log failed too."]
    if diagnosis is None and not starts.settled:
        lines += textwrap.wrap(_CUT, WIDTH)
    for known in starts.now.noticed:
        word = "harmless" if known.severity is Severity.HARMLESS else "worth a look"
        more = "" if diagnosis and known.severity is Severity.HARMLESS else f" {known.remedy}"
        lines += textwrap.wrap(f"Seen, and {word}: {known.title}.{more}", WIDTH, subsequent_indent="  ")
    return lines
