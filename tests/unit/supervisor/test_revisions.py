"""What an engine reads stays where it is while it runs, whichever way its path leads."""

import fcntl
import json
import os
import threading
from dataclasses import replace

import pytest

from aerie.cache.manifest import Manifest
from aerie.engine_arguments import ConfigurationError, read_arguments
from aerie.supervisor.arguments import check_paths, read
from aerie.supervisor.revisions import Holding, Revision, pinned, shown

FIRST, SECOND = "a" * 40, "b" * 40


@pytest.fixture
def store(tmp_path):
    """Return a directory of models as they are published: a target of two revisions, and a plain drafter."""
    model = tmp_path / "Kimi-K2.5"
    for revision in (FIRST, SECOND):
        (model / revision).mkdir(parents=True)
        (model / revision / "config.json").write_text("{}")
        manifest = Manifest("Kimi-K2.5", revision, "adopted", (), "aerie 0", "2026-01-01T00:00:00Z")
        (model / revision / "aerie-manifest.json").write_text(manifest.to_json())
    (model / "current").symlink_to(FIRST)
    (tmp_path / "drafter").mkdir()
    (tmp_path / "drafter" / "config.json").write_text("{}")
    return tmp_path


@pytest.fixture
def words(store):
    speculation = {"method": "eagle3", "model": str(store / "drafter"), "num_speculative_tokens": 3}
    return [str(store / "Kimi-K2.5/current"), "--speculative-config", json.dumps(speculation), "--port", "8000"]


@pytest.fixture
def holding():
    held = Holding()
    yield held
    held.release()


def can_be_pruned(directory):
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True


def test_it_holds_the_revision_that_the_link_leads_to(store, words, holding):
    holding.take(read(words, {}))
    assert not can_be_pruned(store / "Kimi-K2.5" / FIRST)
    assert not can_be_pruned(store / "drafter")
    assert can_be_pruned(store / "Kimi-K2.5" / SECOND)
    holding.release()
    assert can_be_pruned(store / "Kimi-K2.5" / FIRST)


def test_it_names_what_it_holds(store, words, holding):
    holding.take(read(words, {}))
    assert shown(holding.revisions) == [
        {
            "role": "model",
            "name": "Kimi-K2.5",
            "revision": FIRST,
            "directory": str(store / "Kimi-K2.5" / FIRST),
        },
        {"role": "drafter", "name": "drafter", "revision": None, "directory": str(store / "drafter")},
    ]


def test_a_repository_of_the_hub_is_nothing_to_hold(holding):
    holding.take(read(["org/model"], {}))
    assert holding.revisions == []


def test_a_manifest_that_cannot_be_read_counts_as_none(store, words, holding):
    (store / "Kimi-K2.5" / FIRST / "aerie-manifest.json").write_text("{}")
    holding.take(read(words, {}))
    assert holding.revisions[0].revision is None
    assert holding.revisions[0].name == "Kimi-K2.5"


def test_a_switch_while_it_waits_for_the_lock_is_seen(store, words, holding):
    """Who prunes holds the directory alone; when it lets go, the link may lead elsewhere."""
    current = store / "Kimi-K2.5/current"
    pruner = os.open(current, os.O_RDONLY)
    fcntl.flock(pruner, fcntl.LOCK_EX)
    taking = threading.Thread(target=holding.take, args=(read(words, {}),))
    taking.start()
    (store / "Kimi-K2.5/next").symlink_to(SECOND)
    (store / "Kimi-K2.5/next").replace(current)
    os.close(pruner)
    taking.join(30)
    assert holding.revisions[0].revision == SECOND
    assert not can_be_pruned(store / "Kimi-K2.5" / SECOND)
    assert can_be_pruned(store / "Kimi-K2.5" / FIRST)


def test_what_is_gone_is_told(store, words, holding):
    engine = read(words, {})
    gone = replace(engine, model=str(store / "drafter/../drafter"))
    holding.take(gone)  # by whatever way
    (store / "Kimi-K2.5/current").unlink()
    holding.take(engine)  # check_paths tells of it
    assert [each.role for each in holding.revisions] == ["drafter"]


def test_the_engine_is_given_the_revision_itself(store, words, holding):
    engine = read(words, {})
    holding.take(engine)
    given = read_arguments(pinned(words, engine, holding.revisions))
    assert given["model"] == str(store / "Kimi-K2.5" / FIRST)
    assert given["served-model-name"] == str(store / "Kimi-K2.5/current")
    assert given["speculative-config"]["model"] == str(store / "drafter")
    assert given["port"] == "8000"


def test_of_a_file_too(store, tmp_path, holding):
    (store / "linked").symlink_to("drafter")
    config = tmp_path / "serve.yaml"
    config.write_text(
        f"model: {store}/Kimi-K2.5/current\nserved-model-name: kimi\n"
        f"speculative-config:\n  method: eagle3\n  model: {store}/linked\n  num_speculative_tokens: 3\n"
    )
    words = ["--config", str(config)]
    engine = read(words, {})
    holding.take(engine)
    told = pinned(words, engine, holding.revisions)
    assert told[0] == str(store / "Kimi-K2.5" / FIRST)
    given = read_arguments(told)
    assert given["model"] == told[0]
    assert given["served-model-name"] == "kimi"
    assert given["speculative-config"] == {
        "method": "eagle3",
        "model": str(store / "drafter"),
        "num_speculative_tokens": 3,
    }


def test_words_without_links_stay_as_they_are(store):
    words = [str(store / "drafter"), "--port", "8000"]
    held = [Revision("model", "drafter", None, store / "drafter")]
    assert pinned(words, read(words, {}), held) == words


@pytest.mark.parametrize(
    ("prepare", "told"),
    [
        (lambda model: (model / "current").unlink(), "aerie model fetch"),
        (lambda model: ((model / "current").unlink(), (model / "config.json").touch()), "aerie model adopt"),
        (lambda model: (model / FIRST).rename(model / "gone"), f"it leads to {FIRST}"),
    ],
)
def test_a_link_that_leads_nowhere_says_what_to_do(store, words, prepare, told):
    prepare(store / "Kimi-K2.5")
    with pytest.raises(ConfigurationError, match=told):
        check_paths(read(words, {}))


def test_a_service_holds_what_it_serves_and_says_which(serving, store):
    with serving.run(model=str(store / "Kimi-K2.5/current")) as service:
        state = service.until_phase("ready")
        assert [(each["name"], each["revision"]) for each in state["models"]] == [("Kimi-K2.5", FIRST)]
        assert FIRST[:12] in service.get("/")[1]
        assert not can_be_pruned(store / "Kimi-K2.5" / FIRST)
    assert can_be_pruned(store / "Kimi-K2.5" / FIRST)
