"""The story's three errors, in order, on its release: unpatched and with each further patch, vLLM 0.16.0 is started.

Each error is the root cause that the supervisor tells at once, and that the gate fails with.

The quick form: the release lies over the image's packages, so it is the real package that fails, but it gets no further
than its first kernel. `story_whole.py` goes on to a completion.
"""

from __future__ import annotations

import json

import pytest
from engine_trees import patches_of
from story_release import ARGUMENTS, ERRORS, SERIES, SIGNATURES, SPECULATION, said

LAYERS = list(ERRORS)

# Seconds; under 2 where nothing else runs.
TOLD_WITHIN = 10.0


@pytest.fixture
def start(in_image, overlay, story_options, tmp_path):
    def run(patches, program="serve"):
        options = [*overlay.tree(patches, tmp_path), *story_options]
        command = ["python", f"/story/{program}.py", *ARGUMENTS, *SPECULATION]
        return in_image(*command, options=options, check=False, timeout=600)

    return run


def test_the_series_begins_with_the_storys_layers():
    assert list(patches_of(SERIES))[: len(LAYERS)] == LAYERS


@pytest.mark.parametrize("layer", LAYERS)
def test_with_the_layers_before_it_patched_each_is_told_as_the_root_cause(layer, start):
    done = start(LAYERS[: LAYERS.index(layer)], "supervise")
    assert said(done.stderr) == [ERRORS[layer]], done.stderr[-6000:]
    told = json.loads(done.stdout.splitlines()[-1])
    state, gate = told["state"], told["gate"]
    assert state["phase"] == "held"
    assert state["diagnosis"]["signature"] == SIGNATURES[layer]
    assert state["diagnosis"]["root"]["process"].startswith(ERRORS[layer][0])
    process, error = ERRORS[layer]
    crashed = next(at for at, line in told["lines"] if line.startswith(f"({process}") and error in line)
    printed = next(at for at, line in told["lines"] if line.startswith("DIAGNOSIS: "))
    print(f"{layer}: diagnosis printed {printed - crashed:.2f} s, gate failed {gate['at'] - crashed:.2f} s after it")
    assert printed - crashed < TOLD_WITHIN
    assert gate["exit"] == 1, gate
    assert state["diagnosis"]["title"] in gate["said"]
    assert gate["at"] - crashed < TOLD_WITHIN


def test_with_the_series_it_gets_past_all_three(start):
    done = start(patches_of(SERIES))
    assert not said(done.stderr)
    # What the runner says once the drafter is loaded and the layers are set.
    assert "Model loading took" in done.stderr, done.stderr[-6000:]
    # And the end of this form: a question that this release's kernels have for another torch.
    assert "has no attribute '_is_amx_tile_supported'" in done.stderr, done.stderr[-6000:]
