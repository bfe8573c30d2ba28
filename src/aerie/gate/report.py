"""`aerie status`: the service's state in a terminal."""

import json
from collections.abc import Mapping
from typing import Any

from aerie.gate.wait import Verdict, fetch_state
from aerie.speculation import Speculation


def status(url: str, *, as_json: bool) -> int:
    """Print the state of the service at `url`; return 0 where it is ready, 1 where not, 4 where nothing answers."""
    state = fetch_state(url)
    if state is None:
        print(f"nothing at {url} answers as Aerie's status")
        return Verdict.NOBODY
    print(json.dumps(state, indent=1) if as_json else describe(state))
    return Verdict.READY if state["phase"] == "ready" else Verdict.FAILED


def describe(state: Mapping[str, Any]) -> str:
    """Return the state as lines of text."""
    engine, exited = state["engine"], state["engine"]["exit"]
    progress = "" if state["progress"] is None else f"{state['progress']:.0%}"
    rows = {
        "phase": f"{state['phase']} since {state['since']}",
        "reason": state["reason"],
        "step": " ".join(filter(None, (state["step"], progress))),
        "next start": state["next_start"],
        "model": state["model"],
        "speculation": state["speculation"] and str(Speculation(**state["speculation"])),
        "engine": f"pid {engine['pid'] or '-'}, starts {engine['starts']}, failures in a row {state['failures']}",
        "last exit": exited and f"{exited['signal'] or exited['code']} at {exited['at']}",
        "last error": state["last_error"],
    }
    return "\n".join(f"{name:<12} {text}" for name, text in rows.items() if text)
