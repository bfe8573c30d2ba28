"""A play with one gate against the tests' own SSH server, followed line by line."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING

import yaml
from service import REPOSITORY

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Self

    from ssh import Server

TASK = """
- hosts: all
  gather_facts: false
  tasks:
    - name: Wait until the service is ready
      gate:
        project_dir: "{{ project_dir }}"
      register: outcome
    - name: A later task knows what came of it
      ansible.builtin.assert:
        that: [outcome.ready, outcome.verdict == 'ready', outcome.phase == 'ready', outcome is not changed]
      when: not ansible_check_mode
"""


class Play:
    """One run of `ansible-playbook` against the SSH server, with its output line by line."""

    def __init__(self, server: Server, project: Path, folder: Path, *args: str, **settings: str) -> None:
        playbook, inventory = folder / "play.yml", folder / "hosts.yml"
        playbook.write_text(TASK)
        options = f"-o StrictHostKeyChecking=no -o UserKnownHostsFile={folder}/known_hosts"
        host = {
            "ansible_host": "127.0.0.1", "ansible_port": server.port, "ansible_user": "root",
            "ansible_ssh_private_key_file": str(server.key), "ansible_ssh_common_args": options,
            "project_dir": str(project),
        }  # fmt: skip
        inventory.write_text(yaml.safe_dump({"all": {"hosts": {"gpu1": host}}}))
        environment = os.environ | {
            "ANSIBLE_CONFIG": str(REPOSITORY / "ansible/ansible.cfg"),
            "ANSIBLE_SSH_CONTROL_PATH_DIR": str(folder / "cp"),
            "ANSIBLE_NOCOLOR": "1",
            **settings,
        }
        environment.pop("PYTHONUNBUFFERED", None)  # with which a pipe would show every line anyway
        self.process = subprocess.Popen(
            [sys.executable, "-m", "ansible", "playbook", "-i", str(inventory), *args, str(playbook)],
            env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
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
        # With its workers, which would go on waiting.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._reader.join(10)
        if self.process.stdout:
            self.process.stdout.close()
