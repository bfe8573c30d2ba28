"""What the host's unit does with the project. Docker and systemd are stand-ins; Molecule has the real ones."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from aerie_host import service
from aerie_host.service import Container, Project, follow, left_alone

from aerie.gate import ask

if TYPE_CHECKING:
    from collections.abc import Iterator

HOST = Path(service.__file__).parent


class Docker:
    """Containers that come and go by a script: what is there at each question, None for no answer at all."""

    def __init__(self, *moments: Container | ConnectionError | None) -> None:
        self.moments = list(moments)
        self.waited: list[str] = []

    def container(self) -> Container | None:
        moment = self.moments.pop(0) if len(self.moments) > 1 else self.moments[0]
        if isinstance(moment, ConnectionError):
            raise moment
        return moment

    def wait_for_end(self, container: Container) -> None:
        self.waited.append(container.identifier)


def followed(*moments: Container | ConnectionError | None) -> tuple[str, list[str], list[str], float]:
    """Why it ended, what was told, which containers were waited for, and how long the unit looked for another."""
    docker, told, now = Docker(*moments), [], [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    ended = follow(docker, told.append, clock=lambda: now[0], sleep=sleep)  # type: ignore[arg-type]
    return ended, told, docker.waited, now[0]


ONE, TWO = Container("1" * 64, "running"), Container("2" * 64, "running")


def test_a_container_that_was_taken_down() -> None:
    assert followed(ONE, None) == ("", ["serving: container 111111111111"], [ONE.identifier], service.REPLACED_SECONDS)


def test_a_container_that_was_stopped() -> None:
    ended, *_ = followed(ONE, Container(ONE.identifier, "exited", 0))
    assert ended == ""


def test_a_container_that_died() -> None:
    ended, *_ = followed(ONE, Container(ONE.identifier, "exited", 137))
    assert ended == "container 111111111111 ended with exit code 137; `docker logs 111111111111` has what it said"


def test_a_container_that_is_replaced() -> None:
    stopped = Container(ONE.identifier, "exited", 0)
    ended, told, waited, _ = followed(ONE, stopped, None, TWO, None)
    assert (ended, waited) == ("", [ONE.identifier, TWO.identifier])
    assert told == ["serving: container 111111111111", "serving: container 222222222222"]


def test_a_container_that_is_restarted_by_hand() -> None:
    _, told, waited, _ = followed(ONE, Container(ONE.identifier, "exited", 0), ONE, None)
    assert told == ["serving: container 111111111111"] * 2
    assert waited == [ONE.identifier] * 2


def test_a_docker_that_does_not_answer_is_no_end() -> None:
    gone = ConnectionError("Cannot connect to the Docker daemon")
    ended, told, waited, _ = followed(ONE, gone, gone, gone, ONE, None)
    assert (ended, waited) == ("", [ONE.identifier] * 2)
    assert "Docker does not answer: Cannot connect to the Docker daemon" in told


@pytest.mark.parametrize(
    ("live_restore", "jobs", "host", "alone"),
    [
        # `systemctl stop` or `restart` of the unit itself.
        (True, "99 aerie.service stop running", "running", False),
        # Docker is restarted, and keeps its containers or does not.
        (True, "98 docker.service restart waiting\n99 aerie.service restart running", "running", True),
        (False, "98 docker.service restart waiting\n99 aerie.service restart running", "running", False),
        (True, "98 docker.service stop waiting\n99 aerie.service stop running", "degraded", True),
        # The host goes down, and all its processes with it: requests get their time.
        (True, "98 docker.service stop waiting\n99 aerie.service stop running", "stopping", False),
        (True, "97 docker.service.example start waiting", "running", False),
    ],
)
def test_when_a_stop_leaves_the_container_alone(live_restore: bool, jobs: str, host: str, alone: bool) -> None:  # noqa: FBT001
    assert left_alone(live_restore=live_restore, jobs=jobs, host=host) is alone


DOCKER = r"""#!/bin/sh
# A container is the file `container`, of the words state and exit code.
cd "${0%/*}"
echo "$*" >>calls
[ ! -e hangs ] || exec sleep 60
case $1 in
  compose)
    [ ! -e refuses ] || { cat refuses >&2; exit 1; }
    case $2 in up) echo 'running 0' >container ;; stop) echo 'exited 0' >container ;; esac ;;
  ps) [ ! -e container ] || echo 1111111111111111 ;;
  inspect) echo "1111111111111111 $(cat container)" ;;
  wait) while [ "$(cut -d ' ' -f 1 container)" = running ]; do sleep 0.1; done ;;
  info) echo "${LIVE_RESTORE:-false}" ;;
