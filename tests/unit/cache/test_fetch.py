"""`aerie model fetch` on a small set; tests/cache has each fault, and more kills."""

import json
import os
import random
import time

import pytest
from fetching import REPOSITORY, Fetcher, check_published
from hub_server import Hub

from aerie.cache.manifest import SEGMENT


@pytest.fixture
def hub():
    with Hub() as hub:
        yield hub


@pytest.fixture
def fetcher(hub, tmp_path):
    models = tmp_path / "models"
    models.mkdir()
    return Fetcher(hub, models)


def test_files_of_several_segments_are_whole_after_kills_at_any_time(hub, fetcher):
    files = {
        "config.json": b"{}",
        "empty": b"",
        "a/model-1.safetensors": os.urandom(SEGMENT + 1_000_000),
        "model-2.safetensors": os.urandom(2 * SEGMENT),
    }
    hub.repository(REPOSITORY).commit(files)
    size = sum(map(len, files.values()))
    hub.pace = 60e6
    chance = random.Random(7)  # noqa: S311
    for _ in range(15):
        child = fetcher.start()
        until = hub.sent + chance.uniform(0, size / 8)
        deadline = time.monotonic() + chance.uniform(0.3, 1.5)
        while child.poll() is None and hub.sent <= until and time.monotonic() < deadline:
            time.sleep(0.005)
        child.kill()
        child.communicate()
    hub.pace = None
    done = fetcher.run()
    assert done.code == 0, done.err
    check_published(fetcher, files)
    assert hub.sent < 1.4 * size


def test_wrong_content_is_never_published(hub, fetcher):
    files = {"model.safetensors": os.urandom(200_000)}
    hub.repository(REPOSITORY).commit(files)
    hub.fault("/cdn/", flip_at=100_000)
    done = fetcher.run("--json")
    assert done.code == 1
    assert "right size and wrong content" in json.loads(done.out)["message"]
    assert fetcher.model.revisions() == []
    hub.faults.clear()
    assert fetcher.run().code == 0
    check_published(fetcher, files)
