"""The state in a terminal."""

import json

from aerie.cli import main


def test_a_failure_shows_its_diagnosis_last(answers, state, diagnosis, capsys):
    answers["/status"] = (200, json.dumps(state(phase="failed", reason="died", diagnosis=diagnosis)))
    assert main(["status", answers["url"]]) == 1
    shown = capsys.readouterr().out
    assert shown.startswith("kimi  failed since")
    assert shown.endswith(f"\n\n{diagnosis['text']}\n")


def test_ready_exits_0_and_json_is_the_status(answers, state, capsys):
    ready = state(phase="ready")
    answers["/status"] = (200, json.dumps(ready))
    assert main(["status", "--json", answers["url"]]) == 0
    assert json.loads(capsys.readouterr().out) == ready


def test_nobody_there_exits_4(capsys):
    assert main(["status", "http://127.0.0.1:9"]) == 4
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("no answer from 127.0.0.1:9: ")
