"""Reads the service's state, `/status` of its status port, and says plainly what is wrong where there is none."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aerie.gate.http import UnreachableError, request

SCHEMA = 2  # of the state that this package reads
_TIMEOUT = 4.0  # seconds; the status port answers from memory

State = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class NoState:
    """No state was to be had, for the reason `why`; `final` where asking again cannot help."""

    why: str
    final: bool = False


def read_state(url: str) -> State | NoState:
    """Return the state of the service whose status port is at `url`."""
    try:
        _status, text = request(f"{url}/status", _TIMEOUT)
    except UnreachableError as error:
        return NoState(f"no answer from {error}")
    try:
        state = json.loads(text)
        schema, _phase = state["schema"], state["phase"]
    except (LookupError, TypeError, ValueError):
        return NoState(
            f"what answers at {url} is not Aerie's status port (8001 unless AERIE_STATUS_PORT says otherwise)"
        )
    if schema != SCHEMA:
        aerie = state.get("versions", {}).get("aerie", "of another version")
        return NoState(
            f"the service at {url} tells its state in schema {schema} (aerie {aerie}), and this aerie reads {SCHEMA}: "
            "use the `aerie` of the service's own image, or recreate the container with the newer image",
            final=True,
        )
    return dict(state)
