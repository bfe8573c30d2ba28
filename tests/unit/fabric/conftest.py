"""Stand-ins for the programs that move bytes: what a test lets them do is all that they do."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

BEGINNING = """
import json, os, signal, sys, time
from aerie.fabric.children import Telling
tell = Telling(*map(int, sys.argv[-2:]))
arguments = sys.argv[1:-2]
"""


@pytest.fixture
def stand_in(tmp_path):
    """Make the command of a child that does what `body` says, with `tell` and `arguments` at hand."""

    def make(body):
        program = tmp_path / "stand_in.py"
        program.write_text(BEGINNING + body)
        return [sys.executable, "-P", str(program)]

    return make


@pytest.fixture
def said():
    """What was told of the steps."""
    return []


@pytest.fixture
def environment():
    """Enough for a child to import Aerie."""
    return {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(Path(__file__).parents[3] / "src")}


@pytest.fixture
def gone():
    """Say whether a process has ended, waiting a little for it."""

    def has(pid):
        for _ in range(100):
            try:
                state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                return True
            if state == "Z":
                return True
            time.sleep(0.05)
        return False

    return has


@pytest.fixture
def aerie(environment):
    """Start `aerie` in a process of its own."""
    running = []

    def start(*arguments, **more):
        process = subprocess.Popen(
            [sys.executable, "-m", "aerie.cli", *arguments],
            env=environment | more, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        running.append(process)
        return process

    yield start
    for process in running:
        process.kill()
        process.communicate()
