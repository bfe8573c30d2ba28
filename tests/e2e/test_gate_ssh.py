"""The gate over real SSH and real Docker; what the service says is written by the test, so that no engine is needed."""

from __future__ import annotations

import json
import re
import subprocess
import time
from typing import TYPE_CHECKING, Any

import pytest
from gate_play import Play
from service import Service, read_env

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ssh import Server

COMPOSE = """
name: aerie-gate-ssh
services:
  vllm:
    image: {image}
    pull_policy: never
    network_mode: none
    entrypoint: [python3, -m, http.server, "8001", --bind, 127.0.0.1, --directory, /srv]
    healthcheck: {{disable: true}}
    stop_signal: SIGKILL
    volumes: ["./srv:/srv:ro"]
"""
START = {
    "phases": [{"name": "loading target", "began": "2026-11-29T12:00:00Z", "ended": None, "fraction": 0.41,
                "detail": "26 of 64 shards"}],
    "phase": "loading target", "fraction": 0.33, "began": "2026-11-29T12:00:00Z", "ended": None, "eta": None,
    "remaining_seconds": None, "moved": "2026-11-29T12:00:00Z", "moved_by": "log", "silent_seconds": 0.0,
    "stalled": False, "waiting_for": None,
}  # fmt: skip
STATE = {
    "schema": 2, "phase": "starting", "since": "2026-11-29T12:00:00Z", "reason": None, "model": "kimi", "start": START,
    "engine": {"pid": 7, "starts": 1, "started": "2026-11-29T12:00:00Z", "exit": None}, "diagnosis": None,
    "serving": None, "speculation": None, "last_line": "", "next_start": None, "failures": 0, "hangs": 0,
    "versions": {"aerie": "0.1.0", "vllm": None},
}  # fmt: skip
TOLD = r"^    gpu1 \d+:\d\d "


class Scripted:
    """A container whose status port says what was written last."""

    def __init__(self, directory: Path, image: str) -> None:
        self.directory = directory
        (directory / "srv").mkdir()
        (directory / "compose.yaml").write_text(COMPOSE.format(image=image))
        self.say()

    def say(self, **changes: Any) -> None:
        new = self.directory / "srv" / "new"
        new.write_text(json.dumps(STATE | changes))
        new.replace(self.directory / "srv" / "status")

    def compose(self, *arguments: str) -> None:
        subprocess.run(["docker", "compose", *arguments], cwd=self.directory, check=True, capture_output=True)


@pytest.fixture(scope="module")
def container(running: Service, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scripted]:
    image = read_env(running.directory / ".env")["AERIE_IMAGE"]
    made = Scripted(tmp_path_factory.mktemp("scripted"), image)
    made.compose("up", "--detach")
    yield made
    made.compose("down", "--volumes", "--timeout", "1")


@pytest.fixture
def service(container: Scripted) -> Scripted:
    container.say()
    return container


def test_a_connection_that_breaks_twice(server: Server, service: Scripted, tmp_path: Path) -> None:
    """Cut in mid-wait, then a server that is away for some seconds: the play goes on and ends as the start does."""
    with Play(server, service.directory, tmp_path) as play:
        play.until(f"{TOLD}loading target: 26 of 64 shards, 41%; start 33%")
        time.sleep(1)
        assert server.cut() >= 1
        play.until(f"{TOLD}out of reach, the start goes on")
        seen = len(play.lines)
        play.until(f"{TOLD}loading target", after=seen)
        server.stop()
        play.until(f"{TOLD}out of reach, the start goes on", after=seen)
        time.sleep(4)
        server.start()
        service.say(phase="ready")
        assert play.end() == 0, play.output
    assert play.output.count("out of reach") == 2
    assert re.search(f"{TOLD}ready after", play.output, re.MULTILINE)


def test_a_failure_while_the_connection_is_cut(server: Server, service: Scripted, tmp_path: Path) -> None:
    """It came and went while nobody could look, and is told all the same, word for word."""
    text = "-----\nDIAGNOSIS: it broke (crash)\n-----"
    with Play(server, service.directory, tmp_path) as play:
        play.until(f"{TOLD}loading target")
        server.stop()
        play.until(f"{TOLD}out of reach, the start goes on")
        service.say(failures=1, diagnosis={"text": text, "root": None, "at": "2026-11-29T12:01:00Z"})
        server.start()
        assert play.end() == 2, play.output
    assert "    msg: |-\n        the engine failed and is starting again: loading target" in play.output
    assert "\n        -----\n        DIAGNOSIS: it broke (crash)\n        -----\n" in play.output


def test_a_crash_is_told_at_once(server: Server, service: Scripted, tmp_path: Path) -> None:
    with Play(server, service.directory, tmp_path) as play:
        play.until(f"{TOLD}loading target")
        time.sleep(1)
        said = time.time()
        service.say(phase="failed", failures=1, reason="it died")
        assert play.until(f"{TOLD}failed: it died") - said < 2.0
        assert play.end() == 2


def test_output_for_programs_is_one_document(server: Server, service: Scripted, tmp_path: Path) -> None:
    service.say(phase="ready")
    with Play(server, service.directory, tmp_path, ANSIBLE_STDOUT_CALLBACK="ansible.posix.json") as play:
        assert play.end() == 0
    tasks = json.loads(play.output[play.output.index("{\n") :])["plays"][0]["tasks"]
    assert tasks[0]["hosts"]["gpu1"]["ready"] is True


def test_a_container_that_is_down(server: Server, service: Scripted, tmp_path: Path) -> None:
    """What Docker says of a container that is down is what the gate says."""
    service.compose("stop", "--timeout", "1")
    try:
        with Play(server, service.directory, tmp_path) as play:
            play.until(rf'{TOLD}the container does not answer: service "vllm" is not running$')
    finally:
        service.compose("up", "--detach")
