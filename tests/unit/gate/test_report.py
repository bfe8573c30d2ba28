"""The state in a terminal."""

import json

from aerie.cli import main

FAILED = {
    "phase": "failed",
    "step": "",
    "progress": None,
    "reason": "vllm serve was killed by SIGKILL",
    "next_start": "2026-11-29T12:01:00Z",
    "engine": {"pid": None, "starts": 2, "started": None, "exit": {"code": None, "signal": "SIGKILL", "at": "12:00"}},
    "failures": 2,
}


def test_a_start_shows_where_it_is(answers, state, capsys):
    answers["/status"] = (200, json.dumps(state()))
    assert main(["status", answers["url"]]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "phase         starting since 2026-11-29T12:00:00Z",
        "step          loading target 50%",
        "model         kimi",
        "engine        pid 7, starts 1, failures in a row 0",
        "versions      aerie 0.1.0",
    ]


def test_a_failure_shows_why_and_what_comes_next(answers, state, capsys):
    answers["/status"] = (200, json.dumps(state(**FAILED)))
    assert main(["status", answers["url"]]) == 1
    shown = capsys.readouterr().out
    assert "reason        vllm serve was killed by SIGKILL\n" in shown
    assert "next start    2026-11-29T12:01:00Z\n" in shown
    assert "last exit     killed by SIGKILL at 12:00\n" in shown


def test_ready_exits_0_and_json_is_the_status(answers, state, capsys):
    ready = state(phase="ready", speculation={"drafts": 4, "draft_tokens": 12, "accepted_tokens": 10})
    answers["/status"] = (200, json.dumps(ready))
    assert main(["status", "--json", answers["url"]]) == 0
    assert json.loads(capsys.readouterr().out) == ready


def test_nobody_there_exits_4(capsys):
    assert main(["status", "http://127.0.0.1:9"]) == 4
    assert capsys.readouterr().out == "nothing at http://127.0.0.1:9 answers as Aerie's status\n"
