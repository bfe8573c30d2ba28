"""The state in a terminal."""

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest
from states import Examples

from aerie.cli import main
from aerie.gate.report import _retry


def test_a_failure_shows_its_diagnosis_last(answers, state, diagnosis, capsys):
    answers["/status"] = (200, json.dumps(state(phase="failed", reason="died", diagnosis=diagnosis)))
    assert main(["status", answers["url"]]) == 1
    shown = capsys.readouterr().out
    assert shown.startswith("kimi  failed since")
    assert shown.endswith(f"\n\n{diagnosis['text']}\n")


@pytest.mark.parametrize(
    ("container", "said"),
    [("3f2a9c1b7d20", "docker exec 3f2a9c1b7d20 aerie retry\n"), (None, "where the service runs")],
)
def test_a_held_service_says_how_its_host_starts_it(answers, state, capsys, monkeypatch, container, said):
    monkeypatch.setattr("aerie.gate.report.this_container", lambda: container)
    answers["/status"] = (200, json.dumps(state(phase="held", reason="no key")))
    assert main(["status", answers["url"]]) == 1
    assert said in capsys.readouterr().out


def test_the_container_of_another_host_is_not_this_one(monkeypatch):
    monkeypatch.setattr("aerie.gate.report.this_container", lambda: "3f2a9c1b7d20")
    assert _retry("http://gpu-1:8001") == "`aerie retry` where the service runs"


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


def test_the_readme_shows_what_is_printed_of_a_killed_engine(answers, capsys, monkeypatch):
    monkeypatch.setattr("aerie.gate.report.this_container", lambda: "3f2a9c1b7d20")
    killed = Examples(datetime(2026, 11, 29, 22, 0, tzinfo=UTC)).killed() | {"model": "aerie-tiny"}
    answers["/status"] = (200, json.dumps(killed))
    assert main(["status", answers["url"]]) == 1
    readme = (Path(__file__).parents[3] / "README.md").read_text()
    assert f"\n```\n{capsys.readouterr().out}```\n" in readme
