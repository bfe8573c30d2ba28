"""The action plugin `watched`, driven by ansible-playbook itself."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

REPOSITORY = Path(__file__).parents[3]
ANSIBLE_PLAYBOOK = [sys.executable, "-m", "ansible", "playbook"]


class Play:
    """One playbook of one task in a directory of its own."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.log = directory / "command.log"
        self.cut = directory / "cut"
        self.result_file = directory / "result.json"

    def start(
        self,
        *args: str,
        hosts: str = "alpha,",
        connection: str = "local",
        keywords: dict[str, Any] | None = None,
        **parameters: Any,
    ) -> subprocess.Popen[str]:
        """Start ansible-playbook; its output is one text stream."""
        task = {
            "name": "Watch it",
            "watched": {"log": str(self.log), **parameters},
            "register": "outcome",
            "ignore_errors": True,
            **(keywords or {}),
        }
        save = {
            "name": "Save the result",
            "ansible.builtin.copy": {"content": "{{ outcome }}", "dest": str(self.result_file), "mode": "0600"},
            "delegate_to": "localhost",
            "connection": "local",
            "run_once": True,
            "check_mode": False,
        }
        playbook = self.directory / "play.yml"
        playbook.write_text(
            yaml.safe_dump([{"hosts": "all", "connection": connection, "gather_facts": False, "tasks": [task, save]}])
        )
        environment = os.environ | {
            "ANSIBLE_ACTION_PLUGINS": str(REPOSITORY / "ansible/plugins/action"),
            "ANSIBLE_CONNECTION_PLUGINS": str(Path(__file__).parent / "connection_plugins"),
            "ANSIBLE_FLAKY_CUT": str(self.cut),
            "ANSIBLE_PYTHON_INTERPRETER": sys.executable,
            "ANSIBLE_NOCOLOR": "1",
        }
        environment.pop("PYTHONUNBUFFERED", None)  # with which a pipe would show every line anyway
        return subprocess.Popen(
            [*ANSIBLE_PLAYBOOK, "-i", hosts, *args, str(playbook)],
            cwd=self.directory,
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def run(self, *args: str, **options: Any) -> tuple[dict[str, Any], str]:
        """Run to the end; returns the task's registered result and everything that was printed."""
        with self.start(*args, **options) as process:
            output, _ = process.communicate(timeout=60)
        assert self.result_file.exists(), output
        return json.loads(self.result_file.read_text()), output


@pytest.fixture
def play(tmp_path: Path) -> Play:
    return Play(tmp_path)


def wait_for(condition: Any, seconds: float = 20.0) -> None:
    """Wait until condition() is true, at most `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def test_returns_exit_status_and_output(play: Play) -> None:
    result, output = play.run(cmd="echo first; echo 'sec\"ond $HOME' >&2; printf unfinished", label="greeting")
    assert result["rc"] == 0
    assert result["changed"] is True
    assert result["stdout_lines"] == ["first", 'sec"ond $HOME', "unfinished"]
    assert play.log.read_text() == 'first\nsec"ond $HOME\nunfinished'
    assert "first" in output
    assert "greeting" in output


def test_shows_lines_while_the_command_still_runs(play: Play) -> None:
    gate = play.directory / "gate"
    with play.start(cmd=f"echo early bird; until [ -e {gate} ]; do sleep 0.1; done; echo late") as process:
        assert process.stdout
        for line in process.stdout:
            if "early bird" in line:
                break
        else:
            pytest.fail("ended without having shown the line")
        assert process.poll() is None
        gate.touch()
        rest, _ = process.communicate(timeout=30)
    assert "late" in rest


def test_a_failure_names_the_log_and_ends_with_its_last_lines(play: Play) -> None:
    result, _ = play.run(cmd="seq 1 500; echo the cause; exit 7", label="build")
    assert result["failed"] is True
    assert result["rc"] == 7
    assert "build" in result["msg"]
    assert "exit status 7" in result["msg"]
    assert str(play.log) in result["msg"]
    assert result["msg"].rstrip().endswith("the cause")
    assert "\n1\n" not in result["msg"]


def test_a_log_longer_than_one_poll_is_complete(play: Play) -> None:
    result, output = play.run(cmd="seq 1 600000; echo at the end", show="^(1|300000|600000|at the end)$")
    shown = [line.split()[-1] for line in output.splitlines() if line.startswith("    ")]
    assert shown[-4:] == ["1", "300000", "600000", "end"]
    assert result["stdout_lines"][-1] == "at the end"


def test_show_selects_what_is_displayed_and_not_what_is_kept(play: Play) -> None:
    result, output = play.run(cmd="echo Step 1; echo chatter; echo Step 2", show="^Step")
    assert "Step 2" in output
    assert "chatter" not in output
    assert "chatter" in result["stdout"]


def test_progress_bars_and_escapes_become_plain_lines(play: Play) -> None:
    _, output = play.run(cmd=r"printf 'at 10%%\rat 20%%\r\n\033[31mred\033[0m \377\n'")
    assert "\x1b" not in output
    assert any(line.endswith("at 20%") for line in output.splitlines())
    assert any(line.endswith("red �") for line in output.splitlines())


def test_creates_skips_a_command_that_was_done(play: Play) -> None:
    made = play.directory / "made here"
    first, _ = play.run(cmd=f"touch '{made}'", creates=str(made))
    second, _ = play.run(cmd="exit 1", creates=str(made))
    assert first["changed"] is True
    assert second["changed"] is False
    assert second.get("failed", False) is False
    assert str(made) in second["msg"]


def test_check_mode_runs_nothing(play: Play) -> None:
    made = play.directory / "made"
    plain, _ = play.run("--check", cmd=f"touch {made}")
    with_creates, _ = play.run("--check", cmd=f"touch {made}", creates=str(made))
    assert plain["skipped"] is True
    assert with_creates["changed"] is True
    assert not made.exists()
    assert not play.log.exists()


def test_directory_and_environment(play: Play) -> None:
    (play.directory / "in here").mkdir()
    result, _ = play.run(
        cmd='pwd; echo "$GREETING"',
        chdir=str(play.directory / "in here"),
        keywords={"environment": {"GREETING": "it's a 'quoted' \"one\""}},
    )
    assert result["stdout_lines"] == [str(play.directory / "in here"), "it's a 'quoted' \"one\""]


def test_a_missing_directory_is_named(play: Play) -> None:
    result, _ = play.run(cmd="true", chdir="/no/such/place")
    assert result["failed"] is True
    assert "/no/such/place" in result["msg"]


def test_a_log_that_cannot_be_written_is_named(play: Play) -> None:
    play.log = play.directory / "missing" / "command.log"
    result, _ = play.run(cmd="true")
    assert result["failed"] is True
    assert str(play.log) in result["msg"]


def test_an_unknown_parameter_is_refused(play: Play) -> None:
    result, _ = play.run(cmd="true", timeout=5)
    assert result["failed"] is True
    assert "timeout" in result["msg"]


def test_lines_name_their_host_when_there_are_several(play: Play) -> None:
    # One log a host: both "hosts" are this machine.
    play.log = Path(f"{play.directory}/{{{{ inventory_hostname }}}}.log")
    _, output = play.run(cmd="echo done by {{ inventory_hostname }}", hosts="alpha,beta,")
    assert any("alpha" in line.split("done by")[0] for line in output.splitlines() if "done by alpha" in line)
    assert any("beta" in line.split("done by")[0] for line in output.splitlines() if "done by beta" in line)


def test_a_secret_task_displays_nothing(play: Play) -> None:
    _, output = play.run(cmd="echo hush-hush", keywords={"no_log": True})
    assert "hush-hush" not in output


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_play_ends_the_command_and_its_children(play: Play, sent: signal.Signals) -> None:
    pids = play.directory / "pids"
    with play.start(cmd=f"sleep 300 & echo $! >>{pids}; echo $$ >>{pids}; echo going; wait") as process:
        wait_for(lambda: pids.exists() and len(pids.read_text().split()) == 2)
        time.sleep(0.5)
        process.send_signal(sent)
        process.communicate(timeout=30)
    assert process.returncode != 0
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids.read_text().split()))


def test_a_rerun_joins_a_command_whose_controller_was_lost(play: Play) -> None:
    gate, count = play.directory / "gate", play.directory / "count"
    command = f"echo x >>{count}; until [ -e {gate} ]; do sleep 0.1; done; echo finished"
    with play.start(cmd=command) as process:
        wait_for(count.exists)
        process.kill()
    play.result_file.unlink(missing_ok=True)

    with play.start(cmd="echo another command") as process:
        process.communicate(timeout=30)
    refused = json.loads(play.result_file.read_text())
    assert refused["failed"] is True
    assert "still running" in refused["msg"]

    with play.start(cmd=command) as process:
        assert process.stdout
        while "joined" not in (line := process.stdout.readline()):
            assert line, "ended without having joined"
        gate.touch()
        process.communicate(timeout=30)
    result = json.loads(play.result_file.read_text())
    assert result["rc"] == 0
    assert result["stdout_lines"][-1] == "finished"
    assert count.read_text() == "x\n"


def test_a_killed_command_is_reported(play: Play) -> None:
    pid = play.directory / "pid"
    with play.start(cmd=f"echo $PPID >{pid}; exec sleep 5") as process:
        wait_for(lambda: pid.exists() and pid.read_text())
        os.kill(int(pid.read_text()), signal.SIGKILL)
        process.communicate(timeout=30)
    result = json.loads(play.result_file.read_text())
    assert result["failed"] is True
    assert "without an exit status" in result["msg"]


def test_a_connection_that_drops_out_loses_nothing(play: Play) -> None:
    with play.start(cmd="echo before; sleep 4; echo after", connection="flaky") as process:
        wait_for(lambda: play.log.exists() and "before" in play.log.read_text())
        play.cut.touch()
        wait_for(lambda: "after" in play.log.read_text())
        play.cut.unlink()
        output, _ = process.communicate(timeout=30)
    result = json.loads(play.result_file.read_text())
    assert result["rc"] == 0, output
    assert result["stdout_lines"] == ["before", "after"]
    assert "the cable is out" in output


def test_a_host_that_stays_away_is_unreachable(play: Play) -> None:
    with play.start(cmd="sleep 5", connection="flaky", unreachable_timeout=1) as process:
        wait_for(play.log.exists)
        play.cut.touch()
        output, _ = process.communicate(timeout=30)
    assert process.returncode == 4, output
    assert "UNREACHABLE" in output
