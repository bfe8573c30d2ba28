"""`aerie retry`: asks the service in this container for its next start, now that a person has mended something."""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from aerie.supervisor.state import Phase

STATE_FILE = "state.json"
"""In the state directory; the service's own file."""
RETRY = signal.SIGUSR1
"""What the service takes for being asked."""
_WAITS = frozenset({Phase.HELD, Phase.FAILED})


class _RefusedError(Exception):
    """There is nothing to retry; the message says why."""


def retry(state_dir: Path) -> int:
    """Signal the service whose state is kept in `state_dir`; return 0, or 1 where it does not wait for a start."""
    try:
        print(_ask(state_dir))
    except _RefusedError as error:
        print(f"aerie: {error}", file=sys.stderr)
        return 1
    return 0


def _ask(state_dir: Path) -> str:
    path = state_dir / STATE_FILE
    state = _read(path)
    pid, phase = state["supervisor"]["pid"], state["phase"]
    if not _is_service(pid):
        raise _RefusedError(f"no `aerie serve` runs here: {path} names pid {pid}, which is none; start the container")
    try:
        os.kill(pid, RETRY)  # the file may be old, as on a full disk; where nothing waits for a start it does nothing
    except PermissionError:
        raise _RefusedError(f"may not signal `aerie serve` (pid {pid}): run this as its user") from None
    if phase not in _WAITS:
        raise _RefusedError(f"nothing to retry: the service is {phase}, as {path} has it; asked all the same")
    return f"asked for the next start; the service was {phase}: {state['reason']}"


def _read(path: Path) -> dict[str, Any]:
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
        state["supervisor"]["pid"], state["phase"], state["reason"]
    except OSError as error:
        raise _RefusedError(f"no service keeps its state here: {path}: {error.strerror}; see --state-dir") from None
    except (LookupError, TypeError, ValueError):
        raise _RefusedError(f"{path} is not the state of this version of Aerie") from None
    return dict(state)


def _is_service(pid: object) -> bool:
    """Return whether `pid` is an `aerie serve`: a number may have been given to another process since."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return False
    # `python /opt/venv/bin/aerie serve ...` or `python -m aerie.cli serve ...`
    before = words[: words.index("serve")] if "serve" in words else []
    return any(word.rpartition("/")[2] in {"aerie", "aerie.cli"} for word in before)
