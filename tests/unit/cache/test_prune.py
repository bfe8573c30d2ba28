"""`aerie model prune`, `list` and `rollback`."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cache_store import CONTENT, FIRST, FOURTH, SECOND, THIRD, publish, write_files

import aerie
from aerie import cli
from aerie.cache.progress import amount
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


@pytest.fixture
def another():
    """Let another process run Python and wait; gives its process number."""
    with contextlib.ExitStack() as stack:

        def start(code):
            command = [
                sys.executable,
                "-c",
                f"import fcntl, mmap, os, sys; {code}; print(flush=True); sys.stdin.read()",
            ]
            process = stack.enter_context(
                subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd="/")
            )
            stack.callback(process.stdin.close)
            assert process.stdout.readline()
            return process.pid

        yield start


USES = {
    "holds it": "fd = os.open({path!r}, os.O_RDONLY); fcntl.flock(fd, fcntl.LOCK_SH)",
    "has a file open": "f = open({path!r} + '/modeling.py')",
    "has a file mapped": "f = open({path!r} + '/more', 'rb'); m = mmap.mmap(f.fileno(), 0, prot=1); f.close()",
}


@pytest.mark.skipif(os.geteuid() != 0, reason="a lease is the owner's or root's")
@pytest.mark.parametrize("how", USES)
def test_who_uses_it_is_told(model, five, run, another, how):
    another(f"fd = os.open({str(model.path / FIRST)!r}, os.O_RDONLY)")  # has it open, as `find` has, and uses nothing
    process = another(USES[how].format(path=str(model.path / FIRST)))
    name = Path(f"/proc/{process}/comm").read_text().strip()
    _, told = run("prune")
    assert [each["why"] for each in told["items"] if not each["removed"]] == [f"{name} (process {process}) uses it"]
    assert removed(told) == [SECOND, THIRD]


@pytest.mark.skipif(os.geteuid() != 0, reason="a lease is the owner's or root's")
def test_of_many_who_use_it_some_are_told(model, five, run, another):
    for _ in range(4):
        another(USES["holds it"].format(path=str(model.path / FIRST)))
    why = {each["path"].rsplit("/", 1)[1]: each["why"] for each in run("prune")[1]["items"]}[FIRST]
    assert why.count("(process ") == 3
    assert why.endswith(" and 1 more use it")


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


def leads_out(model):
    (model.path / "current").unlink()
    (model.path / "current").symlink_to("/data/somewhere")


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (leads_out, "current points to '/data/somewhere'"),
        (lambda model: shutil.rmtree(model.path / model.current()), "which is not there: there are "),
    ],
)
@pytest.mark.parametrize("how", [[], ["--dry-run"]], ids=["for good", "dry run"])
def test_a_current_that_leads_nowhere_lets_nothing_of_that_model_be_removed(
    model, five, store, capsys, spoil, told, how
):
    for revision in (FIRST, SECOND, THIRD):
        publish(store.model("Other"), CONTENT, revision, source="hf:someone/Model")
    spoil(model)
    left = model.revisions()
    assert cli.main(["model", "prune", "--models-dir", str(store.root), *how]) == 1
    shown = capsys.readouterr()
    assert f"Model is left as it is: {model.path / 'current'}" in shown.err
    assert told in shown.err
    assert f"Other: {store.root / 'Other' / FIRST} {'would be ' if how else ''}removed" in shown.out
    assert model.revisions() == left


def test_of_a_model_with_nothing_in_service_the_newest_stays(model, run):
    for revision in (FIRST, SECOND, THIRD):
        path = publish(model, CONTENT, revision, switch=False, source="hf:someone/Model")
        os.utime(path / "aerie-manifest.json", (int(revision[0]), int(revision[0])))
    _, told = run("prune", "--keep", 1)
    assert {each["path"].rsplit("/", 1)[1]: each["why"] for each in told["items"]} == {
        THIRD: "the newest, and nothing is in service",
        SECOND: "one of the 1 newest",
        FIRST: "neither current nor the one before",
    }
    assert model.revisions() == [THIRD, SECOND]


def test_a_model_that_is_being_fetched_is_left_and_told(model, five, store, capsys):
    publish(store.model("Other"), CONTENT)
    with model.lock("aerie model fetch"):
        assert cli.main(["model", "prune", "--models-dir", str(store.root)]) == 1
    assert "Model is left as it is: Model is being worked on by `aerie model fetch`" in capsys.readouterr().err
    assert len(model.revisions()) == 5


@pytest.mark.parametrize("dry", [["--dry-run"], []], ids=["dry run", "for good"])
def test_what_another_revision_shares_is_not_freed_until_the_last_goes(model, run, dry):
    """FIRST and SECOND share a file with what is current, and another with each other alone."""
    for revision in (FIRST, SECOND, THIRD, FOURTH):
        publish(model, {"own": os.urandom(50_000)}, revision, source="hf:someone/Model")
    paths = [model.path / each for each in (FIRST, SECOND, THIRD, FOURTH)]
    size = 4096 * 25
    for name, sharing in {"kept": paths, "gone": paths[:2]}.items():
        (sharing[0] / name).write_bytes(os.urandom(size))
        for each in sharing[1:]:
            (each / name).hardlink_to(sharing[0] / name)
    (paths[0] / "twice").hardlink_to(paths[0] / "own")
    own = [sum((path / each).stat().st_blocks * 512 for each in ("own", "aerie-manifest.json")) for path in paths]
    code, told = run("prune", *dry)
    assert code == 0
    freed = {each["path"].rsplit("/", 1)[1]: (each["size"], each["freed"]) for each in told["items"]}
    assert freed[SECOND] == (own[1] + 2 * size, own[1])  # the newer one first
    assert freed[FIRST] == (own[0] + 2 * size, own[0] + size)
    assert told["freed"] == own[0] + own[1] + size


def test_people_read_what_is_freed_beside_what_is_shared(model, store, capsys):
    for revision in (FIRST, SECOND, THIRD):
        publish(model, {"own": os.urandom(100_000)}, revision, source="hf:someone/Model")
    path = model.path / FIRST
    (path / "shared").write_bytes(os.urandom(200_000))
    (model.path / THIRD / "shared").hardlink_to(path / "shared")
    stays, own, manifest = ((path / each).stat().st_blocks * 512 for each in ("shared", "own", "aerie-manifest.json"))
    for how, done in ((["--dry-run"], "would be removed"), ([], "removed")):
        assert cli.main(["model", "prune", "--models-dir", str(store.root), *how]) == 0
        (first, last) = capsys.readouterr().out.splitlines()
        size = amount(stays + own + manifest)
        assert f"{FIRST} {done}, {size}, of which {amount(stays)} stay, shared with what is kept: neither" in first
        assert last == f"{amount(own + manifest)} {'would be ' if how else ''}freed"


@pytest.mark.parametrize(
    ("age", "told", "days"),
    [
        (30, "less than 2 minutes", "0"),
        (5 * 60, "5 minutes", "0"),
        (90 * 60, "90 minutes", "0"),
        (5 * 3600, "5 hours", "0.2"),
        (2.39 * 24 * 3600, "2 days", "2.3"),
        (40 * 24 * 3600, "40 days", "40"),
        (-3600, "less than 2 minutes", "0"),
    ],
)
def test_the_days_that_are_named_remove_what_was_half_fetched(model, run, age, told, days):
    with model.lock("test"):
        path = model.staging(FIRST)
    touched = time.time() - age
    for each in (path, path / "files"):
        os.utime(each, (touched, touched))
    (item,) = run("prune")[1]["items"]
    assert (
        item["why"]
        == f"half fetched, the next fetch goes on from it; touched {told} ago, and `--staging {days}` removes it"
    )
    assert removed(run("prune", "--staging", str(float(days) + 1))[1]) == []
    (item,) = run("prune", "--staging", days)[1]["items"]
    assert (item["removed"], item["why"]) == (True, f"not touched for {told}")


@pytest.mark.parametrize("command", ["prune", "rollback", "verify"])
def test_a_model_that_is_not_there_is_told(model, store, run, command):
    assert f"there is no model Nobody in {store.root}, nor any other" in run(command, "Nobody")[1]
    publish(model, CONTENT)
    publish(store.model("tiny"), CONTENT)
    (store.root / "own").mkdir()
    (store.root / "alias").symlink_to("tiny")
    for name, words in {
        "Nobody": f"there is no model Nobody in {store.root}; there are Model, tiny",
        "TINY": f"there is no model TINY in {store.root}: is tiny meant? There are Model, tiny",
        "tinny": "is tiny meant?",
        "own": "the directory own there is none of Aerie's: `aerie model adopt` takes the weights in one",
        "alias": "alias is a symlink to tiny, and a model is a directory: give that one's name",
    }.items():
        code, told = run(command, name)
        assert code == 1
        assert words in told
    assert not (store.root / "Nobody").exists()


def test_a_wrong_name_among_others_removes_nothing(model, five, run):
    assert run("prune", "Model", "Nobody")[0] == 1
    assert len(model.revisions()) == 5


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


def test_a_manifest_that_cannot_be_used_is_a_failure_of_list(model, run, store, capsys):
    path = publish(model, CONTENT)
    (path / "aerie-manifest.json").chmod(0o644)
    (path / "aerie-manifest.json").write_text("{")
    code, told = run("list")
    assert (code, told["models"][0]["error"]) == (1, None)
    assert "is not JSON" in told["models"][0]["revisions"][0]["error"]
    assert cli.main(["model", "list", "--models-dir", str(store.root)]) == 1
    assert "is not JSON" in capsys.readouterr().out


def test_list_shows_a_model_whose_current_revision_is_gone(model, store, run, capsys):
    publish(model, CONTENT, FIRST)
    shutil.rmtree(publish(model, CONTENT, SECOND))
    publish(store.model("Other"), CONTENT)
    shutil.rmtree(store.root / "Other" / FIRST)
    code, told = run("list")
    assert code == 1
    there, gone = told["models"]
    assert [each["revision"] for each in there["revisions"]] == [FIRST]
    assert there["missing"] == [{"revision": SECOND, "state": "current"}]
    assert (gone["revisions"], gone["missing"]) == ([], [{"revision": FIRST, "state": "current"}])
    assert "current points to" in there["error"]
    assert cli.main(["model", "list", "--models-dir", str(store.root)]) == 1
    shown = capsys.readouterr()
    assert [line.split()[:3] for line in shown.out.splitlines()] == [
        ["Model", FIRST, "previous"], ["Model", SECOND, "current"], ["Other", FIRST, "current"],
    ]  # fmt: skip
    assert shown.out.count("not there") == 2
    assert f"Other/current points to {FIRST}, which is not there" in shown.err


def test_list_shows_that_the_revision_before_is_gone_which_harms_nobody(model, run):
    first = publish(model, CONTENT, FIRST)
    publish(model, CONTENT, SECOND)
    shutil.rmtree(first)
    code, told = run("list")
    assert (code, told["models"][0]["missing"]) == (0, [{"revision": FIRST, "state": "previous"}])


def test_what_is_gone_does_not_become_the_revision_before(model, run):
    publish(model, CONTENT, FIRST)
    second = publish(model, CONTENT, SECOND)
    shutil.rmtree(second)
    model.switch(FIRST)
    assert (model.current(), model.previous()) == (FIRST, None)
    publish(model, CONTENT, SECOND)
    assert (model.current(), model.previous()) == (SECOND, FIRST)


def test_what_is_not_ours_in_a_staging_harms_nobody(model, run):
    publish(model, CONTENT, FIRST)
    (model.own / "staging/not-a-key").mkdir(parents=True)
    code, told = run("list")
    assert (code, told["models"][0]["staging"]) == (0, [])
    assert run("prune")[0] == 0
    assert (model.own / "staging/not-a-key").is_dir()


def test_a_symlink_in_a_models_place_is_left_out_and_told(model, store, run, capsys):
    publish(model, CONTENT)
    (store.root / "alias").symlink_to("Model")
    (store.root / "dangling").symlink_to("nothing")
    code, told = run("list")
    assert (code, [each["name"] for each in told["models"]]) == (0, ["Model"])
    assert [each["path"] for each in told["left_out"]] == [str(store.root / "alias"), str(store.root / "dangling")]
    words = f"{store.root / 'alias'} is left out: it is a symlink to Model, and a model is a directory"
    for command in ("list", "verify"):
        assert cli.main(["model", command, "--models-dir", str(store.root)]) == 0
        assert words in capsys.readouterr().err


def test_list_ends_with_who_reads_it(model, store):
    publish(model, CONTENT)
    program = "import sys; from aerie import cli; sys.exit(cli.main())"
    environment = os.environ | {"PYTHONPATH": str(Path(aerie.__file__).parents[1])}
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-c", program, "model", "list", "--models-dir", store.root],
        stdout=writing, stderr=subprocess.PIPE, text=True, env=environment, check=False,
    )  # fmt: skip
    os.close(writing)
    assert (done.returncode, done.stderr) == (-signal.SIGPIPE, "")


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
