"""`aerie model fetch` on a small set; tests/cache has each fault, and more kills."""

import json
import os
import random
import re
import subprocess
import time

import pytest
from cache_store import write_files
from fetching import NAME, REPOSITORY, Fetcher, check_published, nothing_published, safetensors
from hub_server import Hub

from aerie.cache.layout import Store
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
    assert "what was fetched is kept" in message
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


def test_only_what_leaves_weights_out_excuses_that_they_are_not_there(fetcher, tmp_path):
    source = tmp_path / NAME
    write_files(source, LACKING | {"README.md": b"x"})
    done = fetcher.run("--exclude", "README.md", source=str(source))
    assert done.code == 1
    assert "1 of 2 shards are missing" in done.err


def test_weights_that_their_authors_laid_out_oddly_are_published_with_a_warning(fetcher, tmp_path):
    source = tmp_path / NAME
    weights = SHARDS | {"consolidated.safetensors": safetensors(3000)}
    write_files(source, weights)
    done = fetcher.run(source=str(source))
    assert done.code == 0, done.err
    assert "consolidated.safetensors stands beside the shards" in done.err
    check_published(fetcher, weights)


def test_a_published_commit_is_there_for_a_dry_run_as_for_a_fetch(fetcher, home_made, tmp_path):
    assert fetcher.run("--name", "m", source=str(home_made)).code == 0
    revision = Store(fetcher.models).model("m").current()
    write_files(tmp_path / "other", SHARDS)
    for dry in (["--dry-run"], []):
        done = fetcher.run("--name", "m", "--revision", revision, "--json", *dry, source=str(tmp_path / "other"))
        assert done.code == 0, done.err
        assert json.loads(done.out)["state"] == "there already"


def test_shards_that_were_not_chosen_are_not_missed(fetcher, tmp_path):
    source = tmp_path / NAME
    write_files(source, SHARDS)
    done = fetcher.run("--exclude", "model-00002*", source=str(source))
    assert (done.code, done.err) == (0, "")
    assert "whole" in done.out


@pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts")
def test_a_dry_run_refuses_what_cannot_be_written(hub, fetcher):
    hub.repository(REPOSITORY).commit({"model.safetensors": safetensors(200_000)})
    mount = ["mount", "-t", "tmpfs", "-o", "size=1000k", "small", str(fetcher.models)]
    subprocess.run(mount, check=True)
    try:
        assert fetcher.run("--dry-run").code == 0
        hub.repository(REPOSITORY).commit({"model.safetensors": safetensors(2_000_000)})
        for dry in (["--dry-run"], []):
            done = fetcher.run("--json", *dry)
            assert done.code == 1
            message = json.loads(done.out)["message"]
            assert re.search(r"has 1.02 MB free, and 2.00 MB are to come, with 0 B to spare: free 9\d\d kB", message)
        subprocess.run(["mount", "-o", "remount,ro", str(fetcher.models)], check=True)
        done = fetcher.run("--dry-run")
        assert done.code == 1
        assert f"{fetcher.models} is on a file system that is read-only: mount it to be written to" in done.err
    finally:
        subprocess.run(["umount", str(fetcher.models)], check=True)


@pytest.fixture
def home_made(tmp_path):
    """A directory without a manifest: its content names it."""
    source = tmp_path / "home-made"
    source.mkdir()
    (source / "config.json").write_bytes(b"{}")
    (source / "model.safetensors").write_bytes(safetensors(200_000))
    return source


def test_what_is_no_commit_is_refused_where_the_content_names_the_revision(fetcher, home_made, tmp_path):
    for arguments in (["--dry-run", "--json"], ["--json"]):
        done = fetcher.run("--revision", "abc", *arguments, source=str(home_made))
        assert done.code == 1
        assert f"{home_made} knows no revisions, and 'abc' was asked for" in json.loads(done.out)["message"]
        assert "40 hexadecimal digits" in done.err
        assert "kept" not in done.err
    assert list(fetcher.models.iterdir()) == []


def test_a_revision_is_compared_with_the_content_before_it_is_published(fetcher, home_made):
    source = str(home_made)
    done = fetcher.run("--revision", "0" * 40, source=source)
    assert done.code == 1
    model = Store(fetcher.models).model("home-made")
    assert model.revisions() == []
    assert model.current() is None
    found = re.search(r"holds revision ([0-9a-f]{40}), and 0{40} was asked for: nothing was published", done.err)
    assert found, done.err
    assert "the same command" not in done.err
    # It is known by now, and told before anything.
    done = fetcher.run("--revision", "0" * 40, "--dry-run", source=source)
    assert done.code == 1
    assert found[0] in done.err
    # What was fetched is there for who takes it, by its name or without.
    done = fetcher.run("--revision", found[1], "--json", source=source)
    assert done.code == 0, done.err
    assert json.loads(done.out)["fetched_bytes"] == 0
    assert model.current() == found[1]
    # One that is published is not switched to instead.
    (home_made / "config.json").write_bytes(b'{"a": 1}')
    assert fetcher.run(source=source).code == 0
    other = model.current()
    done = fetcher.run("--revision", "1" * 40, source=source)
    assert done.code == 1
    assert f"holds revision {other}, and {'1' * 40} was asked for" in done.err
    assert model.current() == other
