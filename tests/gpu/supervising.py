"""Runs `aerie serve` on the GPUs of this machine, with the tiny pair and whatever a contract changes of it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

REPOSITORY = Path(__file__).resolve().parents[2]
TINY = Path(os.environ.get("AERIE_TINY", "/usr/share/aerie/tiny"))
BASE: dict[str, Any] = yaml.safe_load((REPOSITORY / "config" / "tiny.yaml").read_text()) | {
    "model": str(TINY / "target"),
    "speculative-config": {"method": "eagle3", "model": str(TINY / "drafter-mla"), "num_speculative_tokens": 3},
    "host": "127.0.0.1",
    # With graphs, as the service runs.
    "enforce-eager": False,
    # Of a GPU with 140 GB.
    "gpu-memory-utilization": 0.1,
}
KEY = "key-of-the-gpu-tests"


@dataclass
class Supervisor:
    """A running `aerie serve`, and how to talk to it and to its engine."""

    process: subprocess.Popen[bytes]
    status_port: int
    api_port: int
    log: Path
    folder: Path

    def status(self) -> dict[str, Any]:
        """Return what /status says; {} before it answers."""
        with contextlib.suppress(OSError, ValueError):
            found: dict[str, Any] = json.loads(get(f"http://127.0.0.1:{self.status_port}/status"))
            return found
        return {}

    def until(self, what: Callable[[dict[str, Any]], bool], seconds: float, pause: float = 0.1) -> dict[str, Any]:
        """Ask until `what` holds for the status, and return that; AssertionError with the log's end after `seconds`."""
        began = time.monotonic()
        while time.monotonic() - began < seconds:
            if what(status := self.status()):
                return status
            assert self.process.poll() is None, f"aerie serve ended with {self.process.poll()}:\n{self.said()[-3000:]}"
            time.sleep(pause)
        raise AssertionError(f"not within {seconds} s; {json.dumps(status)[:600]}\n{self.said()[-3000:]}")

    def ready(self, seconds: float = 240) -> dict[str, Any]:
        """Wait until it is ready."""
        return self.until(lambda status: status.get("phase") == "ready", seconds)

    def said(self) -> str:
        """Return all that it printed."""
        return self.log.read_text(errors="replace")

    def complete(self, prompt: object = "What is Aerie?", timeout: float = 60, **options: object) -> dict[str, Any]:
        """Ask for a completion; OSError where none comes."""
        body = {"model": BASE["served-model-name"], "prompt": prompt, "max_tokens": 32, "temperature": 0, **options}
        answer: dict[str, Any] = json.loads(get(f"http://127.0.0.1:{self.api_port}/v1/completions", body, timeout))
        return answer

    def processes(self, pattern: str) -> list[int]:
        """Return the engine's processes whose command lines match, by their ids here."""
        return [pid for pid, command in tree(self.process.pid).items() if re.search(pattern, command)]


def get(url: str, body: object = None, timeout: float = 5) -> bytes:
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
    with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=timeout) as answer:  # noqa: S310
        answered: bytes = answer.read()
    return answered


def tree(root: int) -> dict[int, str]:
    """Return the living processes below one, each with its command line."""
    parents, commands = {}, {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state, parent = (entry / "stat").read_text().rsplit(")", 1)[1].split()[:2]
            if state != "Z":
                parents[int(entry.name)] = int(parent)
                commands[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    below, last = {root}, 0
    while len(below) != last:
        last = len(below)
        below |= {pid for pid, parent in parents.items() if parent in below}
    return {pid: commands[pid] for pid in below - {root} if pid in commands}


@contextlib.contextmanager
def serving(
    overrides: Mapping[str, object] | None = None,
    environment: Mapping[str, str | None] | None = None,
    options: Sequence[str] = (),
) -> Iterator[Supervisor]:
    """Start `aerie serve` with `overrides` of the tiny configuration (`None` takes a key out) until the block's end."""
    with tempfile.TemporaryDirectory(prefix="aerie-serve-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        api_port, status_port = free_port(), free_port()
        config = {k: v for k, v in {**BASE, "port": api_port, **(overrides or {})}.items() if v is not None}
        (folder / "serve.yaml").write_text(yaml.safe_dump(config))
        (folder / "keys").write_text(KEY + "\n")
        (folder / "state").mkdir()
        log = folder / "log"
        command = [
            sys.executable, "-m", "aerie.cli", "serve", "--state-dir", str(folder / "state"),
            "--cache-dir", str(folder / "state"),
            "--api-keys-file", str(folder / "keys"), "--status-host", "127.0.0.1", "--status-port", str(status_port),
            *options, "--", "--config", str(folder / "serve.yaml"),
        ]  # fmt: skip
        # In this program's process group, with which it ends; the engine has another and ends with its supervisor.
        with log.open("wb") as output:
            process = subprocess.Popen(
                command, env=with_vllm(folder, environment or {}), cwd=folder,
                stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            )  # fmt: skip
        supervisor = Supervisor(process, status_port, api_port, log, folder)
        try:
            yield supervisor
        finally:
            engine = tree(process.pid)
            process.kill()
            process.wait()
            gone(engine)
            print(f"--- {config} {environment or {}}\n{supervisor.said()}\n---", flush=True)


def gone(pids: Iterable[int], seconds: float = 30) -> float:
    """Wait for the end of processes; return how long it took. AssertionError where one stays."""
    began = time.monotonic()
    while left := [pid for pid in pids if alive(pid)]:
        assert time.monotonic() - began < seconds, f"still there after {seconds} s: {left}"
        time.sleep(0.02)
    return time.monotonic() - began


def alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    return False


def with_vllm(folder: Path, changes: Mapping[str, str | None]) -> dict[str, str]:
    """Return the changed environment with a `vllm` on its PATH: where the package is only unpacked, there is none."""
    environment = {name: value for name, value in {**os.environ, **changes}.items() if value is not None}
    program = folder / "bin" / "vllm"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m vllm.entrypoints.cli.main "$@"\n')
    program.chmod(0o755)
    return environment | {"PATH": f"{program.parent}:{environment['PATH']}"}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port: int = listening.getsockname()[1]
    return port


def used_mib() -> list[int]:
    """Return the memory in use on each GPU, as the driver says."""
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return [int(line) for line in subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()]


OCCUPY = """
import sys, torch
leave, kept = int(sys.argv[1]) << 20, []
while (room := torch.cuda.mem_get_info()[0] - leave) > 0:
    kept.append(torch.empty(max(2 << 20, min(room, 8 << 30)), dtype=torch.uint8, device="cuda"))
print("taken", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def occupied(leave: int) -> Iterator[None]:
    """Let another process hold the first GPU's memory, all but `leave` MiB."""
    command = [sys.executable, "-c", OCCUPY, str(leave)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"taken\n", "the memory could not be taken"
            yield
        finally:
            process.send_signal(signal.SIGKILL)
