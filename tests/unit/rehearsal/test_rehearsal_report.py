"""The report's three forms."""

from __future__ import annotations

import json
from xml.etree import ElementTree as ET

import pytest

from aerie.checkpoint.shrink import Change
from aerie.rehearsal.findings import failed, passed, skipped, warned
from aerie.rehearsal.overrides import Override
from aerie.rehearsal.report import Report, Told, end_of, lines_of


@pytest.fixture
def report():
    report = Report("full", "/data/models/Kimi-K2.5", None)
    report.told = [
        Told("static", passed("target files", "64 files")),
        Told("static", warned("CUDA graphs", "a full batch has none", "set max-num-seqs to 128", "cudagraph_utils.py")),
        Told("engine", failed("text", "token 3 of 9 is 7, and 8 was to be", "read the log"), 1.26),
        Told("engine", skipped("picture", "no pictures")),
    ]
    report.overrides = [Override("port", None, 41234, "the service's own is not touched")]
    report.changes = [Change("num_hidden_layers", 61, 7)]
    report.not_proven = ["the weights themselves"]
    report.seconds = 61.24
    report.is_complete = True
    return report


def test_verdicts(report):
    assert report.verdict == "failed"
    report.told = report.told[:2]
    assert report.verdict == "passed"
    report.is_complete = False
    assert report.verdict == "interrupted"


def test_one_that_was_interrupted_after_a_failure_has_failed(report):
    report.is_complete = False
    assert report.verdict == "failed"


def test_json(report):
    content = json.loads(json.dumps(report.to_json()))
    assert (content["schema"], content["verdict"], content["ran"], content["seconds"]) == (1, "failed", True, 61.2)
    assert (
        content["findings"][2].items()
        >= {
            "section": "engine",
            "check": "text",
            "verdict": "failed",
            "text": "token 3 of 9 is 7, and 8 was to be",
            "remedy": "read the log",
            "source": "",
            "seconds": 1.26,
        }.items()
    )
    assert content["overrides"] == [
        {"argument": "port", "given": None, "here": 41234, "why": "the service's own is not touched"}
    ]
    assert content["changes"] == [{"field": "num_hidden_layers", "real": 61, "here": 7}]


def test_what_passed_before_did_not_run(report):
    report.told, report.passed_before = [], "2026-11-30T08:00:00+00:00"
    assert (report.to_json()["verdict"], report.to_json()["ran"]) == ("passed", False)
    assert (
        list(end_of(report))[-1] == "Nothing has changed since the rehearsal that passed at 2026-11-30T08:00:00+00:00"
    )


def test_junit(report):
    root = ET.fromstring(report.to_junit())  # noqa: S314 - our own
    assert [(suite.get("name"), suite.get("tests"), suite.get("failures"), suite.get("skipped")) for suite in root] == [
        ("static", "2", "0", "0"),
        ("engine", "2", "1", "1"),
    ]
    failure = root.find(".//failure")
    assert failure is not None
    assert (failure.get("message"), failure.text) == ("token 3 of 9 is 7, and 8 was to be", "read the log")
    case = root.find(".//testcase[@name='CUDA graphs']/system-out")
    assert case is not None
    assert case.text == "warned: a full batch has none\nset max-num-seqs to 128\ncudagraph_utils.py"


def test_a_finding_in_lines(report):
    assert list(lines_of(report.told[1])) == [
        "  warn CUDA graphs                a full batch has none",
        "                                  do: set max-num-seqs to 128",
        "                                  see: cudagraph_utils.py",
    ]
    assert next(lines_of(report.told[2])) == (
        "  FAIL text                       token 3 of 9 is 7, and 8 was to be  (1.3 s)"
    )
    assert list(lines_of(report.told[3])) == ["  -    picture                    no pictures"]


def test_control_characters_reach_no_terminal_and_no_xml(report):
    report.told = [Told("engine", failed("start", "\x1b[31mboom\x00", "\x1b[0mlook \udcff"))]
    assert "\x1b" not in "".join(lines_of(report.told[0]))
    root = ET.fromstring(report.to_junit())  # noqa: S314 - our own
    assert root.find(".//failure") is not None


def test_the_end(report):
    assert list(end_of(report)) == [
        "Told differently to this engine",
        "  - port: 41234, which was left to vLLM; the service's own is not touched",
        "Smaller than the real pair",
        "  - num_hidden_layers: 7 for 61",
        "Not proven here",
        "  - the weights themselves",
        "The rehearsal FAILED after 61 s: 1 passed, 1 warned, 1 failed, 1 skipped",
    ]
