"""The middleware as an ASGI server calls it."""

import asyncio
import json
import os

import pytest

from aerie.auth import KEYS_FILE_VARIABLE, ApiKeyMiddleware, read_keys

PREFLIGHT = {"origin": "https://site", "access-control-request-method": "POST"}


@pytest.fixture
def keys_file(tmp_path, monkeypatch):
    path = tmp_path / "api-keys"
    path.write_text("# two, while one is replaced\nfirst-key\n\n  second-key  \n")
    monkeypatch.setenv(KEYS_FILE_VARIABLE, str(path))
    return path


def call(middleware_of, method="GET", path="/v1/models", headers=None, kind="http", extensions=()):
    """Return ("passed", None) where the request reached the app, else the messages that were sent."""
    sent = []
    reached = []

    async def app(scope, _receive, _send):
        reached.append(scope)

    async def send(message):
        sent.append(message)

    scope = {
        "type": kind,
        "path": path,
        "headers": [(name.encode(), value.encode("latin-1")) for name, value in (headers or {}).items()],
        "extensions": {name: {} for name in extensions},
    }
    if kind == "http":
        scope["method"] = method
    asyncio.run(middleware_of(app)(scope, None, send))
    return "passed" if reached else sent


def bearer(key):
    return {"authorization": f"Bearer {key}"}


@pytest.mark.parametrize("key", ["first-key", "second-key"])
def test_any_key_of_the_file_passes(keys_file, key):
    assert call(ApiKeyMiddleware, headers=bearer(key)) == "passed"
    assert call(ApiKeyMiddleware, headers={"authorization": f"bearer {key}"}) == "passed"


@pytest.mark.parametrize(
    "headers",
    [
        {},
        bearer("wrong"),
        bearer(""),
        bearer("first-key second-key"),
        bearer("# two, while one is replaced"),
        bearer("f\xfcr"),
        {"authorization": "first-key"},
        {"authorization": "Basic first-key"},
        {"x-api-key": "first-key"},
    ],
)
def test_anything_else_is_refused_as_openai_refuses(keys_file, headers):
    start, body = call(ApiKeyMiddleware, headers=headers)
    assert start["status"] == 401
    assert dict(start["headers"])[b"www-authenticate"] == b"Bearer"
    assert int(dict(start["headers"])[b"content-length"]) == len(body["body"])
    assert json.loads(body["body"])["error"]["code"] == "invalid_api_key"


@pytest.mark.parametrize("path", ["/health", "/metrics"])
def test_monitoring_needs_no_key(keys_file, path):
    assert call(ApiKeyMiddleware, path=path) == "passed"


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/health"),
        ("GET", "/health/"),
        ("GET", "/metrics/x"),
        ("GET", "/metricsx"),
        ("GET", "//health"),
        ("GET", "/docs"),
        ("GET", "/openapi.json"),
        ("GET", "/load"),
        ("POST", "/tokenize"),
        ("POST", "/v1/chat/completions"),
        ("OPTIONS", "/v1/models"),
        ("HEAD", "/v1/models"),
    ],
)
def test_every_other_route_needs_one(keys_file, method, path):
    assert call(ApiKeyMiddleware, method=method, path=path) != "passed"


def test_a_browsers_preflight_cannot_carry_a_key(keys_file):
    assert call(ApiKeyMiddleware, method="OPTIONS", headers=PREFLIGHT) == "passed"
    assert call(ApiKeyMiddleware, method="POST", headers=PREFLIGHT) != "passed"


def test_websockets_need_a_key_and_are_refused_in_the_handshake(keys_file):
    assert call(ApiKeyMiddleware, kind="websocket", path="/v1/realtime", headers=bearer("first-key")) == "passed"
    assert call(ApiKeyMiddleware, kind="websocket", path="/health") == [{"type": "websocket.close", "code": 1008}]
    start, _ = call(ApiKeyMiddleware, kind="websocket", extensions=["websocket.http.response"])
    assert (start["type"], start["status"]) == ("websocket.http.response.start", 401)


def test_the_servers_own_messages_pass(keys_file):
    assert call(ApiKeyMiddleware, kind="lifespan") == "passed"


def middleware_once(app):
    """Return one middleware that later calls share, as in a server."""
    middleware_once.made = middleware_once.made or ApiKeyMiddleware(app)
    middleware_once.made._app = app
    return middleware_once.made


def test_a_key_is_rotated_without_a_restart(keys_file):
    middleware_once.made = None
    assert call(middleware_once, headers=bearer("first-key")) == "passed"
    replacement = keys_file.with_suffix(".new")
    replacement.write_text("third-key\n")
    replacement.replace(keys_file)
    assert call(middleware_once, headers=bearer("first-key")) != "passed"
    assert call(middleware_once, headers=bearer("third-key")) == "passed"


def test_a_lost_or_unreadable_file_lets_nobody_in_until_it_is_back(keys_file):
    middleware_once.made = None
    assert call(middleware_once, headers=bearer("first-key")) == "passed"
    content = keys_file.read_bytes()
    keys_file.unlink()
    assert call(middleware_once, headers=bearer("first-key")) != "passed"
    keys_file.write_bytes(b"\xff\xfe")
    assert call(middleware_once, headers=bearer("first-key")) != "passed"
    keys_file.write_bytes(content)
    os.utime(keys_file, (0, 0))
    assert call(middleware_once, headers=bearer("first-key")) == "passed"


def test_comments_and_blank_lines_are_no_keys(keys_file):
    assert read_keys(keys_file) == ["first-key", "second-key"]
