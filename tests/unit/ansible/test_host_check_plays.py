"""check.yml and verify.yml with the real role host_check, which shows its table once whatever it finds."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ANSIBLE = Path(__file__).parents[3] / "ansible"
SETTINGS = ["aerie_gpus=3000", "host_check_data_dir=/no/such/directory", "ansible_python_interpreter=" + sys.executable]


def play(name: str, *settings: str) -> tuple[int, str]:
    extra = [argument for setting in (*SETTINGS, *settings) for argument in ("-e", setting)]
    arguments = ["-i", ANSIBLE / "inventory/local", ANSIBLE / name, *extra, "--tags", "host_check"]
    done = subprocess.run(
        [sys.executable, "-m", "ansible", "playbook", *arguments],
        env=os.environ | {"ANSIBLE_CONFIG": str(ANSIBLE / "ansible.cfg"), "ANSIBLE_NOCOLOR": "1", "COLUMNS": "10000"},
        text=True, capture_output=True, check=False,
    )  # fmt: skip
    return done.returncode, " ".join((done.stdout + done.stderr).split())


@pytest.mark.parametrize("name", ["check.yml", "verify.yml"])
def test_the_table_is_shown_once(name: str) -> None:
    code, output = play(name)
    assert code == 2
    assert output.count("VERDICT CHECK VALUE WANTED") == 1
    assert "lines fail, which no role mends. What you know of and can live with goes into host_check_accept: " in output
    assert (
        "data: /no/such/directory is not there (wanted: a directory on a fast local disk). -> mount the disk" in output
    )


def test_a_string_of_checks_is_a_list_of_them() -> None:
    code, output = play("check.yml", "host_check_accept=gpus,data")
    assert "no such check" not in output
    assert "accepted gpus " in output
    assert "accepted data " in output
    assert output.count("VERDICT CHECK VALUE WANTED") == 1
    assert code == 0 or "FAIL" in output, output
