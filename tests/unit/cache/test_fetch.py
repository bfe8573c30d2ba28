"""`aerie model fetch` on a small set; tests/cache has each fault, and more kills."""

import json
import os
import random
import time

import pytest
from cache_store import write_files
from fetching import NAME, REPOSITORY, Fetcher, check_published, nothing_published, safetensors
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


SHARDS = {f"model-0000{number}-of-00002.safetensors": safetensors(5000) for number in (1, 2)}
CUT = SHARDS | {"model-00002-of-00002.safetensors": SHARDS["model-00002-of-00002.safetensors"][:4000]}
LACKING = dict(list(SHARDS.items())[:1])
ODD = [
    (CUT, "model-00002-of-00002.safetensors is cut off: 4,000 bytes of 5,000"),
    (LACKING, "1 of 2 shards are missing"),
]


@pytest.mark.parametrize(("weights", "says"), ODD)
def test_weights_that_are_not_whole_and_that_nothing_proves_are_published_only_as_they_are(
    fetcher, tmp_path, weights, says
):
    source = tmp_path / NAME
    write_files(source, weights)
    done = fetcher.run("--json", source=str(source))
    assert done.code == 1
    assert nothing_published(fetcher)
    message = json.loads(done.out)["message"]
    assert says in message
    assert "--as-it-is" in message
    assert "are kept" in message
    done = fetcher.run("--json", "--as-it-is", source=str(source))
    assert done.code == 0, done.err
    assert says in done.err
    result = json.loads(done.out)
    assert result["fetched_bytes"] == 0
    assert says in result["odd"][0]
    check_published(fetcher, weights)


@pytest.mark.parametrize(("weights", "says"), ODD)
def test_weights_that_the_hub_proves_are_published_with_a_warning(hub, fetcher, weights, says):
    hub.repository(REPOSITORY).commit(weights)
    done = fetcher.run()
    assert done.code == 0, done.err
    assert says in done.err
    assert "whole" not in done.out
    check_published(fetcher, weights)


def test_shards_that_were_not_chosen_are_not_missed(fetcher, tmp_path):
    source = tmp_path / NAME
    write_files(source, SHARDS)
    done = fetcher.run("--exclude", "model-00002*", source=str(source))
    assert (done.code, done.err) == (0, "")
    assert "whole" in done.out