esac
"""
SYSTEMCTL = """#!/bin/sh
case $1 in list-jobs) echo '1 docker.service restart waiting' ;; *) echo running ;; esac
"""


class Unit:
    """The program as the unit runs it, with stand-ins on its path and a socket in the place of systemd's."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        for name, text in (("docker", DOCKER), ("systemctl", SYSTEMCTL)):
            (directory / name).write_text(text)
            (directory / name).chmod(0o755)
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(str(directory / "notify"))
        self.socket.settimeout(20)
        self.process: subprocess.Popen[str] | None = None

    def start(self, **environment: str) -> None:
        code = f"import sys; sys.path.insert(0, {str(HOST.parent)!r}); from aerie_host import service; "
        code += "service.ANSWER_SECONDS = 1; sys.exit(service.main(sys.argv[1:]))"
        given = ["--directory", str(self.directory), "--project", "aerie", "--gpus", "0"]
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, *given],
            env={**os.environ, "PATH": f"{self.directory}:{os.environ['PATH']}",
                 "NOTIFY_SOCKET": str(self.directory / "notify"), **environment},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def told(self, wanted: str) -> None:
        """Wait until systemd is told this."""
        while wanted not in self.socket.recv(4096).decode():
            pass

    def ended(self) -> tuple[int, str, str]:
        assert self.process
        out, err = self.process.communicate(timeout=30)
        return self.process.returncode, out, err

    def calls(self) -> str:
        return (self.directory / "calls").read_text()


@pytest.fixture
def unit(tmp_path: Path) -> Iterator[Unit]:
    unit = Unit(tmp_path)
    yield unit
    unit.socket.close()
    if unit.process and unit.process.poll() is None:
        unit.process.kill()
        unit.process.communicate()


def test_it_starts_the_project_says_so_and_stops_it(unit: Unit) -> None:
    unit.start()
    unit.told("READY=1")
    unit.told("STATUS=serving: container 111111111111")
    assert unit.process
    unit.process.terminate()
    code, out, err = unit.ended()
    assert (code, err) == (0, "")
    assert out.splitlines()[-1] == "stopping the compose project"
    assert "compose up --detach --no-build" in unit.calls()
    assert (unit.directory / "container").read_text() == "exited 0\n"


def test_it_leaves_the_container_to_a_docker_that_keeps_it(unit: Unit) -> None:
    unit.start(LIVE_RESTORE="true")
    unit.told("STATUS=serving")
    assert unit.process
    unit.process.terminate()
    code, out, _ = unit.ended()
    assert (code, out.splitlines()[-1]) == (0, "Docker is restarted and keeps the container")
    assert (unit.directory / "container").read_text() == "running 0\n"


@pytest.mark.parametrize(
    ("file", "text", "why"),
    [
        ("refuses", "Cannot connect to the Docker daemon\n", "Cannot connect to the Docker daemon"),
        ("hangs", "", "Docker does not answer within 1 s"),
    ],
)
def test_a_stop_without_docker_fails_and_says_what_may_run_on(unit: Unit, file: str, text: str, why: str) -> None:
    unit.start()
    unit.told("STATUS=serving")
    (unit.directory / file).write_text(text)
    assert unit.process
    unit.process.terminate()
    code, out, _ = unit.ended()
    told = f"not stopped, and the container may run on ({why}): once Docker answers (systemctl status docker), "
    told += f"`docker compose stop` in {unit.directory} stops it"
    assert (code, out.splitlines()[-1]) == (1, told)


def test_a_stop_after_docker_was_removed_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConnectionError, match="docker cannot be run: No such file or directory"):
        Project(tmp_path, "aerie", "vllm").stop()


def test_what_docker_refuses_is_the_last_thing_it_says(unit: Unit) -> None:
    (unit.directory / "refuses").write_text(
        "Container a  Creating\nError response from daemon: No such image: aerie:x\n"
    )
    unit.start()
    code, out, err = unit.ended()
    assert (code, out.splitlines()[-1]) == (1, "not started: Error response from daemon: No such image: aerie:x")
    assert "Creating" in err


def test_a_project_is_asked_for_its_service_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Not for a rehearsal's container, which has the same project and service."""
    asked: list[tuple[str, ...]] = []

    def docker(self: Any, *arguments: str) -> tuple[int, str]:
        asked.append(arguments)
        return 0, ""

    monkeypatch.setattr(Project, "_docker", docker)
    assert Project(tmp_path, "aerie", "vllm").container() is None
    assert "label=com.docker.compose.oneoff=False" in asked[0]
    assert "label=com.docker.compose.project=aerie" in asked[0]


def test_what_waits_for_these_waits_longer() -> None:
    role = HOST.parents[2] / "roles/vllm"
    unit = (role / "templates/service.service.j2").read_text()
    (margin,) = re.findall(r"^TimeoutStopSec=.* [+] (\d+) }}$", unit, re.MULTILINE)
    assert int(margin) >= service.ANSWER_SECONDS + 30
    assert yaml.safe_load((role / "vars/main.yml").read_text())["__vllm_answer_seconds"] > ask._TIMEOUT
