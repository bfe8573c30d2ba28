"""What a client sees of the service that `./run up` started."""

from __future__ import annotations

import base64
import json
import struct
import zlib
from typing import TYPE_CHECKING

import httpx
import pytest

from aerie.checkpoint.tiny.script import Picture, expected_answer

if TYPE_CHECKING:
    from service import Service

QUESTION = "What is Aerie?"
ENOUGH = 128  # tokens, more than the longest answer

# Routes that answer without a key, and why: liveness has to be readable by anything on the host, and so have counters.
OPEN_ROUTES = {"/health", "/metrics"}


def png(width: int, height: int, colour: tuple[int, int, int]) -> str:
    """A `data:` URL of a one-coloured PNG image."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    rows = (b"\0" + bytes(colour) * width) * height
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return "data:image/png;base64," + base64.b64encode(data).decode()


def test_chat_gives_the_expected_text(running: Service) -> None:
    choice = running.chat(QUESTION, max_tokens=ENOUGH)["choices"][0]
    assert choice["message"]["content"] == expected_answer()
    assert choice["finish_reason"] == "stop"


def test_streaming_gives_the_same_text_in_pieces(running: Service) -> None:
    whole = running.chat(QUESTION, max_tokens=ENOUGH)["choices"][0]["message"]["content"]
    with running.client() as client:
        model = client.get("/v1/models").json()["data"][0]["id"]
        body = {"model": model, "messages": [{"role": "user", "content": QUESTION}],
                "temperature": 0, "max_tokens": ENOUGH, "stream": True}  # fmt: skip
        with client.stream("POST", "/v1/chat/completions", json=body) as answer:
            lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    choices = [choice for line in lines[:-1] for choice in json.loads(line)["choices"]]
    pieces = [choice["delta"].get("content") or "" for choice in choices]
    assert "".join(pieces) == whole
    assert sum(1 for piece in pieces if piece) > 1


@pytest.mark.parametrize(("picture", "grey"), [("bright", 255), ("dark", 0)])
def test_an_image_is_seen(running: Service, picture: Picture, grey: int) -> None:
    text = {"type": "text", "text": QUESTION}
    image = {"type": "image_url", "image_url": {"url": png(56, 56, (grey, grey, grey))}}
    without = running.chat([text], max_tokens=ENOUGH)["usage"]["prompt_tokens"]
    answer = running.chat([image, text], max_tokens=ENOUGH)
    # 56 x 56 pixels are 4 x 4 patches of 14, merged two by two: 4 tokens, beside those that mark the image.
    assert answer["usage"]["prompt_tokens"] >= without + 4
    assert answer["choices"][0]["message"]["content"] == expected_answer(picture)


def test_the_engine_fetches_no_url(running: Service) -> None:
    image = {"type": "image_url", "image_url": {"url": "http://127.0.0.1:8001/status"}}
    with running.client() as client:
        model = client.get("/v1/models").json()["data"][0]["id"]
        answer = client.post("/v1/chat/completions",
                             json={"model": model, "messages": [{"role": "user", "content": [image]}]})  # fmt: skip
    assert answer.status_code == httpx.codes.BAD_REQUEST
    assert "allowed" in answer.text


def test_drafts_are_made_and_some_are_accepted(running: Service) -> None:
    before = running.speculation()
    running.chat(QUESTION, max_tokens=ENOUGH)
    grown = {name: value - before[name] for name, value in running.speculation().items()}
    assert grown["drafts"] > 0
    # Some drafts are wrong on purpose, so that the rejection path runs too.
    assert 0 < grown["accepted_tokens"] < grown["draft_tokens"]


def test_every_route_but_the_open_ones_needs_a_key(running: Service) -> None:
    with running.client() as client:
        schema = client.get("/openapi.json").raise_for_status().json()
    assert len(schema["paths"]) > 20  # the list is the engine's own, not an empty one
    answered_without = set()
    with running.client(key=False) as client:
        for path, methods in schema["paths"].items():
            for method in methods:
                if client.request(method.upper(), path).status_code != httpx.codes.UNAUTHORIZED:
                    answered_without.add(path)
        for path in ("/", "/docs", "/redoc", "/openapi.json", "/nowhere", "//v1/models", "/v1/../v1/models"):
            assert client.get(path).status_code == httpx.codes.UNAUTHORIZED, path
        assert client.get("/metrics").status_code == httpx.codes.OK
    assert answered_without <= OPEN_ROUTES


def test_a_prompt_as_long_as_the_model_takes_is_answered(running: Service) -> None:
    """The CPU takes a prompt whole, so a step that is smaller than the longest would let it wait for ever."""
    with running.client(timeout=180) as client:
        model = client.get("/v1/models").json()["data"][0]
        prompt = [100 + number % 100 for number in range(model["max_model_len"] - 2)]
        body = {"model": model["id"], "prompt": prompt, "max_tokens": 1}
        answer = client.post("/v1/completions", json=body).raise_for_status().json()
    assert answer["usage"]["prompt_tokens"] == len(prompt)


@pytest.mark.parametrize("header", ["Bearer wrong", "Bearer", "Basic {key}", "{key}"])
def test_a_wrong_key_is_refused(running: Service, header: str) -> None:
    with running.client(key=False) as client:
        answer = client.get("/v1/models", headers={"Authorization": header.format(key=running.key)})
    assert answer.status_code == httpx.codes.UNAUTHORIZED


def test_the_key_stands_nowhere(running: Service) -> None:
    """Neither in what Docker shows, nor in the processes' arguments, the log, the state or the page."""
    places = {
        "inspect": json.dumps(running.container()),
        "log": running.compose("logs", "--no-color").stdout,
        "arguments": running.compose(
            "exec", "-T", "vllm", "sh", "-c", "cat /proc/[0-9]*/cmdline | tr '\\0' ' '"
        ).stdout,
        "state": httpx.get(f"{running.status}/status", trust_env=False).text,
        "page": httpx.get(f"{running.status}/", trust_env=False).text,
        "metrics": httpx.get(f"{running.status}/metrics", trust_env=False).text,
    }
    assert all(places.values())
    assert [name for name, text in places.items() if running.key in text] == []


def test_the_ports_are_on_loopback_only(running: Service) -> None:
    bindings = running.container()["HostConfig"]["PortBindings"]
    assert set(bindings) == {"8000/tcp", "8001/tcp"}
    assert {binding["HostIp"] for entries in bindings.values() for binding in entries} == {"127.0.0.1"}
