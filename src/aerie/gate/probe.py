"""`aerie probe`: the container's health check."""

import json

from aerie.gate.http import UnreachableError, request

_TIMEOUT = 4.0  # seconds; the status server answers from memory


def probe(url: str) -> int:
    """Print one line and return 0 where the service at `url` is ready, 1 where not or where nothing answers."""
    try:
        status, text = request(f"{url}/ready", _TIMEOUT)
        answer = json.loads(text)
    except UnreachableError as error:
        print(f"no answer: {error}")
        return 1
    except ValueError:
        print(f"no status of Aerie at {url}: answered {status}")
        return 1
    print("ready" if answer["ready"] else ": ".join(filter(None, (answer["phase"], answer["reason"]))))
    return 0 if answer["ready"] else 1
