"""`aerie wait`: stands before a service that starts, tells how far it is, and opens when it is ready."""

import json
import sys
import time
from collections.abc import Mapping
from enum import IntEnum
from shutil import get_terminal_size
from typing import Any

from aerie.gate.http import UnreachableError, request

# Seconds.
_TIMEOUT = 4.0  # for an answer of the status port, which comes from memory
_POLL = 1.0
_NOBODY = 60.0  # without an answer until nobody is there
_UNREADY = 25.0  # of an engine that answers and fails the readiness check, which is asked anew every 10 s


class Verdict(IntEnum):
    """The exit codes of `aerie wait`; 2 is argparse's."""

    READY = 0
    FAILED = 1
    STALLED = 3
    NOBODY = 4


class Gate:
    """Judges a service by what it says over time: a deadline follows progress, not the clock."""

    def __init__(self, stall_timeout: float, now: float) -> None:
        self._stall_timeout = stall_timeout
        self._begun = self._answered = self._moved = now
        self._unready_since: float | None = None
        self._failures: int | None = None
        self._seen: object = None

    def judge(self, state: Mapping[str, Any] | None, now: float) -> tuple[Verdict | None, str]:
        """Return (verdict or None for wait on, one line); `state` is None where nothing answered, `now` in seconds."""
        if state is None:
            verdict = Verdict.NOBODY if now - self._answered >= _NOBODY else None
            return verdict, f"no answer for {now - self._answered:.0f} s"
        self._answered = now
        phase = state["phase"]
        line = ": ".join(filter(None, (phase, state["reason"] or _step(state))))
        if phase == "ready":
            return Verdict.READY, f"ready after {now - self._begun:.0f} s"
        # A failure from before may be mended by the next start, and an engine that was already dying when we came is
        # one; a failure that begins before our eyes is an answer.
        if self._failures is None:
            self._failures = state["failures"] + (phase == "unready")
        failed = phase == "failed" and state["failures"] > self._failures
        if failed or phase in {"held", "stopping", "stopped"}:
            return Verdict.FAILED, line
        if phase != "unready":
            self._unready_since = None
        elif self._unready_since is None:
            self._unready_since = now
        elif now - self._unready_since >= _UNREADY:
            return Verdict.FAILED, line
        seen = (phase, state["step"], state["progress"], state["last_line"], state["engine"]["starts"])
        if seen != self._seen:
            self._seen, self._moved = seen, now
        if now - self._moved >= self._stall_timeout:
            return Verdict.STALLED, f"nothing has moved for {now - self._moved:.0f} s: {line}"
        return None, line


def _step(state: Mapping[str, Any]) -> str:
    return state["step"] if state["progress"] is None else f"{state['step']} {state['progress']:.0%}"


def wait(url: str, stall_timeout: float, *, as_json: bool) -> int:
    """Wait until the service at `url` is ready and return a `Verdict`, having printed why.

    The progress goes to stderr: one redrawn line on a terminal, else one line a change.
    """
    gate = Gate(stall_timeout, begun := time.monotonic())
    shown = ""
    while True:
        state = fetch_state(url)
        verdict, line = gate.judge(state, time.monotonic())
        if verdict is not None:
            break
        if line != shown or sys.stderr.isatty():
            _show(f"[{time.monotonic() - begun:4.0f} s] {line}")
            shown = line
        time.sleep(_POLL)
    _show(f"{url}: {line}", last=True)
    if as_json:
        print(json.dumps({"verdict": verdict.name.lower(), "line": line, "status": state}))
    return verdict


def fetch_state(url: str) -> dict[str, Any] | None:
    """Return `/status` of the service at `url`, None where nothing that speaks it answers."""
    try:
        _status, text = request(f"{url}/status", _TIMEOUT)
        state = json.loads(text)
    except (UnreachableError, ValueError):
        return None
    return state if isinstance(state, dict) and "phase" in state else None


def _show(line: str, *, last: bool = False) -> None:
    if sys.stderr.isatty():
        # A line that wraps could not be redrawn.
        shown = line if last else line[: get_terminal_size().columns - 1]
        print(f"\r\x1b[K{shown}", end="\n" if last else "", file=sys.stderr, flush=True)
    else:
        print(line, file=sys.stderr, flush=True)
