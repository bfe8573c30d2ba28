"""`aerie model prune`, `list` and `rollback`."""

import json
import os
import time

import pytest
from cache_store import CONTENT, FIRST, FOURTH, SECOND, THIRD, publish, write_files

from aerie import cli
from aerie.cache.users import hold


@pytest.fixture
def run(store, capsys):
    """Run a command and return its exit code, and its JSON or its message."""

    def run_(command, *arguments):
        code = cli.main(["model", command, "--models-dir", str(store.root), "--json", *map(str, arguments)])
        told = capsys.readouterr()
        result = json.loads(told.out)
        return code, told.err if result.get("state") == "failed" else result

    return run_


@pytest.fixture
def five(model):
    """Five revisions, the last of which is current."""
    revisions = [FIRST, SECOND, THIRD, FOURTH, "5" * 40]
    for number, revision in enumerate(revisions):
        path = publish(model, CONTENT | {"more": os.urandom(10000)}, revision, source="hf:someone/Model")
        os.utime(path / "aerie-manifest.json", (number, number))
    return revisions


def removed(told):
    return sorted(each["path"].rsplit("/", 1)[1] for each in told["items"] if each["removed"])


@pytest.mark.parametrize(("keep", "gone"), [(0, [FIRST, SECOND, THIRD]), (1, [FIRST, SECOND]), (2, [FIRST]), (9, [])])
def test_current_previous_and_the_newest_further_ones_stay(model, five, run, keep, gone):
    code, told = run("prune", "--keep", keep, "--dry-run")
    assert (code, removed(told)) == (0, gone)
    assert len(model.revisions()) == 5
    code, told = run("prune", "--keep", keep)
    assert (code, removed(told)) == (0, gone)
    assert sorted(model.revisions()) == sorted(set(five) - set(gone))
    assert (told["freed"] > 0) == bool(gone)
    assert (model.current(), model.previous()) == (five[4], five[3])
    assert run("prune", "--keep", keep)[1]["freed"] == 0


def test_without_being_told_only_current_and_the_one_before_stay(five, run):
    assert removed(run("prune", "--dry-run")[1]) == [FIRST, SECOND, THIRD]


def test_what_may_be_the_only_copy_stays(model, run):
    """Adopted from a person's own training, or put there by hand: nothing brings it back."""
    for revision in (FIRST, SECOND, THIRD, FOURTH):
        publish(model, CONTENT, revision, source="adopted" if revision == FIRST else "hf:someone/Model")
    (model.path / SECOND / "aerie-manifest.json").unlink()
    code, told = run("prune")
    assert (code, removed(told)) == (0, [])
    why = {each["path"].rsplit("/", 1)[1]: each["why"] for each in told["items"]}
    assert "no source of it is known; --adopted removes it" in why[FIRST]
    assert "whose it is cannot be told" in why[SECOND]
    assert removed(run("prune", "--adopted")[1]) == [FIRST]


def test_what_is_held_stays_and_the_rest_goes(model, five, run):
    with hold(model.path / FIRST):
        _, told = run("prune", "--keep", 0)
    assert removed(told) == [SECOND, THIRD]
    assert {each["why"] for each in told["items"] if not each["removed"]} == {"somebody uses it"}
    assert FIRST in model.revisions()


@pytest.mark.skipif(os.geteuid() != 0, reason="a lease is the owner's or root's")
def test_what_is_open_stays_though_nobody_holds_it(model, five, run):
    with (model.path / SECOND / "modeling.py").open():
        assert removed(run("prune", "--keep", 0)[1]) == [FIRST, THIRD]


def test_what_was_rolled_back_to_stays(model, five, run):
    assert run("rollback", "Model", FIRST)[0] == 0
    assert removed(run("prune", "--keep", 0)[1]) == [SECOND, THIRD, FOURTH]
    assert sorted(model.revisions()) == [FIRST, five[4]]


def test_stale_staging_goes_when_asked_or_when_it_is_published(model, run):
    publish(model, CONTENT, FIRST)
    for key in (FIRST, SECOND, THIRD):
        write_files(model.staging(key) / "files", {"shard": bytes(5000)})
    old = time.time() - 3 * 24 * 3600
    for path in (model.staging_path(SECOND), *model.staging_path(SECOND).rglob("*")):
        os.utime(path, (old, old))
    _, told = run("prune")
    assert removed(told) == [FIRST]
    assert all("the next fetch goes on from it" in each["why"] for each in told["items"] if not each["removed"])
    assert removed(run("prune", "--staging", "2")[1]) == [SECOND]
    assert removed(run("prune", "--staging", "0")[1]) == [THIRD]
    assert model.staging_keys() == []


