"""The status port over real HTTP."""

import asyncio
import json
import socket
from contextlib import asynccontextmanager

import aiohttp
import pytest
from states import Examples

from aerie.status import serve_status

ROUTES = ["/", "/status", "/ready", "/metrics", "/nothing"]


@asynccontextmanager
async def serving(state, host="127.0.0.1"):
    """Serve `state` and yield a client of it."""
    runner = await serve_status(host, 0, lambda: state)
    port = runner.addresses[0][1]
    try:
        async with aiohttp.ClientSession(f"http://{f'[{host}]' if ':' in host else host}:{port}") as client:
            yield client
    finally:
        await runner.cleanup()


def ask(state, path, method="GET", host="127.0.0.1"):
    """Return status, headers and text of one answer."""

    async def asked():
        async with serving(state, host) as client, client.request(method, path) as answer:
            return answer.status, answer.headers, await answer.text()

    return asyncio.run(asked())


def test_the_state_is_told_as_it_is():
    async def asked():
        async with serving(state) as client, client.get("/status") as answer:
            return await answer.json()

    state = Examples().loading()
    assert asyncio.run(asked()) == json.loads(json.dumps(state))


def test_ready_is_an_answer_of_its_own():
    assert ask(Examples().ready(), "/ready")[::2] == (200, '{"ready": true}')
    status, _headers, text = ask(Examples().failed(), "/ready")
    assert status == 503
    assert "index 7168 is out of bounds" in text


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/", "text/html; charset=utf-8"),
        ("/status", "application/json; charset=utf-8"),
        ("/metrics", "text/plain; version="),
    ],
)
def test_each_form_has_its_type(path, kind):
    status, headers, text = ask(Examples().loading(), path)
    assert status == 200
    assert headers["Content-Type"].startswith(kind)
    assert text


def test_the_page_names_the_container_that_it_comes_from(monkeypatch):
    monkeypatch.setattr("aerie.status.server.this_container", lambda: "3f2a9c1b7d20")
    assert "<code>docker exec 3f2a9c1b7d20 aerie retry</code>" in ask(Examples().held(), "/")[2]


@pytest.mark.parametrize("path", ROUTES)
def test_every_answer_is_guarded(path):
    _status, headers, _text = ask(Examples().loading(), path)
    policy = dict(part.split(" ", 1) for part in headers["Content-Security-Policy"].split("; "))
    assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == "'none'"
    assert "unsafe" not in headers["Content-Security-Policy"]
    assert headers["X-Frame-Options"] == "DENY"
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Cache-Control"] == "no-store"
    assert headers["Referrer-Policy"] == "no-referrer"
    assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
    assert "Server" not in headers
    assert "Access-Control-Allow-Origin" not in headers


def test_an_unknown_path_is_not_found():
    assert ask(Examples().ready(), "/nothing")[0] == 404
    assert ask(Examples().ready(), "/../etc/passwd")[0] == 404


@pytest.mark.parametrize("path", ROUTES[:-1])
def test_head_answers_as_get_does_without_a_body(path):
    full, head = ask(Examples().loading(), path), ask(Examples().loading(), path, "HEAD")
    assert head[0] == full[0]
    assert head[1]["Content-Type"] == full[1]["Content-Type"]
    assert head[2] == ""


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE"])
def test_nothing_can_be_changed(method):
    status, headers, _text = ask(Examples().ready(), "/status", method)
    assert status == 405
    assert set(headers["Allow"].split(",")) == {"GET", "HEAD"}


def test_ipv6():
    assert ask(Examples().ready(), "/ready", host="::1")[0] == 200


def test_a_port_that_is_taken_is_an_error():
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(OSError, match="address already in use"):
        asyncio.run(serve_status("127.0.0.1", taken.getsockname()[1], dict))
