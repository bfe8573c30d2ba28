"""What the tests of the patches share."""

from __future__ import annotations

import pytest
import story_release


@pytest.fixture(scope="session")
def story_options(image, tmp_path_factory):
    """Options of `docker run` for this release's starts: the tiny pair, programs, and a place that remembers models.

    vLLM looks at each model's class in a process of its own, and keeps what it saw; so only the first start does that.
    """
    folder = tmp_path_factory.mktemp("story")
    seen = folder / "seen"
    seen.mkdir()
    seen.chmod(0o777)
    tiny = story_release.tiny_pair(image, folder)
    tiny.chmod(0o755)
    return [
        "-v", f"{tiny}:{story_release.TINY}:ro", "-v", f"{seen}:/var/cache/aerie/vllm",
        "-v", f"{story_release.STORY}/serve.py:/story/serve.py:ro",
        "-v", f"{story_release.STORY}/supervise.py:/story/supervise.py:ro",
    ]  # fmt: skip
