"""What is made of a crash."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from aerie.diagnosis import Collector, Kind
from aerie.startup import lines
from aerie.supervisor.crash import exit_code, reason, shown, write_report

AT = datetime(2026, 11, 29, 12, tzinfo=UTC)
LOG = """\
(EngineCore pid=77) ERROR 11-29 11:59:58 [core.py:1010] Traceback (most recent call last):
(EngineCore pid=77) ERROR 11-29 11:59:58 [core.py:1010]   File "/opt/venv/vllm/v1/engine/core.py", line 12, in run
(EngineCore pid=77) ERROR 11-29 11:59:58 [core.py:1010] ValueError: cannot answer 'a private question'
"""


@pytest.fixture
def diagnosis():
    collector = Collector()
    collector.feed(lines.parse(LOG))
    return collector.diagnose("vllm serve ended with exit code 1")


def test_the_text_is_what_the_container_prints_last(diagnosis):
    written = shown(diagnosis, AT, Path("/r.txt"), listened=False)
    assert written["text"] == diagnosis.text()
    assert "a private question" in written["text"]
    assert (written["at"], written["report"]) == ("2026-11-29T12:00:00Z", "/r.txt")


def test_lines_beside_the_root_cause_are_left_out_whole(diagnosis):
    line = "Worker proc VllmWorker-0 died unexpectedly (exit code: -11): a private question"
    with_line = replace(diagnosis, root=diagnosis.root.with_lines([line]))
    assert f"seen: {line}" in shown(with_line, AT, None, listened=False)["text"].replace("\n    ", " ")
    written = shown(with_line, AT, None, listened=True)
    assert "private" not in str(written)
    assert written["root"]["chain"] == ["ValueError"]
    assert "then:" not in written["text"]


def test_what_may_quote_a_request_is_in_none_of_it(diagnosis):
    written = shown(diagnosis, AT, None, listened=True)
    assert "private" not in str(written)
    assert written["root"]["text"] == "ValueError"
    assert "ValueError" in written["text"]


def test_the_newest_five_reports_are_kept_each_with_the_last_output(diagnosis, tmp_path):
    reports = [write_report(tmp_path, diagnosis, b"line \xff\n", AT + timedelta(minutes=minute)) for minute in range(7)]
    assert sorted((tmp_path / "crashes").iterdir()) == reports[2:]
    assert reports[6].name == "2026-11-29T12-06-00Z.txt"
    text = reports[6].read_text()
    assert text.startswith(diagnosis.text())
    assert text.endswith("The engine's last output:\n\nline \ufffd\n\n")


def test_a_reason_is_one_line_and_quotes_no_request(diagnosis):
    how = "vllm serve ended with exit code 1"
    assert reason(how, diagnosis, listened=False) == f"{how}: ValueError: cannot answer 'a private question'"
    assert reason(how, diagnosis, listened=True) == f"{how}: {diagnosis.title}"
    assert reason(how, replace(diagnosis, known=True), listened=False) == f"{how}: {diagnosis.title}"


@pytest.mark.parametrize(
    ("kind", "status", "code"),
    [
        (Kind.CONFIGURATION, 1, 2),
        (Kind.CONFIGURATION, None, 2),
        (Kind.MEMORY, -9, 3),
        (Kind.HARDWARE, 1, 4),
        (Kind.CRASH, 1, 5),
        (Kind.CRASH, -11, 5),
        (Kind.CRASH, 2, 2),
        (Kind.HUNG, None, 6),
        (Kind.KILLED, -15, 143),
        (Kind.KILLED, None, 137),
        (Kind.KILLED, 1, 137),
    ],
)
def test_the_exit_code_tells_the_kind(diagnosis, kind, status, code):
    assert exit_code(replace(diagnosis, kind=kind), status, served=False) == code
    assert exit_code(replace(diagnosis, kind=kind), status, served=True) == (5 if code == 2 else code)
