"""A play of some tasks on this machine, run by the real Ansible, which notes what came of each case."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

REPOSITORY = Path(__file__).parents[1]


def outcomes_of(tasks: list[dict[str, Any]], directory: Path, *programs: Path) -> dict[str, Any]:
    """Run the tasks, with the directories of `programs` first on PATH, and return the fact `outcomes` that they set."""
    file = directory / "outcomes.json"
    last = {"ansible.builtin.copy": {"content": "{{ outcomes | to_json }}", "dest": str(file), "mode": "0600"}}
    play = [
        {"name": "Try", "hosts": "localhost", "connection": "local", "gather_facts": False, "tasks": [*tasks, last]}
    ]
    (directory / "play.yml").write_text(yaml.safe_dump(play))
    done = subprocess.run(
        [sys.executable, "-m", "ansible", "playbook", "-i", "localhost,", str(directory / "play.yml")],
        env={
            "PATH": ":".join([*map(str, programs), str(Path(sys.executable).parent), "/usr/bin", "/bin"]),
            "ANSIBLE_CONFIG": str(REPOSITORY / "ansible/ansible.cfg"),
            "HOME": str(directory),
            "LC_ALL": "C.UTF-8",
        },
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    outcomes: dict[str, Any] = json.loads(file.read_text())
    return outcomes
