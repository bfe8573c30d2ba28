"""A stopped process of the engine makes every request wait for ever, with `/health` at 200: found, named, mended."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING

import httpx
import pytest
from test_recovery import ENGINE_CORE, pid_of

if TYPE_CHECKING:
    from service import Service

WORKER = "VLLM::[W]orker"
FOUND_WITHIN = 180.0  # seconds


def status(service: Service) -> dict:
    return httpx.get(f"{service.status}/status", timeout=10, trust_env=False).json()


def ask_in_vain(service: Service) -> threading.Thread:
    """Begin a request that will never be answered, and return once the engine runs it."""

    def ask() -> None:
        with service.client(timeout=FOUND_WITHIN) as client:
            body = {"model": status(service)["model"], "prompt": "On and on", "max_tokens": 3000, "ignore_eos": True}
            with contextlib.suppress(httpx.HTTPError):  # its engine is ended
                client.post("/v1/completions", json=body)

    caller = threading.Thread(target=ask, daemon=True)
    caller.start()
    with service.client(key=False) as client:
        deadline = time.monotonic() + 30
        while not any(
            line.startswith("vllm:num_requests_running{") and not line.endswith(" 0.0")
            for line in client.get("/metrics").text.splitlines()
        ):
            assert time.monotonic() < deadline, "the request did not run within 30 s"
            time.sleep(0.2)
    return caller


@pytest.mark.parametrize(
    ("pattern", "busy"),
    [pytest.param(WORKER, True, id="serving"), pytest.param(ENGINE_CORE, False, id="idle", marks=pytest.mark.slow)],
)
def test_a_stopped_process_is_found_named_and_mended(running: Service, pattern: str, *, busy: bool) -> None:
    before = status(running)
    assert before["phase"] == "ready"
    victim = pid_of(running, pattern)
    caller = ask_in_vain(running) if busy else None
    running.compose("exec", "-T", "vllm", "sh", "-c", f"kill -STOP {victim}")

    stopped_at = time.monotonic()
    with running.client(key=False) as client:
        assert client.get("/health").status_code == httpx.codes.OK, "vLLM itself sees nothing wrong"
    while (now := status(running))["hangs"] == before["hangs"]:
        assert time.monotonic() - stopped_at < FOUND_WITHIN, f"not found in {FOUND_WITHIN:.0f} s: {now['phase']}"
        time.sleep(0.5)
    print(f"found after {time.monotonic() - stopped_at:.0f} s: {now['reason']}")
    assert running.ready().status_code == httpx.codes.SERVICE_UNAVAILABLE
    assert now["diagnosis"]["signature"] == "engine-hangs-process-stopped"
    assert "is stopped (state T)" in now["reason"]

    waited = running.compose("exec", "-T", "vllm", "aerie", "wait", check=False)
    assert waited.returncode == 0, waited.stdout + waited.stderr
    assert running.chat("What is Aerie?", max_tokens=8)["choices"][0]["message"]["content"]
    assert status(running)["engine"]["starts"] == before["engine"]["starts"] + 1
    if caller:
        caller.join(timeout=10)
        assert not caller.is_alive(), "the caller of the engine that hung still waits"
