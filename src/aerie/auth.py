"""API keys: the key file, and the ASGI middleware that asks for one of its keys inside vLLM's API server.

vLLM's own `--api-key` shows in `ps` and guards only some prefixes; this guards everything but what is listed here.
"""

import hmac
import json
import os
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

KEYS_FILE_VARIABLE = "AERIE_API_KEYS_FILE"  # names the file; a key itself never stands in an environment
OPEN_PATHS = frozenset({"/health", "/metrics"})

_Message = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[_Message]]
_Send = Callable[[_Message], Awaitable[None]]
_App = Callable[[_Message, _Receive, _Send], Awaitable[None]]


def read_keys(path: Path) -> list[str]:
    """Return the keys of a key file: one a line, blank lines and lines that begin with # aside.

    Raises OSError where the file cannot be read, ValueError where it is not UTF-8.
    """
    lines = (line.strip() for line in path.read_text(encoding="utf-8").splitlines())
    return [line for line in lines if line and not line.startswith("#")]


class KeyFile:
    """The keys of a file, read anew whenever the file is another or changed: rotating a key needs no restart."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._version: tuple[int, int, int] | None = None
        self._keys: list[bytes] = []

    def holds(self, candidate: bytes) -> bool:
        """Return whether `candidate` is a key, comparing with each in constant time; a lost file holds none."""
        known = False
        for key in self._current():
            known |= hmac.compare_digest(key, candidate)
        return known

    def _current(self) -> list[bytes]:
        try:
            status = self._path.stat()
            version = (status.st_ino, status.st_mtime_ns, status.st_size)
            if version != self._version:
                self._keys = [key.encode() for key in read_keys(self._path)]
                self._version = version
        except (OSError, ValueError):
            self._version, self._keys = None, []
        return self._keys


class ApiKeyMiddleware:
    """Lets a request pass that carries `Authorization: Bearer <key>`, WebSockets too.

    Open without a key: GET of `OPEN_PATHS`, and a browser's CORS preflight, which cannot carry one.
    """

    def __init__(self, app: _App) -> None:
        self._app = app
        self._keys = KeyFile(Path(os.environ[KEYS_FILE_VARIABLE]))

    async def __call__(self, scope: _Message, receive: _Receive, send: _Send) -> None:
        """Serve one ASGI connection."""
        if scope["type"] not in {"http", "websocket"} or _is_open(scope) or self._keys.holds(_bearer(scope)):
            await self._app(scope, receive, send)
        else:
            await _refuse(scope, send)


def _headers(scope: _Message) -> dict[bytes, bytes]:
    return {name.lower(): value for name, value in scope["headers"]}


def _is_open(scope: _Message) -> bool:
    if scope["type"] != "http":
        return False
    if scope["method"] == "OPTIONS":
        headers = _headers(scope)
        return b"origin" in headers and b"access-control-request-method" in headers
    return scope["method"] == "GET" and scope["path"] in OPEN_PATHS


def _bearer(scope: _Message) -> bytes:
    scheme, _, token = _headers(scope).get(b"authorization", b"").partition(b" ")
    return token.strip() if scheme.lower() == b"bearer" else b""


async def _refuse(scope: _Message, send: _Send) -> None:
    """Answer 401 in the form of OpenAI's API errors."""
    error = {
        "message": "No valid API key was given. Send one as `Authorization: Bearer <key>`.",
        "type": "invalid_request_error",
        "param": None,
        "code": "invalid_api_key",
    }
    body = json.dumps({"error": error}).encode()
    # The extension by which an ASGI server lets a handshake be refused with a response of our own.
    prefix = "websocket.http.response" if scope["type"] == "websocket" else "http.response"
    if scope["type"] == "websocket" and "websocket.http.response" not in scope.get("extensions", {}):
        await send({"type": "websocket.close", "code": 1008})
        return
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"www-authenticate", b"Bearer"),
    ]
    await send({"type": f"{prefix}.start", "status": 401, "headers": headers})
    await send({"type": f"{prefix}.body", "body": body})
