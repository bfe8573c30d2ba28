"""Crashes, provoked in one container: how long from each until its diagnosis is printed and `aerie wait` has failed.

The container stays from crash to crash, with another configuration written into the file that it mounts, or with less
memory, and `aerie retry` starts the next engine.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import yaml
from service import REPOSITORY, Service, read_env

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SHIPPED: dict[str, Any] = yaml.safe_load((REPOSITORY / "config" / "tiny.yaml").read_text())
PROJECT, API_PORT, STATUS_PORT = "aerie-crashes", 18100, 18101
ENGINE_CORE, WORKER = "VLLM::[E]ngineCore", "VLLM::[W]orker"
SQUATTER = "[s]ocket.create_server"
# The first line of what is printed of a crash, and all of what is printed where no engine was started.
DIAGNOSED, HELD = "DIAGNOSIS: ", "aerie: held; "
# Less than the tiny pair's engine needs, 2.5 GB, and more than the supervisor.
LITTLE_MEMORY = "1300m"


@dataclass(frozen=True)
class Told:
    """What became of a crash; `printed` and `gate` in seconds after it."""

    printed: float
    gate: float
    gate_exit: int
    gate_said: str
    after: list[str]
    """What the log has from the diagnosis on."""
    status: dict[str, Any]


class Crashes:
    """One container, crashed again and again."""

    def __init__(self, service: Service, config: Path) -> None:
        self._service = service
        self._config = config
        self._begun = False

    def missing_drafter(self) -> Told:
        """The drafter's directory does not exist, which the supervisor sees before it starts an engine."""
        return self._crash(_with_drafter("/data/models/no-such-drafter"), self._started, HELD)

    def missing_repository(self) -> Told:
        """The drafter is a repository that is not in the cache, of a host without internet."""
        return self._crash(_with_drafter("example/no-such-drafter"), lambda: self._says("SpeculativeConfig\n"))

    def port_clash(self) -> Told:
        """Something listens on the API's port already."""
        listen = f"import socket, time; s = socket.create_server(('0.0.0.0', {SHIPPED['port']})); time.sleep(600)"
        self._service.compose("exec", "--detach", "vllm", "python", "-c", listen)
        try:
            return self._crash(SHIPPED, lambda: self._says("Address already in use"))
        finally:
            self._kill(SQUATTER)

    def killed(self, pattern: str) -> Told:
        """One of the engine's processes is killed while it loads."""
        return self._crash(SHIPPED, lambda: self._kill(pattern))

    def out_of_memory(self) -> Told:
        """The kernel kills the engine's largest process, because the container has too little memory."""
        container = self._service.container()["Id"]
        limit = ["--memory", LITTLE_MEMORY, "--memory-swap", LITTLE_MEMORY]
        subprocess.run(["docker", "update", *limit, container], check=True, capture_output=True)
        return self._crash(SHIPPED, _killed_by_the_kernel)

    def _crash(self, config: dict[str, Any], crashed: Callable[[], float], printed: str = DIAGNOSED) -> Told:
        """Start an engine and the gate, wait for the crash, whose time `crashed` returns, and for what follows."""
        self._config.write_text(yaml.safe_dump(config))
        began = time.time()
        if self._begun:
            self._service.compose("exec", "-T", "vllm", "aerie", "retry")
            _until(lambda: self.status()["phase"] == "starting", 30, "no start after `aerie retry`")
        else:
            self._service.compose("up", "--detach", "--no-build")
            self._begun = True
        with self._gate() as gate:
            at = crashed()
            _, said = gate.communicate(timeout=60)
            gate_ended = time.time()
        printed_at, after = self._printed(began, printed)
        return Told(printed_at - at, gate_ended - at, gate.returncode, said, after, self.status())

    def status(self) -> dict[str, Any]:
        """What /status says; a container that has just started gets some seconds."""
        for _ in range(50):
            with contextlib.suppress(httpx.HTTPError):
                found: dict[str, Any] = httpx.get(f"{self._service.status}/status", timeout=10, trust_env=False).json()
                return found
            time.sleep(0.2)
        raise AssertionError(f"{self._service.status} does not answer")

    @contextlib.contextmanager
    def _gate(self) -> Iterator[subprocess.Popen[str]]:
        command = ["docker", "compose", "-p", self._service.project, "exec", "-T", "vllm", "aerie", "wait"]
        environment = {**os.environ, **self._service.environment}
        with subprocess.Popen(
            command, cwd=self._service.directory, env=environment, text=True, stderr=subprocess.PIPE
        ) as gate:
            try:
                yield gate
            finally:
                gate.kill()

    def _log(self, since: float) -> list[tuple[float, str]]:
        """What the container printed, each line with the time at which Docker had it."""
        command = ["docker", "logs", "--timestamps", "--since", f"{since:.3f}", self._service.container()["Id"]]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=True)
        # A progress bar's carriage return is no new line of Docker's. Two streams, each in its order.
        printed = done.stdout.decode(errors="replace").rstrip("\n").split("\n")
        lines = sorted((line.partition(" ") for line in printed if line), key=lambda parts: parts[0])
        return [(_seconds(stamp), text) for stamp, _, text in lines]

    def _printed(self, since: float, words: str) -> tuple[float, list[str]]:
        """When the last diagnosis was printed, which begins so, and what the log has from there on."""

        def places() -> list[int]:
            return [place for place, (_, text) in enumerate(log) if text.startswith(words)]

        log = self._log(since)
        for _ in range(20):
            if places():
                break
            time.sleep(0.5)
            log = self._log(since)
        assert places(), f"no diagnosis was printed:\n{_tail(log)}"
        place = places()[-1]
        return log[place][0], [text for _, text in log[place:]]

    def _says(self, words: str, seconds: float = 240) -> float:
        """Wait until the engine says it, and return when it did."""
        began = time.time() - 5
        found: list[float] = []

        def said() -> bool:
            found[:] = [at for at, text in self._log(began) if words in f"{text}\n"]
            return bool(found)

        _until(said, seconds, f"the engine did not say {words!r}")
        return found[0]

    def _started(self) -> float:
        return _seconds(self._service.container()["State"]["StartedAt"])

    def _kill(self, pattern: str) -> float:
        """Kill the first process whose command line matches, soon after there is one, and return when that was.

        Not in its first breath: the supervisor looks for new processes once a second.
        """
        matches = f"tr '\\0' ' ' < $p/cmdline 2>/dev/null | grep -qE '{pattern}'"
        kill = "sleep 2; date +%s.%N; kill -KILL ${p#/proc/}"
        script = f"for p in /proc/[0-9]*; do {matches} && {{ {kill}; exit; }}; done; exit 1"
        done: list[str] = []

        def killed() -> bool:
            done[:] = self._service.compose("exec", "-T", "vllm", "sh", "-c", script, check=False).stdout.split()
            return bool(done)

        _until(killed, 240, f"no process matches {pattern}")
        return float(done[0])


