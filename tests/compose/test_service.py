"""`docker compose up` without Ansible, on a clone's CPU files and with the built image."""

from __future__ import annotations

import json
import re
import secrets
import subprocess
import time
from typing import TYPE_CHECKING, Any

import httpx

from .conftest import FILES, Project

if TYPE_CHECKING:
    from collections.abc import Callable

API, STATUS = "http://127.0.0.1:18210", "http://127.0.0.1:18211"
IMAGE_USER = "10001:10001"
READY_SECONDS = 900
"""Generous: how long a start takes is measured elsewhere."""


def get(url: str, *, key: str | None = None, body: dict[str, Any] | None = None) -> tuple[int, Any]:
    """Status and JSON of an answer; 0 where nothing listens."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        with httpx.Client(headers=headers, timeout=60, trust_env=False) as client:
            answer = client.get(url) if body is None else client.post(url, json=body)
    except httpx.TransportError:
        return 0, None
    return answer.status_code, answer.json() if answer.content else None


def wait_for(condition: Callable[[], bool], what: str, limit: float) -> None:
    deadline = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < deadline, f"waited {limit:.0f} s for {what}"
        time.sleep(0.5)


def write_keys(project: Project, image: str, *keys: str) -> None:
    """As secrets/README.md says, with Docker in the place of sudo."""
    script = (
        "cat >/secrets/.new && chown %s /secrets/.new && chmod 0400 /secrets/.new && mv /secrets/.new /secrets/api-keys"
    )
    subprocess.run(
        ["docker", "run", "--rm", "--interactive", "--user", "0", "--network", "none", "--entrypoint", "sh",
         "--volume", f"{project.directory / 'secrets'}:/secrets", image, "-c", script % IMAGE_USER],
        input="".join(f"{key}\n" for key in keys), text=True, check=True,
    )  # fmt: skip


def test_from_a_clone_to_an_answer(project: Project, image: str) -> None:
    """One long story, since a start costs half a minute: no key, a key, an answer, another key, the end."""
    variables = {
        "COMPOSE_FILE": FILES["cpu"], "AERIE_IMAGE": image, "AERIE_API_PORT": "18210", "AERIE_STATUS_PORT": "18211",
    }  # fmt: skip
    (project.directory / ".env").write_text("".join(f"{name}={value}\n" for name, value in variables.items()))

    def compose(*arguments: str) -> str:
        done = project.compose(*arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def inspected() -> dict[str, Any]:
        identifier = compose("ps", "--all", "--quiet", "vllm").strip()
        shown = subprocess.run(["docker", "inspect", identifier], check=True, capture_output=True, text=True)
        container: dict[str, Any] = json.loads(shown.stdout)[0]
        return container

    # No key: the container stays, and says in one line what is missing and what to do.
    compose("up", "--detach", "--no-build")
    wait_for(lambda: (get(f"{STATUS}/status")[1] or {}).get("phase") == "held", "phase held", 60)
    assert get(f"{STATUS}/ready")[0] == 503
    reason = get(f"{STATUS}/status")[1]["reason"]
    assert "/etc/aerie/secrets/api-keys" in reason
    assert "put a key there" in reason
    assert "\n" not in reason
    assert "Traceback" not in compose("logs", "--no-log-prefix", "vllm")
    assert inspected()["RestartCount"] == 0

    # A key and a restart: ready, and healthy for Docker too.
    first, second = (secrets.token_urlsafe(32) for _ in range(2))
    write_keys(project, image, first)
    compose("restart", "vllm")
    wait_for(lambda: get(f"{STATUS}/ready")[0] == 200, "ready", READY_SECONDS)
    wait_for(lambda: inspected()["State"]["Health"]["Status"] == "healthy", "healthy", 30)

    # An answer with the key, none without.
    assert get(f"{API}/v1/models")[0] == 401
    model = get(f"{API}/v1/models", key=first)[1]["data"][0]["id"]
    body = {"model": model, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 16, "temperature": 0}
    status, answer = get(f"{API}/v1/chat/completions", key=first, body=body)
    assert status == 200, answer
    assert answer["usage"]["completion_tokens"] > 0

    # Another key beside it, then in its place; nothing is restarted.
    started = inspected()["State"]["StartedAt"]
    write_keys(project, image, first, second)
    assert [get(f"{API}/v1/models", key=key)[0] for key in (first, second)] == [200, 200]
    write_keys(project, image, second)
    assert [get(f"{API}/v1/models", key=key)[0] for key in (first, second)] == [401, 200]
    assert inspected()["State"]["StartedAt"] == started

    # The keys stand nowhere but in their file.
    written = [json.dumps(inspected()), compose("logs", "vllm"), compose("top"), json.dumps(get(f"{STATUS}/status")[1])]
    written.append(compose("exec", "-T", "vllm", "cat", "/var/lib/aerie/state.json"))
    assert not [text for text in written for key in (first, second) if key in text]

    # What the files promise, as the kernel has it.
    status_file = compose("exec", "-T", "vllm", "cat", "/proc/1/status")
    assert re.search(r"^Uid:\s+10001\s", status_file, flags=re.MULTILINE)
    assert re.search(r"^CapEff:\s+0+$", status_file, flags=re.MULTILINE)
    assert re.search(r"^NoNewPrivs:\s+1$", status_file, flags=re.MULTILINE)
    refused = project.compose("exec", "-T", "vllm", "sh", "-c", "touch /new || touch /etc/aerie/secrets/new")
    assert refused.returncode != 0
    assert "Read-only file system" in refused.stderr

    # A drained end, not Docker's SIGKILL.
    began = time.monotonic()
    compose("stop", "vllm")
    assert inspected()["State"]["ExitCode"] == 0
    assert time.monotonic() - began < 110


def test_a_changed_configuration_digest_makes_another_container(project: Project, image: str) -> None:
    variables = {
        "COMPOSE_FILE": FILES["cpu"], "AERIE_IMAGE": image, "AERIE_API_PORT": "18210", "AERIE_STATUS_PORT": "18211",
    }  # fmt: skip

    def container(digest: str) -> str:
        done = project.compose("create", "--no-build", **variables, AERIE_CONFIG_DIGEST=digest)
        assert done.returncode == 0, done.stderr
        return project.compose("ps", "--all", "--quiet", **variables).stdout.strip()

    first = container("one")
    assert container("one") == first
    assert container("two") != first
