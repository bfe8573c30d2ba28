"""A compose project as the tests see it, and further engines from the same image and files."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import yaml

if TYPE_CHECKING:
    from collections.abc import Iterator

REPOSITORY = Path(__file__).resolve().parents[2]
PROJECT_DIR = REPOSITORY / ".aerie"


def read_env(path: Path) -> dict[str, str]:
    """The `KEY=value` lines of a compose `.env` file."""
    lines = (line for line in path.read_text().splitlines() if "=" in line and not line.lstrip().startswith("#"))
    return {key: value.strip("'\"") for key, value in (line.split("=", 1) for line in lines)}


@dataclass(frozen=True)
class Service:
    """One compose project: how to call it and how to talk to the engine and the supervisor inside it."""

    project: str
    directory: Path
    api: str
    status: str
    key: str
    environment: dict[str, str]

    def compose(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run `docker compose` on this project."""
        done = subprocess.run(
            ["docker", "compose", "-p", self.project, *arguments],
            cwd=self.directory, env={**os.environ, **self.environment}, text=True, capture_output=True, check=False,
        )  # fmt: skip
        if check and done.returncode:
            pytest.fail(f"docker compose {' '.join(arguments)} exited {done.returncode}:\n{done.stdout}{done.stderr}")
        return done

    def container(self) -> dict[str, Any]:
        """`docker inspect` of the one container."""
        identifier = self.compose("ps", "--all", "--quiet", "vllm").stdout.strip()
        inspected: list[dict[str, Any]] = json.loads(
            subprocess.run(["docker", "inspect", identifier], text=True, capture_output=True, check=True).stdout
        )
        return inspected[0]

    def client(self, *, key: bool = True, timeout: float = 120) -> httpx.Client:
        """An HTTP client of the engine, with the key unless told otherwise."""
        headers = {"Authorization": f"Bearer {self.key}"} if key else {}
        return httpx.Client(base_url=self.api, headers=headers, timeout=timeout, trust_env=False)

    def chat(self, content: Any, **options: Any) -> dict[str, Any]:
        """One greedy chat completion."""
        with self.client() as client:
            model = client.get("/v1/models").raise_for_status().json()["data"][0]["id"]
            body = {"model": model, "messages": [{"role": "user", "content": content}], "temperature": 0, **options}
            answer = client.post("/v1/chat/completions", json=body)
            assert answer.status_code == httpx.codes.OK, answer.text
            completion: dict[str, Any] = answer.json()
            return completion

    def speculation(self) -> dict[str, float]:
        """The engine's speculation counters by their short name: drafts, draft_tokens, accepted_tokens."""
        with self.client(key=False) as client:
            text = client.get("/metrics").raise_for_status().text
        counters = {}
        for name in ("drafts", "draft_tokens", "accepted_tokens"):
            rows = [row for row in text.splitlines() if row.startswith(f"vllm:spec_decode_num_{name}_total{{")]
            counters[name] = sum(float(row.rsplit(" ", 1)[1]) for row in rows)
        return counters

    def ready(self) -> httpx.Response:
        """The supervisor's verdict."""
        return httpx.get(f"{self.status}/ready", timeout=10, trust_env=False)


def deployed() -> Service:
    """The service that `./run up` started; FileNotFoundError where none is set up."""
    env = read_env(PROJECT_DIR / ".env")
    return Service(
        project=env.get("COMPOSE_PROJECT_NAME", "aerie"),
        directory=PROJECT_DIR,
        api=f"http://127.0.0.1:{env['AERIE_API_PORT']}",
        status=f"http://127.0.0.1:{env['AERIE_STATUS_PORT']}",
        key=(PROJECT_DIR / "secrets" / "api-keys").read_text().split()[0],
        environment={},
    )


@contextlib.contextmanager
def engine(running: Service, folder: Path, overrides: dict[str, Any]) -> Iterator[Service]:
    """Run a second service of the same image and files, with its own ports and `overrides` in its configuration.

    An override of `None` takes the key out. These engines share a cache volume, which goes with the last of them.
    """
    base = yaml.safe_load((REPOSITORY / "config" / "tiny.yaml").read_text())
    config = {key: value for key, value in {**base, **overrides}.items() if value is not None}
    path = folder / "serve.yaml"
    path.write_text(yaml.safe_dump(config))
    settings = read_env(running.directory / ".env")
    second = Service(
        project="aerie-e2e",
        directory=running.directory,
        api="http://127.0.0.1:18000",
        status="http://127.0.0.1:18001",
        key=running.key,
        environment={**settings, "COMPOSE_PROJECT_NAME": "aerie-e2e", "AERIE_CONFIG": str(path),
                     "AERIE_API_PORT": "18000", "AERIE_STATUS_PORT": "18001"},
    )  # fmt: skip
    second.compose("up", "--detach", "--force-recreate", "--no-build")
    try:
        waited = second.compose("exec", "-T", "vllm", "aerie", "wait", check=False)
        if waited.returncode:
            log = second.compose("logs", "--no-color", "--tail", "60", check=False).stdout
            pytest.fail(f"the engine did not get ready: {waited.stdout}{waited.stderr}\n{log}")
        yield second
    finally:
        second.compose("down", "--timeout", "20")
