"""The supervisor outlives the engine: a killed process is seen, told and mended, in the same container."""

from __future__ import annotations

import html
import time
from typing import TYPE_CHECKING

import httpx
import pytest

if TYPE_CHECKING:
    from service import Service

# How an engine's processes are known by their command lines; the brackets keep the searching shell from finding itself.
API_SERVER = "[v]llm serve"
ENGINE_CORE = "VLLM::[E]ngineCore"


def pid_of(service: Service, pattern: str) -> str:
    """The process whose command line matches, by /proc: the image has no ps."""
    matches = f"tr '\\0' ' ' < $p/cmdline 2>/dev/null | grep -qE '{pattern}'"
    script = f"for p in /proc/[0-9]*; do {matches} && echo ${{p#/proc/}}; done"
    found = service.compose("exec", "-T", "vllm", "sh", "-c", script, check=False).stdout.split()
    assert found, f"no process matches {pattern}"
    return found[0]


@pytest.mark.parametrize("pattern", [API_SERVER, ENGINE_CORE])
def test_a_killed_engine_is_told_and_serves_again(running: Service, pattern: str) -> None:
    assert running.ready().status_code == httpx.codes.OK
    restarts = running.container()["RestartCount"]
    started = running.container()["State"]["StartedAt"]
    victim = pid_of(running, pattern)
    running.compose("exec", "-T", "vllm", "sh", "-c", f"kill -KILL {victim}")

    killed_at = time.monotonic()
    while running.ready().status_code == httpx.codes.OK:
        assert time.monotonic() - killed_at < 5, "/ready stayed 200 for 5 s after SIGKILL"
        time.sleep(0.1)
    # The first words stay while the rest of the process tree ends.
    reason = running.ready().json()["reason"].split(";")[0]
    assert reason
    assert reason in html.unescape(httpx.get(f"{running.status}/", trust_env=False).text)

    # The pauses grow with each failure in a row, and other tests fail this service, too.
    while running.compose("exec", "-T", "vllm", "aerie", "retry", check=False).returncode:
        assert time.monotonic() - killed_at < 60, "nothing to retry 60 s after SIGKILL"
        time.sleep(0.5)
    waited = running.compose("exec", "-T", "vllm", "aerie", "wait", check=False)
    assert waited.returncode == 0, waited.stdout + waited.stderr
    assert running.chat("What is Aerie?", max_tokens=8)["choices"][0]["message"]["content"]
    assert running.container()["RestartCount"] == restarts
    assert running.container()["State"]["StartedAt"] == started
