"""The container's health check."""

import subprocess
import sys
from pathlib import Path

import pytest

from aerie.cli import main

SOURCE = Path(__file__).parents[3] / "src"


@pytest.mark.parametrize(
    ("answer", "code", "line"),
    [
        ((200, '{"ready": true}'), 0, "ready"),
        ((503, '{"ready": false, "phase": "failed", "reason": "killed"}'), 1, "failed: killed"),
        ((503, '{"ready": false, "phase": "starting", "reason": null}'), 1, "starting"),
        ((200, "<html>"), 1, "what answers at {url} is not Aerie's status"),
        ((200, "{}"), 1, "what answers at {url} is not Aerie's status"),
    ],
)
def test_one_line_and_the_exit_code(answers, capsys, answer, code, line):
    answers["/ready"] = answer
    assert main(["probe", answers["url"]]) == code
    assert capsys.readouterr().out == line.format(url=answers["url"]) + "\n"


def test_nobody_there_is_not_ready(capsys):
    assert main(["probe", "http://127.0.0.1:9"]) == 1
    assert capsys.readouterr().out.startswith("no answer: 127.0.0.1:9")


def test_it_needs_the_standard_library_only():
    # -I and -S: no site-packages at all, so that a third-party import would fail.
    script = f"import sys; sys.path.insert(0, {str(SOURCE)!r}); from aerie.cli import main; main(['probe', 'http://127.0.0.1:9'])"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("no answer")


def test_it_loads_nothing_of_aerie_but_what_it_needs():
    # It runs every two seconds while a model loads, on CPUs that have better to do.
    script = (
        "import sys; from aerie.cli import main; main(['probe', 'http://127.0.0.1:9']);"
        "print(sorted(name for name in sys.modules if name.startswith('aerie')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], env={"PYTHONPATH": str(SOURCE)}, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "['aerie', 'aerie.cli', 'aerie.gate', 'aerie.gate.http', 'aerie.gate.probe']"
