"""The gate before a real service, over real SSH: `ansible-playbook`, an SSH server, Docker, vLLM.

One service with its own project, ports and volumes; each engine takes most of a minute, so the tests follow one story.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
import threading
import time
from datetime import datetime
from typing import TYPE_CHECKING

import httpx
import pytest
import yaml
from service import REPOSITORY, Service, read_env
from ssh import SSHD, Server

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from typing import Self

TASK = """
- hosts: all
  gather_facts: false
  tasks:
    - name: Wait until the service is ready
      gate:
        project_dir: "{{ project_dir }}"
      register: outcome
    - name: Tell later tasks
      ansible.builtin.debug:
        msg: "{{ outcome.verdict }} {{ outcome.phase }}"
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    if not (SSHD / "usr/sbin/sshd").exists():
        pytest.fail(f"{SSHD} is missing: `./run test-e2e` unpacks it there")
    made = Server(tmp_path_factory.mktemp("ssh"))
    made.start()
    yield made
    made.stop()


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


class Play:
    """One run of `ansible-playbook` against the SSH server, with its output line by line."""

    def __init__(self, server: Server, project: Service, folder: Path, *args: str, **settings: str) -> None:
        playbook, inventory = folder / "play.yml", folder / "hosts.yml"
        playbook.write_text(TASK)
        options = f"-o StrictHostKeyChecking=no -o UserKnownHostsFile={folder}/known_hosts"
        host = {
            "ansible_host": "127.0.0.1", "ansible_port": server.port, "ansible_user": "root",
            "ansible_ssh_private_key_file": str(server.key), "ansible_ssh_common_args": options,
            "project_dir": str(project.directory),
        }  # fmt: skip
        inventory.write_text(yaml.safe_dump({"all": {"hosts": {"gpu1": host}}}))
        environment = os.environ | {
            "ANSIBLE_CONFIG": str(REPOSITORY / "ansible/ansible.cfg"),
            "ANSIBLE_SSH_CONTROL_PATH_DIR": str(folder / "cp"),
            "ANSIBLE_NOCOLOR": "1",
            "PYTHONUNBUFFERED": "1",
            **settings,
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "ansible", "playbook", "-i", str(inventory), *args, str(playbook)],
            env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        self.lines: list[tuple[float, str]] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            self.lines.append((time.time(), line.rstrip("\n")))

    @property
    def output(self) -> str:
        return "\n".join(line for _, line in self.lines)

    def until(self, pattern: str, seconds: float = 600.0, after: int = 0) -> float:
        """Wait for a line after so many; return when it came, in seconds since the epoch."""
        deadline = time.monotonic() + seconds
        while True:
            ended = self.process.poll() is not None
            for at, line in list(self.lines)[after:]:
                if re.search(pattern, line):
                    return at
            assert not ended, f"ended without {pattern!r}:\n{self.output}"
            assert time.monotonic() < deadline, f"no {pattern!r}:\n{self.output}"
            time.sleep(0.05)

    def end(self, seconds: float = 600.0) -> int:
        code = self.process.wait(seconds)
        self._reader.join(10)
        return code

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join(10)


def engine_process(project: Service, name: str) -> int:
    """The pid, on this host, of the process of the engine that has this in its title."""
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        table = project.compose("top", "vllm").stdout.splitlines()
        column = table[1].split().index("PID")
        found = [line.split()[column] for line in table[2:] if name in line]
        if found:
            return int(found[0])
        time.sleep(0.2)
    pytest.fail(f"no process with {name!r}: {table}")


