"""A second `./run up` changes nothing."""

from __future__ import annotations

import re
import subprocess

from service import REPOSITORY, Service


def test_a_second_up_changes_nothing(running: Service) -> None:
    before = running.container()
    again = subprocess.run(
        [REPOSITORY / "run", "up"], text=True, capture_output=True, check=False, stdin=subprocess.DEVNULL
    )
    assert again.returncode == 0, again.stdout + again.stderr
    assert re.search(r"\bchanged=0\b", again.stdout), again.stdout
    after = running.container()
    assert (after["Id"], after["State"]["StartedAt"]) == (before["Id"], before["State"]["StartedAt"])
