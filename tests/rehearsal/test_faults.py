"""What ends a start after half an hour, or lets it serve wrongly, is found before it: each is planted, and found.

These take no engine: configuration, headers and a compiler tell.
"""

from __future__ import annotations

import shutil

import pytest
from apply import write_record
from engine_trees import patches_of
from faults import COMPILED, STATIC, VALID, WITHOUT_A_PATCH
from rehearsals import WITHOUT_WEIGHTS, arguments, assert_found, plant

from aerie.patches import RECORD

WITHIN = 30.0  # seconds; 2 to 5 where nothing else runs


@pytest.fixture(scope="session")
def outcomes(rehearse, whole, pairs):
    """What each static rehearsal came to; all are in one container."""
    unplanted = arguments(whole, pairs, "--static")
    faults = [VALID, *STATIC]
    planted = [plant(fault, whole, pairs, "--static") for fault in faults]
    names = ["nothing", *(fault.name for fault in faults)]
    return dict(zip(names, rehearse(unplanted, *planted), strict=True))


@pytest.fixture
def without(pinned, series, tmp_path):
    """Return the options for the image's vLLM without one of its patches, and where asked for, a record without it."""

    def options(patch, *, recorded=True):
        patches = patches_of(series)
        (files := tmp_path / "files").mkdir()
        tree = pinned.tree(set(patches) - {patch}, files)
        if recorded:
            return tree
        shorter = tmp_path / "series"
        shutil.copytree(series, shorter)
        (shorter / "series").write_text("".join(f"{name}.patch\n" for name in patches if name != patch))
        write_record(shorter, tmp_path / "record")
        return [*tree, "-v", f"{tmp_path / 'record'}:{RECORD}:ro"]

    return options


def test_where_nothing_is_planted_all_passes(outcomes, measured):
    outcome = outcomes["nothing"]
    assert (outcome.code, outcome.report["verdict"]) == (0, "passed"), outcome.said
    assert [each["check"] for each in outcome.findings("warned")] == []
    measured("-", outcome)


def test_the_first_and_the_last_auxiliary_layer_are_valid(outcomes):
    outcome = outcomes[VALID.name]
    assert outcome.code == 0, outcome.said
    (found,) = [each for each in outcome.findings("passed") if each["check"] == VALID.check]
    assert found["text"] == VALID.text


@pytest.mark.parametrize("fault", STATIC, ids=str)
def test_found_in_files_and_arguments(fault, outcomes, measured):
    outcome = outcomes[fault.name]
    assert_found(fault, outcome)
    assert outcome.seconds < WITHIN
    measured(fault.check, outcome)


def test_a_patch_that_is_missing(patch_file, without, rehearse, whole, pairs, measured):
    (outcome,) = rehearse(arguments(whole, pairs, "--static", WITHOUT_WEIGHTS), more=without(patch_file.stem))
    (found,) = outcome.findings("failed")
    assert (outcome.code, found["check"]) == (1, "patches")
    assert found["text"].startswith(f"{patch_file.stem} is not in this vLLM (")
    assert found["remedy"].startswith("use the image as it was built")
    measured("patches", outcome)


@pytest.mark.parametrize("fault", WITHOUT_A_PATCH, ids=str)
def test_found_where_the_series_is_shorter(fault, without, rehearse, whole, pairs, measured):
    planted = plant(fault, whole, pairs, "--static")
    (outcome,) = rehearse(planted, more=without(fault.without, recorded=False))
    assert_found(fault, outcome)
    measured(fault.check, outcome)


def test_found_by_compiling(without, rehearse, whole, pairs, measured):
    (outcome,) = rehearse(plant(COMPILED, whole, pairs), more=without(COMPILED.without))
    assert_found(COMPILED, outcome)
    assert outcome.report["profile"] is None, "an engine was started"
    measured(COMPILED.check, outcome)