def test_a_crash_while_it_waits(server: Server, project: Service, tmp_path: Path) -> None:
    """Killed from outside in mid-start: told a second after the container has said it, and in its own words."""
    project.compose("up", "--detach", "--no-build")
    with Play(server, project, tmp_path) as play:
        play.until(r"^    gpu1 \d+:\d\d (?!no answer)")
        victim = engine_process(project, "EngineCore")
        # Not in its first breath: it has a handler for signals and a place in the log by then.
        time.sleep(3)
        os.kill(victim, 9)
        told = play.until(r"^    gpu1 \d+:\d\d failed: ")
        assert play.end(30) == 2
    log = project.compose("logs", "--no-log-prefix", "--no-color", "--timestamps", "vllm").stdout
    (said,) = re.findall(r"^(\S+) aerie: failed;", log, re.MULTILINE)
    # Docker gives nanoseconds, of which Python reads six digits.
    assert told - datetime.fromisoformat(f"{said[:26]}Z").timestamp() < 2.0, play.output
    text = httpx.get(f"{project.status}/status", trust_env=False).json()["diagnosis"]["text"]
    assert text in re.sub(r"^\S+ ", "", log, flags=re.MULTILINE)
    # As a block of lines, not as one with escapes.
    message = play.output[play.output.index("    msg: |-") :]
    assert textwrap.indent(text, "        ") in message
    project.compose("down", "--volumes", "--timeout", "5")


def test_a_connection_that_breaks_twice(server: Server, project: Service, tmp_path: Path) -> None:
    """Cut in mid-wait, then a server that is away for some seconds: the play goes on and ends as the start does."""
    project.compose("up", "--detach", "--no-build")
    with Play(server, project, tmp_path) as play:
        play.until(r"^    gpu1 \d+:\d\d (?!no answer)")
        time.sleep(2)
        assert server.cut() >= 1
        play.until("gpu1 .*out of reach, the start goes on")
        seen = len(play.lines)
        play.until(r"^    gpu1 \d+:\d\d (?!out of reach)", after=seen)
        server.stop()
        seen = len(play.lines)
        play.until("gpu1 .*out of reach, the start goes on", seconds=30, after=seen)
        time.sleep(5)
        server.start()
        assert play.end() == 0, play.output
    assert play.output.count("out of reach") == 2
    assert re.search(r"^    gpu1 \d+:\d\d ready after \d+ s$", play.output, re.MULTILINE)
    assert "ready ready" in play.output


def test_a_ready_service_and_output_for_programs(server: Server, project: Service, tmp_path: Path) -> None:
    with Play(server, project, tmp_path, ANSIBLE_STDOUT_CALLBACK="ansible.posix.json") as play:
        assert play.end(60) == 0
    tasks = json.loads(play.output)["plays"][0]["tasks"]
    assert tasks[0]["hosts"]["gpu1"]["ready"] is True


def test_check_mode_asks_nobody(server: Server, project: Service, tmp_path: Path) -> None:
    with Play(server, project, tmp_path, "--check", ANSIBLE_DISPLAY_SKIPPED_HOSTS="1") as play:
        play.end(60)
    assert "skipping: [gpu1]" in play.output
    assert "ready after" not in play.output


def test_a_held_service(server: Server, project: Service, tmp_path: Path) -> None:
    """What no start can cure: Docker's own wait could not see it, and the gate tells it at once."""
    path = project.directory / "serve.yaml"
    config = yaml.safe_load(path.read_text())
    path.write_text(yaml.safe_dump({**config, "model": "/nowhere/kimi"}))
    project.compose("up", "--detach", "--no-build", "--force-recreate", "--timeout", "30")
    began = time.monotonic()
    with Play(server, project, tmp_path) as play:
        assert play.end(60) == 2
    assert time.monotonic() - began < 20
    assert "held: model /nowhere/kimi does not exist" in play.output
    with pytest.raises(subprocess.TimeoutExpired):
        subprocess.run(["docker", "compose", "up", "--wait"], cwd=project.directory, capture_output=True, timeout=15,
                       check=False)  # fmt: skip


def test_a_container_that_is_gone(server: Server, project: Service, tmp_path: Path) -> None:
    project.compose("down", "--timeout", "5")
    with Play(server, project, tmp_path, "-e", '{"absent": 2}') as play, contextlib.suppress(subprocess.TimeoutExpired):
        play.until(r"gpu1 .*the container does not answer: service \"vllm\" is not running", seconds=30)
