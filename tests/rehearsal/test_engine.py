"""The whole start-up with the published pair's configurations, what only an engine finds, and what is left of it."""

from __future__ import annotations

import json

import pytest
from faults import STARTED
from rehearsals import HERE, WITHOUT_WEIGHTS, arguments, assert_found, plant

WITHIN = 300.0  # seconds for all of it; 90 where nothing else runs
ASKED = ("text", "picture", "tool call", "long prompt", "parallel requests", "speculation", "same without speculation",
         "KV cache", "stop")  # fmt: skip
AT_ONCE = 10.0  # seconds; 2 where nothing else runs


@pytest.fixture(scope="module")
def rehearsed(rehearse, published, pairs, remembered_models):
    """The published pair, whole; then the same again; then with another argument, which the static checks refuse."""
    given = arguments(published, pairs, WITHOUT_WEIGHTS, "--if-changed")
    return rehearse(given, given, [*given, "--max-model-len", "262144"], more=remembered_models)


def test_the_published_pair_passes(rehearsed, measured):
    outcome = rehearsed[0]
    assert (outcome.code, outcome.report["verdict"], outcome.report["profile"]) == (0, "passed", "cpu"), outcome.said
    assert [each["check"] for each in outcome.findings("warned")] == []
    passed = [each["check"] for each in outcome.findings("passed") if each["section"] == "engine"]
    assert passed == ["shrunken pair", "start", *ASKED]
    assert "decode kernel" in {each["check"] for each in outcome.findings("passed")}
    changed = {each["field"]: (each["real"], each["here"]) for each in outcome.report["changes"]}
    assert changed["num_hidden_layers"] == (61, 7)
    assert {each["argument"] for each in outcome.report["overrides"]} >= {"port", "tensor-parallel-size"}
    assert any("CUDA" in each for each in outcome.report["not_proven"])
    assert outcome.seconds < WITHIN
    measured("-", outcome)


def test_what_passed_is_not_done_again(rehearsed, measured):
    outcome = rehearsed[1]
    assert (outcome.code, outcome.report["verdict"], outcome.report["ran"]) == (0, "passed", False), outcome.said
    assert outcome.seconds < AT_ONCE
    measured("-", outcome)


def test_with_another_argument_it_is(rehearsed):
    outcome = rehearsed[2]
    assert (outcome.code, outcome.report["ran"]) == (1, True), outcome.said
    assert {each["check"] for each in outcome.findings("failed")} == {"memory"}


@pytest.fixture(scope="module")
def started(rehearse, published, pairs, remembered_models):
    """What each rehearsal came to whose fault only a start shows."""
    planted = [plant(fault, published, pairs) for fault in STARTED]
    names = [fault.name for fault in STARTED]
    return dict(zip(names, rehearse(*planted, more=remembered_models), strict=True))


@pytest.mark.parametrize("fault", STARTED, ids=str)
def test_found_by_starting(fault, started, measured):
    assert_found(fault, started[fault.name])
    measured(fault.check, started[fault.name])


def test_interrupted_it_leaves_nothing_behind(in_image, options, published, pairs, remembered_models):
    done = in_image(
        "python", "/interrupt.py", *arguments(published, pairs, WITHOUT_WEIGHTS),
        options=[*options, *remembered_models, "-v", f"{HERE}/interrupt.py:/interrupt.py:ro"],
    )  # fmt: skip
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["code"] == 130, told["said"]
    assert told["report"]["verdict"] == "interrupted"
    assert "The rehearsal was interrupted after" in "".join(told["said"])
    assert "Traceback" not in "".join(told["said"])
    assert told["during"]["processes"] > 3
    assert told["during"]["folders"] == 1
    assert told["left"] == {"processes": [], "folders": []}
    print(f"ended {told['seconds']:.1f} s after the signal")