@contextlib.contextmanager
def crashing(running: Service, folder: Path) -> Iterator[Crashes]:
    """A project of the same image and files as `running`, with its own ports, which goes with the block."""
    config = folder / "serve.yaml"
    environment = {
        **read_env(running.directory / ".env"), "COMPOSE_PROJECT_NAME": PROJECT, "AERIE_CONFIG": str(config),
        "AERIE_API_PORT": str(API_PORT), "AERIE_STATUS_PORT": str(STATUS_PORT),
    }  # fmt: skip
    status = f"http://127.0.0.1:{STATUS_PORT}"
    service = Service(PROJECT, running.directory, f"http://127.0.0.1:{API_PORT}", status, running.key, environment)
    try:
        yield Crashes(service, config)
    finally:
        service.compose("down", "--timeout", "10", "--volumes")


def _with_drafter(model: str) -> dict[str, Any]:
    return {**SHIPPED, "speculative-config": {**SHIPPED["speculative-config"], "model": model}}


def _killed_by_the_kernel() -> float:
    """Wait until this machine's kernel kills a process for want of memory, and return when that was."""

    def kills() -> int:
        counters = dict(line.split() for line in Path("/proc/vmstat").read_text().splitlines())
        return int(counters["oom_kill"])

    before = kills()
    _until(lambda: kills() > before, 240, "the kernel killed nothing", pause=0.02)
    return time.time()


def _until(what: Callable[[], bool], seconds: float, otherwise: str, pause: float = 0.2) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, f"{otherwise} in {seconds:.0f} s"
        time.sleep(pause)


def _seconds(stamp: str) -> float:
    """The seconds since the epoch of Docker's RFC 3339 with nanoseconds."""
    whole, _, fraction = stamp.removesuffix("Z").partition(".")
    return datetime.fromisoformat(f"{whole}+00:00").timestamp() + float(f"0.{fraction or 0}")


def _tail(log: list[tuple[float, str]]) -> str:
    return json.dumps([text for _, text in log[-40:]], indent=1)
