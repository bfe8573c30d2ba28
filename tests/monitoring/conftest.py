"""Debian's promtool and prometheus, which are unpacked and not installed: the package would start a service."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
UNPACKED = ROOT / ".aerie/prometheus/usr/bin"


def program(name):
    found = shutil.which(name, path=UNPACKED) or shutil.which(name)
    if found is None:
        pytest.fail(f"there is no {name} in {UNPACKED} or on PATH; `./run test-monitoring` gets it", pytrace=False)
    return found


@pytest.fixture(scope="session")
def prometheus():
    """The server's path."""
    return program("prometheus")


@pytest.fixture(scope="session")
def promtool():
    """Run promtool and return what it printed; it must be content."""

    def run(*arguments, text=None):
        command = [program("promtool"), *map(str, arguments)]
        done = subprocess.run(
            command, input=text, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, timeout=120
        )
        assert done.returncode == 0, done.stdout
        return done.stdout

    return run
