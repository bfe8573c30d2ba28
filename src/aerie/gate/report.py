"""`aerie status`: the service's state in a terminal."""

import json
import os
import sys
from urllib.parse import urlsplit

from aerie.gate.container import in_container, this_container
from aerie.gate.drawing import overview
from aerie.gate.judge import Verdict
from aerie.gate.screen import columns_of, style_of
from aerie.gate.state import NoState, read_state

_OWN = frozenset({"127.0.0.1", "::1", "localhost"})


def status(url: str, *, as_json: bool) -> int:
    """Print the state of the service at `url`; return 0 where it is ready, 1 where not, 4 where nothing answers."""
    state = read_state(url)
    if isinstance(state, NoState):
        print(state.why, file=sys.stderr)
        return Verdict.NOBODY
    if as_json:
        print(json.dumps(state, indent=1))
    else:
        columns, style = columns_of(sys.stdout), style_of(sys.stdout, os.environ)
        print("\n".join(overview(state, columns, style, _retry(url))))
        if state["diagnosis"]:
            print(f"\n{state['diagnosis']['text']}")
    return Verdict.READY if state["phase"] == "ready" else Verdict.FAILED


def _retry(url: str) -> str:
    """Return what starts the service at `url` anew: which container that is, is known only from within."""
    container = this_container() if urlsplit(url).hostname in _OWN else None
    return in_container("aerie retry", container) if container else "`aerie retry` where the service runs"
