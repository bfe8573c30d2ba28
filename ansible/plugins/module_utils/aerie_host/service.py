"""What aerie.service does: waits for the GPUs, starts the compose project, stays for as long as the container runs.

Docker's own restart policy is off below the unit (AERIE_RESTART=no): after a loss of power Docker would start the
container by itself, whatever is missing then, and would not try again where that failed. So there is one who starts it,
and the unit is active exactly while the container runs.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from . import gpus

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

REPLACED_SECONDS = 10.0
"""How long a stopped container may take to be followed by another: compose replaces it, or somebody restarts it."""
DOCKER_SECONDS = 5.0
"""Between two questions to a Docker daemon that does not answer."""
ANSWER_SECONDS = 30.0
"""How long a stop waits for a Docker daemon that hangs, before it asks it for anything that takes its time."""
SHOWN_LINES = 20
"""Of what Docker says where it refuses."""


class StopRequested(Exception):  # noqa: N818 - no error
    """systemd stops the unit."""


@dataclass(frozen=True)
class Container:
    """The service's container."""

    identifier: str
    state: str  # Docker's: created, running, restarting, exited, dead, paused, removing
    exit_code: int = 0

    @property
    def runs(self) -> bool:
        """Tell whether it runs, or is about to by itself."""
        return self.state in {"running", "restarting", "paused"}


def left_alone(*, live_restore: bool, jobs: str, host: str) -> bool:
    """Tell whether the container goes on although the unit is stopped: Docker is restarted, and keeps its containers.

    Args:
        live_restore: what the Docker daemon is set to.
        jobs: `systemctl list-jobs`.
        host: `systemctl is-system-running`.

    """
    docker = any("docker.service" in line.split() for line in jobs.splitlines())
    return live_restore and docker and host != "stopping"


class Project:
    """A compose project of one service, as `docker` shows it."""

    def __init__(self, directory: Path, name: str, service: str) -> None:
        self.directory = directory
        self.name = name
        self.service = service

    def _docker(self, *arguments: str, seconds: float | None = None) -> tuple[int, str]:
        try:
            done = subprocess.run(
                ["docker", *arguments],
                cwd=self.directory,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                check=False,
                timeout=seconds,
            )
        except subprocess.TimeoutExpired:
            return 1, f"Docker does not answer within {seconds:g} s"
        except OSError as error:  # its package is gone
            return 1, f"docker cannot be run: {error.strerror}: {error.filename}"
        if not done.returncode:
            return 0, done.stdout
        return done.returncode, (done.stderr or done.stdout).strip() or f"exit code {done.returncode}"

    def up(self) -> str:
        """Start the project, or nothing where it runs as it is defined; return what Docker says where it refuses."""
        code, said = self._docker("compose", "up", "--detach", "--no-build", "--remove-orphans", "--quiet-pull")
        return "\n".join(said.splitlines()[-SHOWN_LINES:]) if code else ""

    def stop(self) -> None:
        """Stop it as compose.yaml says, with its time for running requests. ConnectionError: it may run on."""
        code, said = self._docker("compose", "stop")
        if code:
            raise ConnectionError(said)

    def container(self) -> Container | None:
        """Return the service's container, not one of a rehearsal; None: there is none. ConnectionError: no Docker."""
        label = "label=com.docker.compose"
        filters = [f"{label}.project={self.name}", f"{label}.service={self.service}", f"{label}.oneoff=False"]
        asked = [argument for each in filters for argument in ("--filter", each)]
        code, said = self._docker("ps", "--all", "--no-trunc", *asked, "--format", "{{.ID}}")
        if code:
            raise ConnectionError(said)
        if not said.strip():
            return None
        code, shown = self._docker(
            "inspect", "--format", "{{.Id}} {{.State.Status}} {{.State.ExitCode}}", *said.split()
        )
        if code:  # gone meanwhile
            return None
        found = [
            Container(first, state, int(exit_code)) for first, state, exit_code in map(str.split, shown.splitlines())
        ]
        return next((container for container in found if container.runs), found[0])

    def wait_for_end(self, container: Container) -> None:
        """Return when the container has stopped, or Docker has."""
        self._docker("wait", container.identifier)

    def live_restore(self) -> bool:
        """Tell whether the Docker daemon's containers outlive it. ConnectionError: no Docker."""
        code, said = self._docker("info", "--format", "{{.LiveRestoreEnabled}}", seconds=ANSWER_SECONDS)
        if code:
            raise ConnectionError(said)
        return said.strip() == "true"


