"""The supervisor outlives the engine: a killed process is seen, told and mended, in the same container."""

from __future__ import annotations

import time

import httpx
import pytest

from conftest import Service

# How an engine's processes are known by their command lines inside the container.
API_SERVER = r"vllm serve"
ENGINE_CORE = r"VLLM::EngineCore"


def pid_of(service: Service, pattern: str) -> str:
    """The process whose command line matches, by /proc: the image has no ps."""
    script = f"for p in /proc/[0-9]*; do tr '\\0' ' ' < $p/cmdline 2>/dev/null | grep -qE '{pattern}' && echo ${{p#/proc/}}; done"
    pids = service.compose("exec", "-T", "vllm", "sh", "-c", script, check=False).stdout.split()
    # The probing shell's own command line matches too, and so does PID 1, which was given the engine's arguments.
    found = [pid for pid in pids if pid != "1"]
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
    reason = running.ready().json()["reason"]
    assert reason
    assert reason in httpx.get(f"{running.status}/", trust_env=False).text

    waited = running.compose("exec", "-T", "vllm", "aerie", "wait", check=False)
    assert waited.returncode == 0, waited.stdout + waited.stderr
    assert running.chat("What is Aerie?", max_tokens=8)["choices"][0]["message"]["content"]
    assert running.container()["RestartCount"] == restarts
    assert running.container()["State"]["StartedAt"] == started
