"""A Hub with a target of three revisions and a gated drafter, on port 8099 of loopback: tests/hub_server.py, filled.

usage: hub.py [--print], which prints the revisions as JSON and serves nothing
"""

from __future__ import annotations

import json
import random
import sys
import threading

from hub_server import Hub

PORT = 8099
TOKEN = "hf_a-token-that-nobody-may-see"  # noqa: S105 - opens nothing
SEGMENT = 64 * 2**20
_HEADER = 128
LARGE = SEGMENT + 6 * 2**20
"""Bytes of the weights: two segments, of which the second is short."""


def safetensors(size: int, seed: int) -> bytes:
    """Return a file of so many bytes with one tensor."""
    data = size - 8 - _HEADER
    header = json.dumps({"weight": {"dtype": "U8", "shape": [data], "data_offsets": [0, data]}}).encode()
    return _HEADER.to_bytes(8, "little") + header.ljust(_HEADER) + random.Random(seed).randbytes(data)  # noqa: S311 - the same each time


def fill(hub: Hub) -> dict[str, str]:
    """Add the repositories; return the revisions by name."""
    target, drafter = hub.repository("aerie-test/target"), hub.repository("aerie-test/drafter")
    weights = safetensors(LARGE, 1)
    revisions = {
        # The second has its weights from the first.
        "first": target.commit({"config.json": b'{"version": 1}\n', "model.safetensors": weights}),
        "second": target.commit({"config.json": b'{"version": 2}\n', "model.safetensors": weights}),
        "third": target.commit({"config.json": b'{"version": 3}\n', "model.safetensors": safetensors(2**20, 3)}),
        "drafter": drafter.commit({"config.json": b"{}\n", "code.py": b"", "model.safetensors": safetensors(2**20, 4)}),
    }
    drafter.gated = True
    hub.token = TOKEN
    return revisions


def main() -> None:
    """Print or serve."""
    with Hub(port=PORT if "--print" not in sys.argv else 0) as hub:
        revisions = fill(hub)
        if "--print" in sys.argv:
            print(json.dumps(revisions))
        else:
            threading.Event().wait()


if __name__ == "__main__":
    main()
