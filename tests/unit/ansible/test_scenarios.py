"""The runner of Molecule scenarios, with a program in Molecule's place that does what a test says."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

RUNNER = Path(__file__).parents[3] / "ansible/molecule/scenarios.py"
# Notes each begin and end with what tells the runs apart, then does what lies in the project's file of that command.
MOLECULE = """#!/bin/sh
name="$(basename "$PWD")/$3"
echo "begin $1 $name $ANSIBLE_HOME" >>"$CALLS"
trap 'echo "interrupted $1 $name" >>"$CALLS"; exit 1' INT
echo "output of $1 $name"
if [ -e "$1" ]; then . "./$1"; fi
echo "end $1 $name" >>"$CALLS"
exit ${code:-0}
"""


class Tree:
    """A repository that has the runner, and scenarios without content."""

    def __init__(self, root: Path) -> None:
        self.root, self.calls, self.logs = root, root / "calls", root / ".aerie/molecule"
        (root / "bin").mkdir(parents=True)
        (root / "bin/molecule").write_text(MOLECULE)
        (root / "bin/molecule").chmod(0o755)
        (root / "ansible/molecule").mkdir(parents=True)
        shutil.copy(RUNNER, root / "ansible/molecule")
        for project, name in (("docker", "vendor"), ("docker", "default"), ("vllm", "default"), ("toolkit", "default")):
            self.add(root / "ansible/roles" / project / "molecule" / name)
        self.add(root / "ansible/molecule/site/molecule/default")

    @staticmethod
    def add(scenario: Path) -> None:
        scenario.mkdir(parents=True)
        (scenario / "molecule.yml").touch()

    def does(self, role: str, command: str, script: str) -> None:
        """Let Molecule's command do this in the role's directory."""
        (self.root / "ansible/roles" / role / command).write_text(script)

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        environment = os.environ | {"PATH": f"{self.root}/bin:{os.environ['PATH']}", "CALLS": str(self.calls)}
        program = self.root / "ansible/molecule/scenarios.py"
        return subprocess.Popen(
            [sys.executable, program, *arguments], env=environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip

    def run(self, *arguments: str) -> tuple[int, str, str]:
        with self.start(*arguments) as process:
            output, errors = process.communicate(timeout=60)
        return process.returncode, output, errors

    def called(self, *wanted: str) -> list[str]:
        """Return the notes that begin so, in the order of the runs."""
        lines = self.calls.read_text().splitlines() if self.calls.exists() else []
        return [" ".join(line.split()[:3]) for line in lines if line.startswith(wanted)]


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path / "a tree")


def test_every_scenario_is_found_and_the_longest_begins_first(tree: Tree) -> None:
    code, output, _ = tree.run("--list")
    assert code == 0
    assert output.split() == ["vllm/default", "site/default", "docker/default", "docker/vendor", "toolkit/default"]
    assert not tree.calls.exists()


def test_the_repositorys_own_are_all_found() -> None:
    listed = subprocess.run([sys.executable, RUNNER, "--list"], text=True, capture_output=True, check=True).stdout
    files = RUNNER.parents[1].rglob("molecule.yml")
    assert len(listed.split()) == len([file for file in files if "molecule" in file.parts[-3:]]) >= 3
    longest = re.search(r"^LONGEST = \((.*?)\)$", RUNNER.read_text(), re.MULTILINE | re.DOTALL)
    assert longest
    names = re.findall(r'"([^"]+)"', longest[1])
    # Also, that none of them is another's old name.
    assert len(names) >= 5
    assert listed.split()[: len(names)] == names


def test_so_many_run_at_once_and_no_more(tree: Tree) -> None:
    for role in ("docker", "vllm", "toolkit"):
        tree.does(role, "test", "sleep 0.3")
    code, output, errors = tree.run("--at-once", "2")
    assert code == 0, errors
    assert output.splitlines()[-1] == "5 passed, 0 failed"
    now, most = 0, 0
    for note in tree.called("begin test", "end test"):
        now += 1 if note.startswith("begin") else -1
        most = max(most, now)
    assert (now, most) == (0, 2)
    assert "passed  site/default: 0 s" in output


def test_no_two_share_what_ansible_keeps(tree: Tree) -> None:
    tree.run()
    homes = {line.split(maxsplit=3)[3] for line in tree.calls.read_text().splitlines() if line.startswith("begin test")}
    assert len(homes) == 5


def test_all_that_fail_are_told_with_the_end_of_their_logs(tree: Tree) -> None:
    tree.does("docker", "test", "seq 1000; echo no such thing >&2; code=2")
    code, output, _ = tree.run()
    assert code == 1
    assert output.splitlines()[-3:] == ["  failed: docker/default", "  failed: docker/vendor", "3 passed, 2 failed"]
    log = tree.logs / "docker-vendor.log"
    assert "output of test docker/vendor" in log.read_text()
    assert f"All of it: {log}" in output
    assert output.count("no such thing") == 2
    assert "\n1000\n" in output
    assert "\n10\n" not in output


def test_a_single_one_is_shown_as_it_runs(tree: Tree) -> None:
    tree.does("vllm", "test", "sleep 30 & wait")
    with tree.start("vllm") as process:
        assert process.stdout
        shown = [process.stdout.readline() for _ in range(2)]
        assert "output of test vllm/default" in shown[1]
        os.kill(process.pid, signal.SIGTERM)
        process.communicate(timeout=60)
    assert process.returncode == 130


def test_what_is_asked_for_runs_and_nothing_else(tree: Tree) -> None:
    assert tree.run("docker/vendor", "site")[0] == 0
    assert sorted(tree.called("begin test")) == ["begin test docker/vendor", "begin test site/default"]


def test_a_name_that_is_none_is_refused_with_those_that_are(tree: Tree) -> None:
    code, _, errors = tree.run("docker", "dokcer")
    assert code == 2
    assert "no Molecule scenario is called dokcer; there are vllm/default, site/default, docker/default" in errors
    assert not tree.calls.exists()


def test_an_interrupt_ends_what_runs_and_destroys_its_instances(tree: Tree) -> None:
    for role in ("docker", "vllm"):
        # In the background and waited for, since a shell takes a signal only between two commands.
        tree.does(role, "test", "sleep 30 & wait")
    with tree.start("--at-once", "2", "docker", "vllm") as process:
        while len(tree.called("begin test")) < 2:
            time.sleep(0.05)
        began = time.monotonic()
        tree.calls.write_text("")
        os.kill(process.pid, signal.SIGINT)
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert time.monotonic() - began < 10
    assert sorted(tree.called("interrupted", "begin")) == [
        "begin destroy docker/default", "begin destroy vllm/default",
        "interrupted test docker/default", "interrupted test vllm/default",
    ]  # fmt: skip
    assert "passed" not in output
