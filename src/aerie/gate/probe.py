"""`aerie probe`: the container's health check."""

import json

from aerie.gate.http import UnreachableError, request

_TIMEOUT = 4.0  # seconds; the status server answers from memory


def probe(url: str) -> int:
    """Print one line and return 0 where the service at `url` is ready, 1 where not or where nothing answers."""
    try:
        _status, text = request(f"{url}/ready", _TIMEOUT)
        answer = json.loads(text)
        ready = answer["ready"]
        print("ready" if ready else ": ".join(filter(None, (answer["phase"], answer["reason"]))))
    except UnreachableError as error:
        print(f"no answer: {error}")
    except (LookupError, TypeError, ValueError):
        print(f"what answers at {url} is not Aerie's status")
    else:
        return 0 if ready else 1
    return 1
