"""When the gate opens, and when it gives up."""

import json

import pytest

from aerie.cli import main
from aerie.gate import wait as wait_module
from aerie.gate.wait import Gate, Verdict


def verdicts(*looks, stall_timeout=100):
    """Return the verdict after each (second, state); none may come after the first that is one."""
    gate = Gate(stall_timeout, 0)
    found = [gate.judge(state, now)[0] for now, state in looks]
    assert not any(verdict is not None for verdict in found[:-1]), found
    return found


def test_it_opens_when_ready(state):
    gate = Gate(100, 0)
    assert gate.judge(state(), 1) == (None, "starting: loading target 50%")
    assert gate.judge(state(phase="ready", step="", progress=None), 42) == (Verdict.READY, "ready after 42 s")


@pytest.mark.parametrize("phase", ["held", "stopping", "stopped"])
def test_what_waits_for_a_person_is_a_failure_at_once(state, phase):
    gate = Gate(100, 0)
    assert gate.judge(state(phase=phase, reason="no key"), 1) == (Verdict.FAILED, f"{phase}: no key")


def test_a_failure_before_our_eyes_is_an_answer(state):
    assert verdicts((1, state()), (2, state(phase="failed", failures=1)))[-1] is Verdict.FAILED


def test_a_failure_from_before_may_be_mended_by_the_next_start(state):
    earlier = state(phase="failed", failures=2)
    assert verdicts((1, earlier), (2, state(failures=2)), (3, state(phase="ready")))[-1] is Verdict.READY
    assert verdicts((1, earlier), (2, state(failures=2)), (3, earlier | {"failures": 3}))[-1] is Verdict.FAILED


def test_an_engine_that_was_dying_when_we_came_has_failed_before(state):
    dying, dead = state(phase="unready", reason="/health answered 503"), state(phase="failed", failures=1)
    assert verdicts((0, dying), (6, dead), (16, state(failures=1)), (40, state(phase="ready")))[-1] is Verdict.READY
    assert verdicts((0, dying), (6, dead), (16, state(failures=1)), (20, dead | {"failures": 2}))[-1] is Verdict.FAILED


def test_unready_is_a_failure_when_it_stays(state):
    unready = state(phase="unready", reason="no drafts")
    assert verdicts((0, unready), (20, unready), (25, unready)) == [None, None, Verdict.FAILED]
    assert verdicts((0, unready), (20, state()), (21, unready), (40, unready))[-1] is None


def test_progress_of_any_kind_moves_the_deadline(state):
    moves = [state(), state(progress=0.6), state(step="x"), state(last_line="y"), state(phase="checking")]
    assert verdicts(*[(90 * number, move) for number, move in enumerate(moves)]) == [None] * 5


def test_a_stall_is_a_stall_whatever_the_time(state):
    assert verdicts((0, state()), (99, state()), (100, state())) == [None, None, Verdict.STALLED]


def test_nobody_there(state):
    assert verdicts((0, None), (59, None), (60, None)) == [None, None, Verdict.NOBODY]
    assert verdicts((0, None), (59, state()), (118, None), (119, None)) == [None, None, None, Verdict.NOBODY]


@pytest.fixture
def hurry(monkeypatch):
    monkeypatch.setattr(wait_module, "_POLL", 0.01)
    monkeypatch.setattr(wait_module, "_NOBODY", 0.1)


def test_the_command_tells_each_change_once_and_exits_with_the_verdict(answers, state, hurry, capsys):
    told = iter([state(), state(), state(), state(step="x", progress=None), state(phase="ready")])
    answers["/status"] = (200, lambda _body: json.dumps(next(told)))
    assert main(["wait", answers["url"]]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition("] ")[2] for line in lines[:-1]] == ["starting: loading target 50%", "starting: x"]
    assert lines[-1].startswith(f"{answers['url']}: ready after")


def test_the_reason_is_printed_and_json_holds_the_status(answers, state, hurry, capsys):
    answers["/status"] = (200, json.dumps(state(phase="held", reason="no key")))
    assert main(["wait", "--json", answers["url"] + "/"]) == 1
    captured = capsys.readouterr()
    outcome = json.loads(captured.out)
    assert (outcome["verdict"], outcome["line"]) == ("failed", "held: no key")
    assert outcome["status"]["phase"] == "held"
    assert "held: no key" in captured.err


@pytest.mark.parametrize("text", ["<html>", "[]", "{}"])
def test_another_service_on_the_port_is_nobody(answers, hurry, text):
    answers["/status"] = (200, text)
    assert main(["wait", answers["url"]]) == 4


def test_a_terminal_gets_one_redrawn_line(answers, state, hurry, monkeypatch, capsys):
    told = iter([state(), state(step="a step that is long " * 9), state(phase="ready")])
    answers["/status"] = (200, lambda _body: json.dumps(next(told)))
    monkeypatch.setattr(wait_module.sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["wait", answers["url"]]) == 0
    shown = capsys.readouterr().err
    assert shown.count("\r") == 3
    assert shown.count("\n") == 1
    assert max(map(len, shown.split("\r\x1b[K"))) < 80


def test_ctrl_c_exits_130(hurry, monkeypatch):
    def interrupted(_seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr(wait_module.time, "sleep", interrupted)
    assert main(["wait", "http://127.0.0.1:9"]) == 130
