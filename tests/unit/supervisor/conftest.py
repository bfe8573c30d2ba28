"""`aerie serve` as a process of its own, with a stand-in for `vllm` on its PATH."""

import fcntl
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from aerie.supervisor.retry import RETRY

STUB = Path(__file__).with_name("engine_stub.py")
SOURCE = Path(__file__).parents[3] / "src"


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Serving:
    """One `aerie serve`, its files, its two ports and what can be asked of it."""

    PATIENCE = 120.0  # seconds until a test gives up; none waits that long but to fail, on however slow a machine

    def __init__(self, directory):
        self.directory = directory
        self.api_port, self.status_port = free_port(), free_port()
        self.keys = directory / "api-keys"
        self.keys.write_text("test-key\n")
        self.state_file = directory / "state" / "state.json"
        self.state_file.parent.mkdir()
        (directory / "cache").mkdir()
        (directory / "bin").mkdir()
        (directory / "bin" / "vllm").symlink_to(STUB)
        self.process = None

    @contextmanager
    def run(self, *options, model="org/model", arguments=(), **stub):
        self.start(*options, model=model, arguments=arguments, **stub)
        try:
            yield self
        finally:
            if self.process.poll() is None:
                self.process.send_signal(signal.SIGTERM)
                self.process.send_signal(signal.SIGTERM)
                self.process.wait(self.PATIENCE)
            self.close()

    def start(self, *options, model="org/model", arguments=(), stdout=subprocess.PIPE, **stub):
        kept = ["--state-dir", self.state_file.parent, "--cache-dir", self.directory / "cache"]
        own = [*kept, "--status-host", "127.0.0.1", "--status-port", self.status_port]
        engine = [model, "--served-model-name", "kimi", "--host", "127.0.0.1", "--port", self.api_port, *arguments]
        command = [
            sys.executable,
            "-m",
            "aerie.cli",
            "serve",
            *own,
            "--api-keys-file",
            self.keys,
            *options,
            "--",
            *engine,
        ]
        self.process = subprocess.Popen(
            list(map(str, command)),
            cwd=self.directory,
            env=os.environ
            | {
                "PATH": f"{self.directory}/bin:{os.environ['PATH']}",
                "PYTHONPATH": str(SOURCE),
                "STUB": json.dumps(stub),
            },
            stdout=stdout,
            stderr=subprocess.PIPE if stdout is subprocess.PIPE else stdout,
        )

    def retry(self):
        """Run `aerie retry` beside the service; return (exit code, what it said)."""
        command = [sys.executable, "-m", "aerie.cli", "retry", "--state-dir", self.state_file.parent]
        environment = os.environ | {"PYTHONPATH": str(SOURCE)}
        ran = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=self.PATIENCE, check=False
        )
        return ran.returncode, (ran.stdout or ran.stderr).strip()

    def close(self):
        for pipe in (self.process.stdout, self.process.stderr):
            pipe.close()

    def core_is_gone(self):
        """Return whether the stand-in's second process has let its lock go."""
        with (self.directory / "core.lock").open() as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            return True

    def end(self):
        """Return (exit code, stdout, stderr) of a service that ends by itself."""
        stdout, stderr = self.process.communicate(timeout=self.PATIENCE)
        return self.process.returncode, stdout, stderr.decode()

    def get(self, path):
        connection = http.client.HTTPConnection("127.0.0.1", self.status_port, timeout=self.PATIENCE)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read().decode()
        except OSError:
            return 0, ""
        finally:
            connection.close()

    def state(self):
        status, text = self.get("/status")
        return json.loads(text) if status else {"phase": None}

    def kept_state(self):
        return json.loads(self.state_file.read_text())

    def until(self, condition, what):
        """Wait for a true value of `condition` and return it; fail with `what` if there is none."""
        deadline = time.monotonic() + self.PATIENCE
        while not (value := condition()):
            assert time.monotonic() < deadline, f"waited {self.PATIENCE} s for {what}"
            time.sleep(0.02)
        return value

    def until_phase(self, phase):
        return self.until(lambda: (state := self.state())["phase"] == phase and state, f"phase {phase}")

    def until_kept(self, phase):
        return self.until(lambda: (state := self.kept_state())["phase"] == phase and state, f"{phase} in the file")

    def retry_at_once(self):
        """Do what `aerie retry` does, without another process for it."""
        self.process.send_signal(RETRY)


@pytest.fixture
def serving(tmp_path):
    return Serving(tmp_path)
