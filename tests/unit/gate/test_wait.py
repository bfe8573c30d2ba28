"""The command `aerie wait` where there is no terminal."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from aerie.cli import main
from aerie.gate import judge as judge_module
from aerie.gate import wait as wait_module

SOURCE = Path(__file__).parents[3] / "src"


@pytest.fixture
def hurry(monkeypatch):
    monkeypatch.setattr(wait_module, "_POLL", 0.01)
    monkeypatch.setattr(judge_module, "_NOBODY", 0.1)


def test_each_change_is_told_once_and_the_verdict_is_the_exit_code(answers, state, hurry, capsys, say):
    say(answers, state(), state(), state(start={"phase": "loading drafter"}), state(phase="ready"))
    assert main(["wait", answers["url"]]) == 0
    captured = capsys.readouterr()
    lines = captured.err.splitlines()
    assert [line.partition("] ")[2].partition(":")[0] for line in lines[:-1]] == ["loading target", "loading drafter"]
    assert lines[-1].startswith(f"{answers['url']}: ready after")
    assert captured.out == ""


def test_a_failure_ends_with_the_diagnosis(answers, state, diagnosis, hurry, capsys, say):
    say(answers, state(), state(phase="failed", failures=1, reason="died", diagnosis=diagnosis))
    assert main(["wait", answers["url"]]) == 1
    assert f"{answers['url']}: failed: died\n\n{diagnosis['text']}\n" in capsys.readouterr().err


def test_json_is_one_object_at_the_end(answers, state, diagnosis, hurry, capsys, say):
    held = state(phase="held", reason="no key", diagnosis=diagnosis)
    say(answers, state(), held)
    assert main(["wait", "--json", answers["url"] + "/"]) == 1
    captured = capsys.readouterr()
    outcome = json.loads(captured.out)
    assert (outcome["verdict"], outcome["line"]) == ("failed", "held: no key")
    assert outcome["message"] == f"held: no key\n\n{diagnosis['text']}"
    assert outcome["status"] == held
    assert 0 <= outcome["seconds"] < 10
    assert "loading target" in captured.err


def test_a_stall_exits_3(answers, state, hurry, capsys, say):
    say(answers, state())
    assert main(["wait", "--stall-timeout", "0.2", answers["url"]]) == 3
    assert "nothing has moved for" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["<html>", "[]", "{}", '"schema"', "null", '{"schema": 2}', "4"])
def test_another_service_on_the_port_is_named_and_nobody(answers, hurry, capsys, text):
    answers["/status"] = (200, text)
    assert main(["wait", answers["url"]]) == 4
    assert "is not Aerie's status port" in capsys.readouterr().err


def test_another_schema_is_told_at_once(answers, capsys):
    answers["/status"] = (200, json.dumps({"schema": 1, "phase": "starting", "versions": {"aerie": "0.0.9"}}))
    began = time.monotonic()
    assert main(["wait", answers["url"]]) == 4
    assert time.monotonic() - began < 2
    said = capsys.readouterr().err
    assert "schema 1 (aerie 0.0.9), and this aerie reads 2" in said
    assert "recreate the container" in said


def test_a_failure_is_told_within_a_second(answers, state):
    since = []

    def answer(_body):
        if len(answers["asked"]) > 2 and not since:
            since.append(time.monotonic())
        return json.dumps(state(phase="failed", failures=1) if since else state())

    answers["/status"] = (200, answer)
    assert main(["wait", answers["url"]]) == 1
    # From the state that says so; the one before is half a second old at most.
    assert time.monotonic() - since[0] < 0.5
    assert wait_module._POLL <= 0.5


def test_pieces_make_one_wait(answers, state, hurry, capsys, say):
    """What a piece has seen the next one knows, and each tells what is new."""
    say(answers, state(), state(), state(phase="failed", failures=1, reason="died"))
    assert main(["wait", "--piece", "5", answers["url"]]) == 5
    first = json.loads(capsys.readouterr().out)
    assert (first["verdict"], first["news"]) == (None, True)
    assert first["line"].startswith("loading target: 26 of 64 shards")
    assert main(["wait", "--piece", "0", "--memory", first["memory"], answers["url"]]) == 5
    second = json.loads(capsys.readouterr().out)
    assert (second["verdict"], second["news"]) == (None, False)
    # Alone it would take this failure for one from before.
    assert main(["wait", "--piece", "5", "--memory", second["memory"], answers["url"]]) == 1
    last = json.loads(capsys.readouterr().out)
    assert (last["verdict"], last["line"], last["status"]["phase"]) == ("failed", "failed: died", "failed")
    assert last["seconds"] >= second["seconds"]


def test_a_piece_ends_after_its_time(answers, state, capsys, say):
    say(answers, state())
    assert main(["wait", "--piece", "5", answers["url"]]) == 5
    memory = json.loads(capsys.readouterr().out)["memory"]
    began = time.monotonic()
    assert main(["wait", "--piece", "1.2", "--memory", memory, answers["url"]]) == 5
    assert 0.7 < time.monotonic() - began < 1.3
    assert capsys.readouterr().err == ""


def test_another_text_as_memory_is_wrong_usage(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["wait", "--piece", "1", "--memory", "{}", "http://127.0.0.1:9"])
    assert "not the memory of a wait" in capsys.readouterr().err


def test_ctrl_c_exits_130_without_a_traceback(answers, state, say):
    say(answers, state())
    command = [sys.executable, "-m", "aerie.cli", "wait", answers["url"]]
    environment = os.environ | {"PYTHONPATH": str(SOURCE)}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert "loading target" in process.stderr.readline()
            process.send_signal(2)
            _, said = process.communicate(timeout=10)
        finally:
            process.kill()  # or it would be waited for, however long it goes on
    assert (process.returncode, said) == (130, "no longer waiting; the service goes on by itself\n")


def test_it_needs_the_standard_library_only(answers, state, say):
    say(answers, state(phase="held", reason="no key"))
    script = (
        f"import sys; sys.path.insert(0, {str(SOURCE)!r}); from aerie.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    for command, code in (("wait", 1), ("status", 1)):
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", script, command, answers["url"]],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == code, done.stderr
        assert "no key" in done.stdout + done.stderr
