"""The gate before a real engine, over real SSH: a crash while it waits, the next start, and what no start cures.

One service with its own project, ports and volumes; an engine takes most of a minute, so the tests follow one story.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import textwrap
import time
from datetime import datetime
from typing import TYPE_CHECKING

import httpx
import pytest
import yaml
from gate_play import Play
from service import Service, read_env

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ssh import Server


@pytest.fixture(scope="module")
def project(running: Service, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A project directory as the role writes one, not started yet."""
    directory = tmp_path_factory.mktemp("project")
    for name in ("compose.yaml", "compose.cpu.yaml", "serve.yaml"):
        shutil.copy2(running.directory / name, directory)
    for name in ("config", "kernel-log", "secrets"):
        shutil.copytree(running.directory / name, directory / name)
    for each in (directory / "secrets", *(directory / "secrets").iterdir()):
        owner = (running.directory / each.relative_to(directory)).stat()
        os.chown(each, owner.st_uid, owner.st_gid)
    ports = {"AERIE_API_PORT": "18200", "AERIE_STATUS_PORT": "18201"}
    settings = read_env(running.directory / ".env") | {"COMPOSE_PROJECT_NAME": "aerie-gate", **ports}
    (directory / ".env").write_text("".join(f"{name}={value}\n" for name, value in settings.items()))
    made = Service("aerie-gate", directory, "http://127.0.0.1:18200", "http://127.0.0.1:18201", running.key, {})
    yield made
    made.compose("down", "--volumes", "--timeout", "5", check=False)


def engine_process(project: Service, name: str) -> int:
    """The pid, on this host, of the process of the engine that has this in its title."""
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline:
        table = project.compose("top", "vllm").stdout.splitlines()
        column = table[1].split().index("PID")
        found = [line.split()[column] for line in table[2:] if name in line]
        if found:
            return int(found[0])
        time.sleep(0.2)
    pytest.fail(f"no process with {name!r}: {table}")


def test_a_crash_while_it_waits(server: Server, project: Service, tmp_path: Path) -> None:
    """Killed from outside in mid-start: told right after the container has said it, and in its own words."""
    project.compose("up", "--detach", "--no-build")
    with Play(server, project.directory, tmp_path) as play:
        play.until(r"^    gpu1 \d+:\d\d (configuring|spawning workers)")
        victim = engine_process(project, "EngineCore")
        # Not in its first breath: it has a place in the log by then.
        time.sleep(3)
        os.kill(victim, 9)
        told = play.until(r"^    gpu1 \d+:\d\d failed: ")
        assert play.end() == 2
    log = project.compose("logs", "--no-log-prefix", "--no-color", "--timestamps", "vllm").stdout
    said = re.findall(r"(\d{4}-\S+) aerie: failed;", log)[0]
    # Docker gives nanoseconds, of which Python reads six digits.
    assert told - datetime.fromisoformat(f"{said[:26]}Z").timestamp() < 2.0, play.output
    text = httpx.get(f"{project.status}/status", trust_env=False).json()["diagnosis"]["text"]
    assert text in re.sub(r"^\S+ ", "", log, flags=re.MULTILINE)
    # As a block of lines, not as one with escapes.
    message = play.output[play.output.index("    msg: |-") :]
    assert textwrap.indent(text, "        ") in message


def test_the_next_start_is_waited_for(server: Server, project: Service, tmp_path: Path) -> None:
    """The failure from before is none of this play's: it goes on with the start that the supervisor makes itself."""
    with Play(server, project.directory, tmp_path) as play:
        assert play.end() == 0, play.output
    assert re.search(r"^    gpu1 \d+:\d\d ready after \d+ s$", play.output, re.MULTILINE)
    assert re.search(r"^    gpu1 \d+:\d\d (loading target|loading drafter|warming up)", play.output, re.MULTILINE)


def test_check_mode_asks_nobody(server: Server, project: Service, tmp_path: Path) -> None:
    with Play(server, project.directory, tmp_path, "--check", ANSIBLE_DISPLAY_SKIPPED_HOSTS="1") as play:
        play.end()
    assert "skipping: [gpu1]" in play.output
    assert "ready after" not in play.output


def test_a_held_service(server: Server, project: Service, tmp_path: Path) -> None:
    """What no start can cure: Docker's own wait cannot see it, and the gate tells it at once."""
    path = project.directory / "serve.yaml"
    config = yaml.safe_load(path.read_text())
    path.write_text(yaml.safe_dump({**config, "model": "/nowhere/kimi"}))
    project.compose("up", "--detach", "--no-build", "--force-recreate", "--timeout", "30")
    with Play(server, project.directory, tmp_path) as play:
        assert play.end() == 2
    assert "held: model /nowhere/kimi does not exist" in play.output
    with pytest.raises(subprocess.TimeoutExpired):
        subprocess.run(
            ["docker", "compose", "up", "--wait"],
            cwd=project.directory, capture_output=True, timeout=15, check=False,
        )  # fmt: skip
