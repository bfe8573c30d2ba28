"""The script `run` itself: what it says before anything was set up, and that two do not get in each other's way."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "run"


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A directory with the script alone, as a clone in which nothing was set up yet; its path has a space."""
    directory = tmp_path / "a clone"
    directory.mkdir()
    shutil.copy(SCRIPT, directory)
    return directory


@pytest.fixture
def set_up(clone: Path) -> Path:
    """A clone with Aerie's sources and a .venv for `model`, which needs no package for directories."""
    (clone / "src").symlink_to(ROOT / "src")
    (clone / "requirements").mkdir()
    lock = clone / "requirements/models.lock"
    lock.write_text("# nothing\n")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", clone / ".venv"], check=True)
    digest = hashlib.sha256(lock.read_bytes()).hexdigest()
    (clone / ".venv/models.stamp").write_text(f"{digest}  - {clone}\n")
    return clone


def run(clone: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    # From another directory: the script finds its own.
    return subprocess.run(
        [clone / "run", *arguments], cwd="/", text=True, capture_output=True, check=False, stdin=subprocess.DEVNULL
    )


@pytest.mark.parametrize("command", ["status", "wait", "retry", "logs", "api-key"])
def test_before_the_first_up_each_command_names_the_remedy(clone: Path, command: str) -> None:
    done = run(clone, command)
    assert done.returncode == 1
    assert "./run up" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_there_is_nothing_to_take_down(clone: Path) -> None:
    done = run(clone, "down")
    assert done.returncode == 0, done.stderr
    assert "nothing to take down" in done.stdout


def test_clean_removes_what_the_clone_set_up_and_says_so_first(clone: Path) -> None:
    (clone / ".venv").mkdir()
    done = run(clone, "clean")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Removes: ")
    assert sorted(path.name for path in clone.iterdir()) == ["run"]


def test_help_names_every_command_that_the_script_knows(clone: Path) -> None:
    done = run(clone, "help")
    assert done.returncode == 0
    cases = (clone / "run").read_text().partition("case $command in")[2].partition("esac")[0]
    known = [line.split(")")[0].strip() for line in cases.splitlines() if ";;" in line]
    assert "up" in known
    assert [name for name in known if "|" not in name and name != "*" and name not in done.stdout] == []


def test_an_unknown_command_shows_the_usage(clone: Path) -> None:
    done = run(clone, "upp")
    assert done.returncode == 1
    assert "usage: ./run" in done.stderr
    assert "no such command: upp" in done.stderr


def test_an_unknown_image_is_refused_before_anything_is_set_up(clone: Path) -> None:
    done = run(clone, "image", "rocm")
    assert done.returncode == 1
    assert "no such image: rocm (cpu or cuda)" in done.stderr
    assert not (clone / ".venv").exists()


@pytest.mark.parametrize("arguments", [["ansible/undo.yml", "-e", "aerie_undo=true"], []])
def test_a_play_without_an_inventory_changes_no_machine(clone: Path, arguments: list[str]) -> None:
    done = run(clone, "playbook", *arguments)
    assert done.returncode == 1
    assert "-i ansible/inventory/site" in done.stderr
    assert not (clone / ".venv").exists()


def test_a_second_run_stops_while_the_first_is_at_work(clone: Path) -> None:
    with (clone / "run").open() as script:
        fcntl.flock(script, fcntl.LOCK_EX)
        done = run(clone, "clean")
    assert done.returncode == 1
    assert "another ./run is at work" in done.stderr
    assert run(clone, "clean").returncode == 0


def test_a_log_is_looked_for_where_one_stands(tmp_path: Path) -> None:
    (tmp_path / "crash.log").write_text("vllm: error: unrecognized arguments: --enable-turbo\n")
    done = subprocess.run([SCRIPT, "diagnose", "crash.log"], cwd=tmp_path, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "--enable-turbo" in done.stdout


def test_a_model_is_looked_for_where_one_stands(tmp_path: Path) -> None:
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights/config.json").write_text("{}")
    (tmp_path / "models").mkdir()
    done = subprocess.run(
        [SCRIPT, "model", "fetch", "./weights", "--models-dir", "models"],
        cwd=tmp_path, text=True, capture_output=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "models/weights/current/config.json").read_text() == "{}"


def test_a_signal_reaches_the_tool_and_the_exit_code_is_its_own(set_up: Path, tmp_path: Path) -> None:
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights/large.bin").write_bytes(os.urandom(4_000_000))
    (tmp_path / "models").mkdir()
    words = ["model", "fetch", "./weights", "--models-dir", "models", "--limit-rate", "100KB"]
    child = subprocess.Popen([set_up / "run", *words], cwd=tmp_path, text=True, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 20
    while not list(tmp_path.glob("models/weights/.aerie/*/*/files")) and time.monotonic() < deadline:
        time.sleep(0.02)
    child.send_signal(signal.SIGTERM)
    _, told = child.communicate(timeout=20)
    assert child.returncode == 143
    assert "aerie model fetch: ended by SIGTERM" in told


def test_a_venv_whose_python_has_gone_is_made_anew_and_what_sets_it_up_is_not_of_the_output(set_up: Path) -> None:
    for name in ("python", "python3"):
        (set_up / ".venv/bin" / name).unlink()
        (set_up / ".venv/bin" / name).symlink_to("/usr/lib/python-of-before/bin/python3")
    models = set_up / "models"
    models.mkdir()
    done = run(set_up, "model", "list", "--json", "--models-dir", str(models))
    assert done.returncode == 0, done.stderr
    json.loads(done.stdout)
    assert "== Install requirements/models.lock" in done.stderr
