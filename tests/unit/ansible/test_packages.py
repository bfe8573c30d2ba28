"""The action plugin `packages`, driven by ansible-playbook itself, with scripts in apt's place."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from aerie_host import apt

ANSIBLE = Path(__file__).parents[3] / "ansible"
HELD = "E: Could not get lock /var/lib/apt/lists/lock. It is held by process 4242 (apt-get)"


class Play:
    """One task in a directory of its own; `log` and `count` (a line for each attempt) are files in there."""

    def __init__(self, directory: Path) -> None:
        self.log, self.count = directory / "apt.log", directory / "count"
        self._directory = directory

    def run(
        self, cmd: str, *args: str, keywords: dict[str, Any] | None = None, **parameters: Any
    ) -> tuple[dict[str, Any], str]:
        """Return the task's result and everything that was printed."""
        own = {
            "what": "The driver",
            "label": "driver packages",
            "log": str(self.log),
            "lock_timeout": 0,
            "lock_variable": "nvidia_driver_lock_timeout",
        }
        task = {
            "name": "Install",
            "packages": own | parameters | {"cmd": f"echo >>{self.count}; {cmd}"},
            "register": "outcome",
            "ignore_errors": True,
            **(keywords or {}),
        }
        save = {
            "name": "Save the result",
            "ansible.builtin.copy": {"content": "{{ outcome }}", "dest": f"{self._directory}/result", "mode": "0600"},
            "check_mode": False,
        }
        playbook = self._directory / "play.yml"
        playbook.write_text(yaml.safe_dump([{"hosts": "all", "gather_facts": False, "tasks": [task, save]}]))
        done = subprocess.run(
            [sys.executable, "-m", "ansible", "playbook", "-i", "gpu-1,", "-c", "local", *args, str(playbook)],
            cwd=self._directory,
            env=os.environ
            | {
                "ANSIBLE_CONFIG": str(ANSIBLE / "ansible.cfg"),
                "ANSIBLE_PYTHON_INTERPRETER": sys.executable,
                "ANSIBLE_NOCOLOR": "1",
            },
            text=True,
            capture_output=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads((self._directory / "result").read_text()), done.stdout

    def attempts(self) -> int:
        return len(self.count.read_text().splitlines())


@pytest.fixture
def play(tmp_path: Path) -> Play:
    return Play(tmp_path)


def test_what_was_installed_is_shown_and_returned(play: Play) -> None:
    result, output = play.run("echo Setting up docker.io; echo chatter", show="^Setting up")
    assert result["failed"] is False
    assert result["changed"] is True
    assert result["stdout_lines"] == ["Setting up docker.io", "chatter"]
    assert "driver packages 0:00 Setting up docker.io" in output
    assert "chatter" not in output


def test_a_failure_is_one_message(play: Play) -> None:
    said = "E: dpkg was interrupted, you must manually run dpkg --configure -a to correct the problem."
    result, _ = play.run(f"echo chatter; echo '{said}' >&2; exit 100")
    assert result["failed"] is True
    assert result["msg"] == (
        "The driver could not be installed on gpu-1. An earlier installation was cut short, so let dpkg end it there "
        f"(dpkg --configure -a), then run this again. {play.log}: {said}"
    )
    assert (result["rc"], result["log"]) == (100, str(play.log))
    # Ansible prints whatever is there.
    assert not {"stdout", "stdout_lines"} & result.keys()
    assert play.attempts() == 1


def test_a_role_has_its_own_words_for_some_kinds(play: Play) -> None:
    meanings = {"missing": "It has no such branch: set nvidia_driver_branch", "conflict": ""}
    missing, _ = play.run("echo 'E: Unable to locate package nvidia-9'; exit 100", meanings=meanings)
    assert " on gpu-1. It has no such branch: set nvidia_driver_branch, then run this again. " in missing["msg"]
    general, _ = play.run("echo 'E: you have held broken packages.'; exit 100", meanings=meanings)
    assert " on gpu-1. Packages stand against each other: " in general["msg"]


def test_a_kind_that_does_not_exist_is_refused(play: Play) -> None:
    result, _ = play.run("true", meanings={"mising": "It has no such branch"})
    assert result["failed"] is True
    assert "mising" in result["msg"]
    assert not play.count.exists()


def test_an_unknown_failure_tells_its_last_words(play: Play) -> None:
    result, _ = play.run("seq 5; exit 3")
    assert result["msg"] == (
        "The driver could not be installed on gpu-1. It ended with exit status 3, so see why, then run this again. "
        f"{play.log}: 3 4 5"
    )


def test_the_words_of_others_sources_tell_nothing(play: Play) -> None:
    cmd = f"echo 'others: {HELD}'; echo 'others: E: held packages'; echo 'E: Unable to locate package x'; exit 100"
    result, _ = play.run(cmd, others="^others: ", lock_timeout=60)
    assert " on gpu-1. The repositories lack a package" in result["msg"]
    assert result["msg"].endswith(f"{play.log}: E: Unable to locate package x")
    assert play.attempts() == 1


def test_apts_own_lock_is_waited_for(play: Play) -> None:
    cmd = f"[ $(wc -l <{play.count}) = 3 ] || {{ echo '{HELD}'; exit 100; }}; echo installed"
    result, output = play.run(cmd, lock_timeout=60)
    assert result["failed"] is False
    assert result["stdout_lines"] == ["installed"]
    assert play.attempts() == 3
    (told,) = [line for line in output.splitlines() if " waits " in line]
    assert told.lstrip().startswith(
        "driver packages 0:00 waits for /var/lib/apt/lists/lock, held by process 4242 (apt-get), 60"
    )


def test_the_wait_has_an_end(play: Play) -> None:
    result, _ = play.run(f"echo '{HELD}'; exit 100", lock_timeout=2)
    assert " Another program had apt's lock for 2 seconds (nvidia_driver_lock_timeout): let it end, " in result["msg"]
    assert result["msg"].endswith(HELD)
    assert play.attempts() == 2


def test_the_wait_begins_when_the_lock_is_met(play: Play) -> None:
    cmd = f"[ $(wc -l <{play.count}) = 2 ] || {{ sleep 2.5; echo '{HELD}'; exit 100; }}; echo installed"
    result, _ = play.run(cmd, lock_timeout=2)
    assert result["stdout_lines"] == ["installed"]


def test_dpkgs_lock_is_waited_for_where_apt_has_not(play: Play) -> None:
    held = "dpkg: error: dpkg frontend lock was locked by another process with pid 86"
    cmd = f"[ $(wc -l <{play.count}) = 2 ] || {{ echo '{held}'; exit 100; }}; echo installed"
    result, output = play.run(cmd, lock_timeout=60)
    assert result["stdout_lines"] == ["installed"]
    assert "driver packages 0:00 waits for dpkg frontend lock, held by another process with pid 86, 60" in output


def test_dpkgs_lock_is_not_waited_for_anew_where_apt_has(play: Play) -> None:
    held = "E: Unable to acquire the dpkg frontend lock (/var/lib/dpkg/lock-frontend), is another process using it?"
    result, _ = play.run(f"sleep 2; echo '{held}'; exit 100", lock_timeout=2)
    assert " Another program had dpkg's lock for 2 seconds (nvidia_driver_lock_timeout): " in result["msg"]
    assert play.attempts() == 1


def test_apt_speaks_as_it_is_written(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LC_ALL", "C.UTF-8")
    result, _ = play.run("echo $LC_ALL $GREETING", keywords={"environment": {"GREETING": "hello"}})
    assert result["stdout_lines"] == ["C hello"]


def test_check_mode_installs_nothing(play: Play) -> None:
    result, _ = play.run("true", "--check")
    assert result["skipped"] is True
    assert not play.count.exists()


@pytest.mark.parametrize("role", ["nvidia_driver", "nvidia_container_toolkit"])
def test_the_kinds_of_which_a_role_speaks_are_there(role: str) -> None:
    variables = yaml.safe_load((ANSIBLE / f"roles/{role}/vars/main.yml").read_text())
    assert variables[f"__{role}_meanings"].keys() <= apt.KINDS.keys()
