"""Compose projects made from a copy of the repository's files, as after a fresh clone."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

REPOSITORY = Path(__file__).resolve().parents[2]
FILES = {"gpu": "compose.yaml", "cpu": "compose.yaml:compose.cpu.yaml"}
"""COMPOSE_FILE for each combination of files that is meant to be used."""


@dataclass(frozen=True)
class Project:
    """A clone's compose files in a directory of their own, under a project name of their own."""

    directory: Path
    name: str

    def compose(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run `docker compose` with these variables and nothing of the caller's environment that could matter."""
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("AERIE_", "COMPOSE_"))}
        return subprocess.run(
            ["docker", "compose", *arguments],
            cwd=self.directory, env={**kept, "COMPOSE_PROJECT_NAME": self.name, **variables},
            text=True, capture_output=True, check=False, timeout=300,
        )  # fmt: skip

    def service(self, combination: str, **variables: str) -> dict[str, Any]:
        """The service as compose understands it."""
        variables = {"AERIE_IMAGE": "aerie:any", "COMPOSE_FILE": FILES[combination], **variables}
        done = self.compose("config", "--format", "json", **variables)
        assert done.returncode == 0, done.stderr
        service: dict[str, Any] = json.loads(done.stdout)["services"]["vllm"]
        return service


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Project]:
    """A fresh clone, whose containers, network and volumes are removed in the end."""
    directory = tmp_path / "clone"
    for name in ("compose.yaml", "compose.cpu.yaml", ".env.example", "secrets/README.md", "kernel-log/README.md"):
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / name, directory / name)
    shutil.copytree(REPOSITORY / "config", directory / "config")
    clone = Project(directory, f"aerie-test-{uuid.uuid4().hex[:8]}")
    yield clone
    for combination in FILES.values():
        clone.compose("down", "--volumes", "--timeout", "20", COMPOSE_FILE=combination, AERIE_IMAGE="any")
