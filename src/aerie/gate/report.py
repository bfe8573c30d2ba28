"""`aerie status`: the service's state in a terminal."""

import json
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from aerie.gate.drawing import overview
from aerie.gate.judge import Verdict
from aerie.gate.screen import columns_of, style_of
from aerie.gate.state import NoState, read_state
from aerie.speculation import Speculation


def status(url: str, *, as_json: bool) -> int:
    """Print the state of the service at `url`; return 0 where it is ready, 1 where not, 4 where nothing answers."""
    state = read_state(url)
    if isinstance(state, NoState):
        print(state.why, file=sys.stderr)
        return Verdict.NOBODY
    if as_json:
        print(json.dumps(state, indent=1))
    else:
        print("\n".join(overview(state, columns_of(sys.stdout), style_of(sys.stdout, os.environ))))
        if state["diagnosis"]:
            print(f"\n{state['diagnosis']['text']}")
    return Verdict.READY if state["phase"] == "ready" else Verdict.FAILED


def rows(state: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (name, text) of what `state` (the form of `/status`) has to say, the most wanted first."""
    engine, ended, speculation = state["engine"], state["engine"]["exit"], state["speculation"]
    how = ended and (f"killed by {ended['signal']}" if ended["signal"] else f"exit code {ended['code']}")
    progress = None if state["progress"] is None else f"{state['progress']:.0%}"
    candidates = {
        "phase": f"{state['phase']} since {state['since']}",
        "reason": state["reason"],
        "step": " ".join(filter(None, (state["step"], progress))),
        "next start": state["next_start"],
        "last error": state["last_error"],
        "model": state["model"],
        "speculation": speculation and str(Speculation(**speculation)),
        "engine": f"pid {engine['pid'] or '-'}, starts {engine['starts']}, failures in a row {state['failures']}",
        "last exit": ended and f"{how} at {ended['at']}",
        "last line": state["last_line"],
        "versions": ", ".join(f"{name} {version}" for name, version in state["versions"].items() if version),
    }
    yield from ((name, text) for name, text in candidates.items() if text)