def test_a_current_that_cannot_be_read_lets_nothing_be_removed(model, five, run):
    (model.path / "current").unlink()
    (model.path / "current").symlink_to("/data/somewhere")
    code, told = run("prune", "--keep", 0)
    assert code == 1
    assert "current points to '/data/somewhere'" in str(told)
    assert len(model.revisions()) == 5


def test_a_model_that_is_being_fetched_is_left_and_told(model, five, store, capsys):
    publish(store.model("Other"), CONTENT)
    with model.lock("aerie model fetch"):
        assert cli.main(["model", "prune", "--models-dir", str(store.root)]) == 1
    assert "Model is left as it is: Model is being worked on by `aerie model fetch`" in capsys.readouterr().err
    assert len(model.revisions()) == 5


def test_a_model_that_is_not_there_is_told(store, run):
    code, told = run("prune", "Nobody")
    assert (code, "Nobody is not in" in told) == (1, True)


def test_people_read_what_went_and_how_much(model, five, store, capsys):
    assert cli.main(["model", "prune", "--models-dir", str(store.root), "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert f"Model: {model.path / FIRST} would be removed" in shown
    assert shown.splitlines()[-1].endswith("would be freed")


def test_list_shows_everything(model, store, run, capsys):
    publish(model, CONTENT, FIRST, source="hf:someone/Model")
    publish(model, CONTENT, SECOND)
    publish(store.model("Other"), CONTENT, THIRD, switch=False)
    write_files(model.staging(FOURTH) / "files", {"shard": bytes(8192)})
    with hold(model.path / FIRST), model.lock("aerie model fetch"):
        code, told = run("list")
        assert cli.main(["model", "list", "--models-dir", str(store.root)]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert code == 0
    first, other = told["models"]
    assert [(each["revision"], each["state"], each["in_use"]) for each in first["revisions"]] == [
        (SECOND, "current", False), (FIRST, "previous", True),
    ]  # fmt: skip
    assert first["revisions"][1]["source"] == "hf:someone/Model"
    assert first["revisions"][1]["size"] == sum(map(len, CONTENT.values()))
    assert [(each["key"], each["size"]) for each in first["staging"]] == [(FOURTH, 8192)]
    assert "aerie model fetch" in first["staging"][0]["busy"]
    assert [each["state"] for each in other["revisions"]] == [None]
    assert len(shown) == 4
    assert "previous, in use" in shown[1]


def test_list_tells_a_broken_manifest_and_a_broken_current_and_shows_the_rest(model, store, run):
    path = publish(model, CONTENT)
    (path / "aerie-manifest.json").unlink()
    publish(store.model("Other"), CONTENT)
    (store.root / "Other" / "current").unlink()
    (store.root / "Other" / "current").mkdir()
    code, told = run("list")
    assert code == 1
    assert "cannot be read" in told["models"][0]["revisions"][0]["error"]
    assert "is no symlink" in told["models"][1]["error"]
    assert told["models"][1]["revisions"][0]["files"] == len(CONTENT)


def test_an_empty_store_lists_nothing(store, capsys):
    assert cli.main(["model", "list", "--models-dir", str(store.root)]) == 0
    assert capsys.readouterr().out == f"nothing is published in {store.root}\n"


def test_rollback_goes_back_and_back_again(model, run):
    publish(model, CONTENT, FIRST)
    publish(model, CONTENT, SECOND)
    assert run("rollback", "Model") == (0, {"name": "Model", "current": FIRST, "previous": SECOND})
    assert run("rollback", "Model") == (0, {"name": "Model", "current": SECOND, "previous": FIRST})


def test_rollback_to_what_is_damaged_switches_nothing(model, run):
    path = publish(model, CONTENT, FIRST)
    publish(model, CONTENT, SECOND)
    (path / "config.json").unlink()
    code, told = run("rollback", "Model")
    assert code == 1
    assert "config.json  missing" in told
    assert "Nothing was switched" in told
    (path / "aerie-manifest.json").unlink()
    assert "Nothing was switched" in run("rollback", "Model")[1]
    assert model.current() == SECOND


def test_rollback_without_a_revision_before_says_so(model, run):
    publish(model, CONTENT, FIRST)
    assert "Model has no previous revision" in run("rollback", "Model")[1]
    assert "is not published" in run("rollback", "Model", SECOND)[1]
