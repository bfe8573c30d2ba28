"""`aerie status`: the service's state in a terminal."""

import json
import os
import sys

from aerie.gate.drawing import overview
from aerie.gate.judge import Verdict
from aerie.gate.screen import columns_of, style_of
from aerie.gate.state import NoState, read_state


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
