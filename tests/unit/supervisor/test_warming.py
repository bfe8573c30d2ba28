"""The weights are read ahead beside a start, by a process that is no part of the engine."""

import asyncio
import os
import signal
import subprocess
import threading

import pytest

from aerie.supervisor.processes import kill_below
from aerie.supervisor.release import held_back
from aerie.supervisor.warming import not_for

GB = 10**9


@pytest.fixture
def model(tmp_path):
    """Return a checkpoint of 3 GB that take no space: the kernel fills its pages with zeros."""
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    for number in (1, 2, 3):
        with (directory / f"model-{number}.safetensors").open("wb") as file:
            file.truncate(GB)
    return directory


def test_it_is_read_while_the_engine_starts(serving, model):
    # Not before the disk has had its time: the stand-in is ready at once.
    with serving.run(model=str(model), boot=5) as service:
        state = service.until(lambda: (state := service.state()).get("warming") and state, "the reading")
        assert state["warming"]["state"] in {"reading", "done", "skipped"}
        done = service.until(
            lambda: (told := service.state().get("warming")) and told["state"] != "reading" and told, "its end"
        )
        assert done["state"] in {"done", "skipped"}  # where this machine has that little memory
        assert done["total_bytes"] == 3 * GB


@pytest.mark.parametrize("options", [("--warm", "never"), ()])
def test_it_is_not_where_told_so_or_not_worth_it(serving, model, options):
    if not options:
        for number in (2, 3):
            (model / f"model-{number}.safetensors").unlink()
        os.truncate(model / "model-1.safetensors", GB - 1)
    with serving.run(*options, model=str(model)) as service:
        assert service.until_phase("ready")["warming"] is None


def test_a_loader_that_reads_by_itself_is_told(serving, model):
    with serving.run(model=str(model), arguments=["--load-format", "fastsafetensors"]) as service:
        assert service.until_phase("ready")["warming"] is None
        service.process.send_signal(signal.SIGTERM)
        _, _, said = service.end()
    assert "not read ahead: load-format fastsafetensors reads them by itself" in said


@pytest.mark.parametrize(
    ("words", "reads"),
    [
        ([], True),
        (["--load-format", "auto", "--safetensors-load-strategy", "lazy"], True),
        (["--load-format", "dummy"], False),
        (["--load-format=instanttensor"], False),
    ],
)
def test_which_loaders_read_through_the_page_cache(words, reads):
    assert (not_for(["/model", *words]) is None) == reads


def test_one_that_cannot_be_killed_hurts_nobody():
    """Whatever waits for a server of NFS stays after SIGKILL: nobody looks at it here, as at one that is gone."""
    with subprocess.Popen(["/bin/sleep", "600"]) as apart, subprocess.Popen(["/bin/sleep", "600"]) as other:
        threading.Thread(target=other.wait, daemon=True).start()
        assert asyncio.run(kill_below(os.getpid(), 60.0, {apart.pid})) == []
        assert asyncio.run(held_back((), survives=60.0, apart={apart.pid})) == []
        assert (apart.poll(), other.wait()) == (None, -signal.SIGKILL)
        apart.kill()
