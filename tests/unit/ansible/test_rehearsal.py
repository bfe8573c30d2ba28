"""The role's tasks before a start, run by ansible-playbook itself on this machine; in place of Docker a script."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

if TYPE_CHECKING:
    from collections.abc import Iterator

REPOSITORY = Path(__file__).parents[3]
REPORT = {"verdict": "passed", "ran": True, "seconds": 2.0, "kind": "static", "findings": [], "diagnosis": None}
# A rehearsal goes on until the test lets it end; then it says that its configuration passed, if it says anything.
DOCKER = """#!/bin/sh
case "$*" in
  "image inspect "*) echo sha256:of-a-test ;;
  "compose run "*)
    echo x >>{directory}/rehearsals
    until [ -e {directory}/end ]; do sleep 0.1; done
    cat {directory}/report.json ;;
esac
"""

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="the role writes files that belong to root")


class Play:
    """A play of the role's rehearsal alone, in a directory of its own."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.project = directory / "project"
        self.end, self.rehearsals = directory / "end", directory / "rehearsals"
        (directory / "report.json").write_text(json.dumps(REPORT))
        docker = directory / "bin" / "docker"
        docker.parent.mkdir()
        docker.write_text(DOCKER.format(directory=directory))
        docker.chmod(0o755)

    def start(self, **variables: Any) -> subprocess.Popen[str]:
        """Start it, with these variables of the role."""
        role = {
            "name": "Rehearse",
            "ansible.builtin.include_role": {"name": "vllm", "tasks_from": "rehearsal.yml"},
            "vars": {
                "vllm_flavour": "cpu",
                "vllm_kernel_log": False,
                "vllm_project_dir": str(self.project),
                "__vllm_image": "aerie:of-a-test",
                "__vllm_running": {"stdout_lines": []},
                **variables,
            },
        }
        playbook = self.directory / "play.yml"
        playbook.write_text(yaml.safe_dump([{"hosts": "all", "gather_facts": False, "tasks": [role]}]))
        environment = os.environ | {
            "ANSIBLE_CONFIG": str(REPOSITORY / "ansible/ansible.cfg"),
            "ANSIBLE_PYTHON_INTERPRETER": sys.executable,
            "ANSIBLE_NOCOLOR": "1",
            "PATH": f"{self.directory}/bin:{os.environ['PATH']}",
        }
        return subprocess.Popen(
            [sys.executable, "-m", "ansible", "playbook", "-i", "alpha,", "-c", "local", str(playbook)],
            cwd=self.directory,
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def run(self, **variables: Any) -> tuple[int, str]:
        """Run it to its end; returns its exit status and what it printed."""
        with self.start(**variables) as process:
            try:
                output, _ = process.communicate(timeout=60)
            except subprocess.TimeoutExpired:
                self.end.touch()  # what it waits for, or joined
                output, _ = process.communicate(timeout=60)
                pytest.fail(f"it had not ended after 60 s: {output}")
        return process.returncode, output

    def lose_the_controller(self, **variables: Any) -> None:
        """Start it, and kill it while the rehearsal runs, which goes on."""
        with self.start(**variables) as process:
            deadline = time.monotonic() + 60
            while not self.rehearsals.exists():
                assert process.poll() is None, "no rehearsal was started"
                assert time.monotonic() < deadline, "no rehearsal was started"
                time.sleep(0.05)
            process.kill()


@pytest.fixture
def play(tmp_path: Path) -> Iterator[Play]:
    play = Play(tmp_path)
    yield play
    play.end.touch()  # so that no rehearsal outlives its test


def test_a_rerun_joins_the_rehearsal_of_the_very_same_thing_alone(play: Play) -> None:
    play.lose_the_controller(vllm_engine_overrides={"max-num-seqs": 5})

    # A report that it passed is there; what still runs is of the configuration before.
    (play.project / "rehearsal.json").write_text(json.dumps(REPORT))
    code, output = play.run(vllm_engine_overrides={"max-num-seqs": 6})
    assert code == 2, output
    assert "still running" in output
    assert "kill -s TERM" in output

    with play.start(vllm_engine_overrides={"max-num-seqs": 5}) as process:
        assert process.stdout
        while "joined" not in (line := process.stdout.readline()):
            assert line, "ended without having joined"
        play.end.touch()
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    assert "The rehearsal passed" in output
    assert play.rehearsals.read_text() == "x\n"