def follow(
    project: Project,
    tell: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> str:
    """Stay for as long as the service's container runs, or is replaced; return why it ended, empty where on purpose."""
    last: Container | None = None
    stopped_at: float | None = None
    while True:
        try:
            now = project.container()
        except ConnectionError as error:
            tell(f"Docker does not answer: {error}")
            stopped_at = None
            sleep(DOCKER_SECONDS)
            continue
        if now and now.runs:
            if last is None or now.identifier != last.identifier or stopped_at is not None:
                tell(f"serving: container {now.identifier[:12]}")
            last, stopped_at = now, None
            project.wait_for_end(now)
            continue
        last = now
        stopped_at = clock() if stopped_at is None else stopped_at
        if clock() - stopped_at < REPLACED_SECONDS:
            sleep(1)
            continue
        if now and now.exit_code:
            short = now.identifier[:12]
            return f"container {short} ended with exit code {now.exit_code}; `docker logs {short}` has what it said"
        return ""


def notify(message: str) -> None:
    """Tell systemd, which has it shown by `systemctl status`; nothing where it does not ask for it."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if address:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as endpoint:
            endpoint.connect("\0" + address[1:] if address.startswith("@") else address)
            endpoint.send(message.encode())


def tell(text: str) -> None:
    """Say it in the journal, and as the unit's status."""
    print(text, flush=True)
    notify(f"STATUS={text}")


def _stop(*_: object) -> None:
    raise StopRequested


def _systemctl(*arguments: str) -> str:
    return subprocess.run(
        ["systemctl", *arguments],
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()


def run(project: Project, expected: int, deadline: float) -> int:
    """Wait, start, stay. Returns the unit's exit code; what it raises where systemd stops it is `StopRequested`."""
    missing = gpus.wait(expected, deadline, tell)
    if missing:
        tell(f"not started: {gpus.refusal(missing, expected)}")
        return 1
    tell("starting the compose project")
    if refused := project.up():
        print(refused, file=sys.stderr, flush=True)
        tell(f"not started: {refused.splitlines()[-1]}")
        return 1
    notify("READY=1")
    ended = follow(project, tell)
    tell(ended or "the container was stopped on purpose; `systemctl start` of this unit starts it again")
    return 1 if ended else 0


def stop(project: Project) -> int:
    """Stop the project, unless Docker keeps it. Returns the unit's exit code; no stop is followed by a restart."""
    try:
        if left_alone(
            live_restore=project.live_restore(), jobs=_systemctl("list-jobs"), host=_systemctl("is-system-running")
        ):
            tell("Docker is restarted and keeps the container")
            return 0
        tell("stopping the compose project")
        project.stop()
    except ConnectionError as error:
        print(error, file=sys.stderr, flush=True)
        tell(
            f"not stopped, and the container may run on ({str(error).splitlines()[-1]}): "
            f"once Docker answers (systemctl status docker), `docker compose stop` in {project.directory} stops it"
        )
        return 1
    return 0


def main(arguments: Sequence[str]) -> int:
    """`aerie_host service`: what the unit runs."""
    parser = argparse.ArgumentParser(
        prog="aerie_host service", description=__doc__.splitlines()[0] if __doc__ else None
    )
    parser.add_argument("--directory", type=Path, required=True, help="the compose project's")
    parser.add_argument("--project", required=True, help="its name")
    parser.add_argument("--service", default="vllm", help="the service that is followed (default: vllm)")
    parser.add_argument("--gpus", type=int, required=True, help="GPUs that are waited for; 0: none")
    parser.add_argument("--deadline", type=float, default=600, help="seconds for that (default: 600)")
    given = parser.parse_args(arguments)
    project = Project(given.directory, given.project, given.service)
    signal.signal(signal.SIGTERM, _stop)
    try:
        return run(project, given.gpus, given.deadline)
    except StopRequested:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        return stop(project)
