"""One HTTP request without a proxy or a dependency; http.client alone imports in a few milliseconds."""

import json
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit


class UnreachableError(Exception):
    """Nothing that speaks HTTP answered."""


def request(url: str, timeout: float, headers: dict[str, str] | None = None, body: Any = None) -> tuple[int, str]:
    """Return (status, text) of a GET, or of a POST of `body` as JSON; `timeout` in seconds.

    Raises UnreachableError where no HTTP comes back.
    """
    parts = urlsplit(url)
    make = HTTPSConnection if parts.scheme == "https" else HTTPConnection
    connection = make(parts.hostname or "", parts.port, timeout=timeout)
    try:
        if body is None:
            connection.request("GET", parts.path or "/", headers=headers or {})
        else:
            sent = {"Content-Type": "application/json", **(headers or {})}
            connection.request("POST", parts.path, json.dumps(body).encode(), sent)
        response = connection.getresponse()
        return response.status, response.read().decode(errors="replace")
    except (OSError, HTTPException) as error:
        raise UnreachableError(
            f"{parts.hostname}:{parts.port or parts.scheme}: {error or type(error).__name__}"
        ) from None
    finally:
        connection.close()
