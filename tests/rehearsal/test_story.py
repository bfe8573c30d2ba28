"""The story's release: each of its three layers is named before anything is started, and found by starting it, too.

In the story each took 40 minutes, until all weights were loaded.
"""

from __future__ import annotations

import pytest
import story_release
from apply import write_record
from engine_trees import patches_of
from pairs import LLAMA, TARGET, Pair, write_published
from rehearsals import PAIRS, WITHOUT_WEIGHTS

from aerie.patches import RECORD

LAYERS = list(story_release.ERRORS)
PATCHES = list(patches_of(story_release.SERIES))
WITHIN = 180.0  # seconds; 40 where nothing else runs
WORDS = ("--max-model-len", "512", "--max-num-seqs", "4", "--trust-remote-code", "--enforce-eager",
         "--worker-cls", "speculating_cpu.Worker")  # fmt: skip


@pytest.fixture(scope="session")
def words(pairs):
    """Arguments of `aerie rehearse`: of the published pairs, the one whose drafter this release has code for."""
    folder = pairs / "story"
    write_published(folder)
    story_release.add_image_processor(folder / TARGET)
    pair = Pair(folder / TARGET, folder / LLAMA)

    def given(*options):
        return [*pair.seen(pairs, PAIRS), WITHOUT_WEIGHTS, *options, "--", *WORDS]

    return given


@pytest.fixture
def release(overlay, tmp_path):
    """Return options for this release with some of its patches, as an image of it records the whole series."""
    write_record(story_release.SERIES, tmp_path / "record")
    (files := tmp_path / "files").mkdir()
    return lambda patches: [*overlay.tree(patches, files), "-v", f"{tmp_path / 'record'}:{RECORD}:ro"]


@pytest.mark.parametrize("patch", PATCHES)
def test_each_patch_is_missed_in_the_files(patch, release, rehearse, words, measured):
    before = PATCHES[: PATCHES.index(patch)]
    (outcome,) = rehearse(words("--static"), more=release(before))
    (found,) = outcome.findings("failed")
    further = len(PATCHES) - len(before) - 1
    assert found["check"] == "patches"
    assert found["text"].startswith(f"{patch} is not in this vLLM{f', nor are {further} more' if further else ''} (")
    measured("patches", outcome)


def test_a_vllm_of_another_origin_is_told_how_its_start_ends(overlay, rehearse, words, tmp_path, measured):
    (outcome,) = rehearse(words("--static"), more=[*overlay.tree((), tmp_path / "files"), "-v", f"{tmp_path}:{RECORD}"])
    (found,) = outcome.findings("failed")
    assert found["check"] == "patches"
    assert found["text"].startswith("vLLM 0.16.0 is installed, and no series of patches is recorded here")
    assert "`eagle3 is only supported for [...] models`" in found["text"]
    measured("patches", outcome)


@pytest.mark.parametrize("layer", LAYERS)
def test_each_layer_is_found_by_starting_it(layer, release, rehearse, remembered_models, words, measured):
    before = LAYERS[: LAYERS.index(layer)]
    (outcome,) = rehearse(words("--accept", "patches"), more=[*release(before), *remembered_models])
    assert outcome.code == 1, outcome.said
    found, *more = outcome.findings("failed")
    assert (found["check"], more) == ("start", []), outcome.said
    diagnosis = outcome.report["diagnosis"]
    assert diagnosis["signature"] == story_release.SIGNATURES[layer]
    assert found["text"].startswith(diagnosis["title"])
    assert found["remedy"] == diagnosis["remedy"]
    process, error = story_release.ERRORS[layer]
    assert diagnosis["root"]["process"].startswith(process)
    assert error in diagnosis["root"]["text"]
    assert outcome.seconds < WITHIN
    measured("start", outcome)
