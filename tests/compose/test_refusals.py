"""What Docker says where a part is missing: real refusals, against the table that gives the remedies."""

from __future__ import annotations

import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from .conftest import FILES, REPOSITORY, Project

TABLE = REPOSITORY / "docs/troubleshooting.md"


def remedies() -> dict[str, str]:
    """The role's table: what is said -> what to do."""
    variables: dict[str, Any] = yaml.safe_load((REPOSITORY / "ansible/roles/vllm/vars/main.yml").read_text())
    return {row["says"]: row["remedy"] for row in variables["__vllm_start_remedies"]}


def refusal(project: Project, combination: str, image: str, **variables: str) -> str:
    """The one line with which `docker compose up` ends."""
    (project.directory / "models").mkdir(exist_ok=True)
    defaults = {"AERIE_MODELS_DIR": "./models", "AERIE_API_PORT": "18210", "AERIE_STATUS_PORT": "18211"}
    defaults |= {"COMPOSE_FILE": FILES[combination], "AERIE_IMAGE": image}
    done = project.compose("up", "--detach", "--no-build", **{**defaults, **variables})
    assert done.returncode != 0, done.stderr
    return done.stderr.strip().splitlines()[-1]


def daemon_may(limit: str) -> bool:
    """Whether Docker can give a container this --ulimit."""
    (image,) = subprocess.run(
        ["docker", "images", "--quiet", "--filter", "dangling=false"], check=True, capture_output=True, text=True
    ).stdout.split()[:1]
    started = subprocess.run(
        ["docker", "run", "--rm", "--ulimit", limit, "--entrypoint", "/bin/true", image],
        check=False,
        capture_output=True,
    )
    return started.returncode == 0


def test_document_and_role_say_the_same() -> None:
    rows = [line.strip("|").split(" | ") for line in TABLE.read_text().splitlines() if line.startswith("| `")]
    documented = {said.strip().strip("`"): remedy.strip() for said, remedy in rows}
    for said, remedy in remedies().items():
        assert documented.pop(said) == remedy
    assert set(documented) == {"required variable AERIE_IMAGE is missing a value"}


def test_missing_models_directory(project: Project, image: str) -> None:
    missing = project.directory / "nowhere"
    line = refusal(project, "gpu", image, AERIE_MODELS_DIR=str(missing))
    assert "bind source path does not exist" in line
    assert str(missing) in line
    # Docker's short syntax would have made an empty one.
    assert not missing.exists()
    assert "AERIE_MODELS_DIR" in remedies()["bind source path does not exist"]


@pytest.mark.parametrize("combination", FILES)
@pytest.mark.parametrize("variable", ["AERIE_CONFIG", "AERIE_SECRETS_DIR"])
def test_missing_mounts(project: Project, image: str, combination: str, variable: str) -> None:
    line = refusal(project, combination, image, **{variable: "./nowhere"})
    assert "bind source path does not exist" in line
    assert str(project.directory / "nowhere") in line
    assert not (project.directory / "nowhere").exists()
    assert variable in remedies()["bind source path does not exist"]


def test_missing_gpu_or_toolkit(project: Project, image: str) -> None:
    if Path("/dev/nvidiactl").exists():
        pytest.skip("this machine has a GPU")
    line = refusal(project, "gpu", image, AERIE_MEMLOCK="65536", AERIE_NOFILE="1024")
    assert [said for said in remedies() if said in line], line


def test_port_taken(project: Project, image: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        line = refusal(project, "cpu", image, AERIE_API_PORT=port)
    assert "address already in use" in line
    assert port in line
    assert "address already in use" in remedies()


@pytest.mark.parametrize(
    ("limit", "said"), [("memlock", "error setting rlimit type 8"), ("nofile", "error setting rlimit type 7")]
)
def test_limit_that_the_daemon_may_not_raise(project: Project, image: str, limit: str, said: str) -> None:
    value = {"memlock": "-1", "nofile": "1048576"}[limit]
    if daemon_may(f"{limit}={value}"):
        pytest.skip(f"this machine's Docker may set {limit}={value}")
    # The GPU file without its GPUs, whose absence Docker reports before it sets limits.
    (project.directory / "no-gpu.yaml").write_text("services: {vllm: {deploy: !reset null}}\n")
    limits = {"AERIE_MEMLOCK": "65536", "AERIE_NOFILE": "1024", f"AERIE_{limit.upper()}": value}
    line = refusal(project, "gpu", image, COMPOSE_FILE="compose.yaml:no-gpu.yaml", **limits)
    assert said in line
    assert said in remedies()


@pytest.mark.parametrize("combination", FILES)
def test_missing_image(project: Project, combination: str) -> None:
    line = refusal(project, combination, "aerie-none:such")
    assert "No such image" in line
    assert "aerie-none:such" in line
    assert "No such image" in remedies()
