"""The story's three errors, in order, on its release: unpatched and with each further patch, vLLM 0.16.0 is started.

The quick form: the release lies over the image's packages, so it is the real package that fails, but it gets no further
than its first kernel. `story_whole.py` goes on to a completion.
"""

from __future__ import annotations

import pytest
from story_release import ARGUMENTS, ERRORS, SERIES, SPECULATION, said
from trees import patches_of

LAYERS = list(ERRORS)


@pytest.fixture
def start(in_image, overlay, story_options, tmp_path):
    def run(patches):
        options = [*overlay.tree(patches, tmp_path), *story_options]
        command = ["python", "/story/serve.py", *ARGUMENTS, *SPECULATION]
        return in_image(*command, options=options, check=False, timeout=600)

    return run


def test_the_series_begins_with_the_storys_layers():
    assert list(patches_of(SERIES))[: len(LAYERS)] == LAYERS


@pytest.mark.parametrize("layer", LAYERS)
def test_with_the_layers_before_it_patched_each_says_its_own_error(layer, start):
    done = start(LAYERS[: LAYERS.index(layer)])
    assert done.returncode != 0
    assert said(done.stderr) == [ERRORS[layer]], done.stderr[-6000:]


def test_with_the_series_it_gets_past_all_three(start):
    done = start(patches_of(SERIES))
    assert not said(done.stderr)
    # What the runner says once the drafter is loaded and the layers are set.
    assert "Model loading took" in done.stderr, done.stderr[-6000:]
    # And the end of this form: a question that this release's kernels have for another torch.
    assert "has no attribute '_is_amx_tile_supported'" in done.stderr, done.stderr[-6000:]
