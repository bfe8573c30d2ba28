"""`aerie wait`: stands before a service that starts, tells how far it is, and opens when it is ready."""

import json
import os
import sys
import time
from typing import Any

from aerie.gate.drawing import frame
from aerie.gate.judge import Judgement, Memory, judge, tell
from aerie.gate.screen import Screen, can_redraw, columns_of, style_of
from aerie.gate.state import NoState, State, read_state
from aerie.gate.words import clock

_POLL = 0.5  # seconds; a failed start is told within a second
UNDECIDED = 5
"""The exit code of a piece of a wait that came to no verdict."""


def wait(url: str, stall_timeout: float, *, as_json: bool) -> int:
    """Wait until the service at `url` is ready and return a `Verdict`, having printed why.

    The progress goes to stderr: two redrawn lines on a terminal, else one line a change.
    """
    memory = Memory.at(time.monotonic())
    screen = Screen(sys.stderr) if can_redraw(sys.stderr, os.environ) else None
    style = style_of(sys.stderr, os.environ)
    try:
        while True:
            state = read_state(url)
            now = time.monotonic()
            memory, judgement = judge(memory, state, now, stall_timeout)
            if judgement.verdict is not None:
                break
            elapsed = now - memory.began
            if screen is None:
                memory, news = tell(memory, judgement.step, now)
                if news:
                    print(f"[{clock(elapsed):>5}] {judgement.step}", file=sys.stderr, flush=True)
                time.sleep(_POLL)
            else:
                screen.draw(frame(judgement.step, elapsed, columns_of(sys.stderr), style))
                screen.pause(_POLL)
    except KeyboardInterrupt:
        if screen:
            screen.clear()
        print("no longer waiting; the service goes on by itself", file=sys.stderr)
        raise
    if screen:
        screen.clear()
    print(f"{url}: {_message(judgement)}", file=sys.stderr, flush=True)
    if as_json:
        print(json.dumps(_outcome(memory, judgement, state, now)))
    return judgement.verdict


def wait_a_piece(url: str, stall_timeout: float, seconds: float, memory: Memory | None) -> int:
    """Go on with the wait that `memory` is of, for so long or until there is something to tell; print JSON.

    Returns a `Verdict`, or UNDECIDED.
    """
    begun = time.monotonic()
    memory = memory or Memory.at(begun)
    while True:
        state = read_state(url)
        now = time.monotonic()
        memory, judgement = judge(memory, state, now, stall_timeout)
        memory, news = tell(memory, judgement.step, now)
        if news or judgement.verdict is not None or now - begun + _POLL > seconds:
            break
        time.sleep(_POLL)
    outcome = _outcome(memory, judgement, state, now)
    print(json.dumps(outcome | {"news": news, "memory": memory.to_text()}))
    return UNDECIDED if judgement.verdict is None else judgement.verdict


def _message(judgement: Judgement) -> str:
    step, diagnosis = judgement.step, judgement.diagnosis
    return f"{step}\n\n{diagnosis['text']}" if diagnosis else str(step)


def _outcome(memory: Memory, judgement: Judgement, state: State | NoState, now: float) -> dict[str, Any]:
    return {
        "verdict": None if judgement.verdict is None else judgement.verdict.name.lower(),
        "line": str(judgement.step),
        "message": _message(judgement),
        "seconds": round(max(0.0, now - memory.began), 1),
        "status": None if isinstance(state, NoState) else state,
    }
