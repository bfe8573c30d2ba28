"""`aerie model adopt`: weights that are on the host already, in place."""

import contextlib
import errno
import hashlib
import json
import mmap
import os
import re
import shutil
import tempfile
import time
from importlib import import_module
from pathlib import Path

import pytest
from cache_store import CONTENT, FIRST, SECOND, described, publish, write_files
from fetching import safetensors

from aerie import cli
from aerie.cache import hashing
from aerie.cache.adopt import Options, adopt
from aerie.cache.layout import load_manifest
from aerie.cache.manifest import MANIFEST, content_revision

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - another file system is all that is wanted of it


@pytest.fixture
def run(store, capsys):
    """Run `aerie model adopt` and return its exit code, and its JSON or its message."""

    def run_(*arguments):
        code = cli.main(["model", "adopt", "--models-dir", str(store.root), "--json", *map(str, arguments)])
        told = capsys.readouterr()
        result = json.loads(told.out)
        if code:
            assert result == {"state": "failed", "message": told.err.removeprefix("aerie model adopt: ").rstrip("\n")}
        return code, told.err if code else result

    return run_


def content_of(path):
    return {
        each.relative_to(path).as_posix(): each.read_bytes()
        for each in path.rglob("*")
        if each.is_file() and each.name != MANIFEST
    }


def inodes(path):
    return {each.relative_to(path).as_posix(): each.stat().st_ino for each in path.rglob("*") if each.is_file()}


@pytest.fixture
def home(tmp_path):
    """A drafter that was trained at home."""
    write_files(tmp_path / "Drafter", CONTENT)
    return tmp_path / "Drafter"


def test_a_directory_becomes_a_revision_by_its_content(home, store, run):
    before = inodes(home)
    revision = content_revision(described(home))
    code, told = run(home)
    assert code == 0
    path = store.root / "Drafter" / revision
    assert told == {
        "name": "Drafter", "revision": revision, "path": str(path), "files": len(CONTENT),
        "size": sum(map(len, CONTENT.values())), "moved_from": str(home),
    }  # fmt: skip
    assert content_of(path) == CONTENT
    assert {name: inode for name, inode in inodes(path).items() if name != MANIFEST} == before
    assert not home.exists()
    model = store.model("Drafter")
    assert (model.current(), model.staging_keys()) == (revision, [])
    manifest = load_manifest(path)
    assert (manifest.source, manifest.options) == ("adopted", {})
    assert {each.stat().st_mode & 0o777 for each in path.rglob("*") if each.is_file()} == {0o444}


def test_the_old_layout_becomes_the_new_one_where_it_is(store, run):
    old = store.root / "Kimi-K2.5"
    write_files(old, CONTENT)
    before = inodes(old)
    with (old / "assets/vocabulary.bin").open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        code, told = run(old, "--revision", FIRST)
        assert mapped[:] == CONTENT["assets/vocabulary.bin"]
    assert code == 0
    assert told["path"] == str(old / FIRST)
    assert content_of(old / "current") == CONTENT
    assert {name: inode for name, inode in inodes(old / FIRST).items() if name != MANIFEST} == before
    assert {each.name for each in old.iterdir()} == {".aerie", FIRST, "current"}
    assert run(old)[0] == 0  # again: nothing to do
    assert store.model("Kimi-K2.5").revisions() == [FIRST]


def test_a_revision_that_comes_later_is_adopted_beside_the_other(store, run, home):
    assert run(home, "--revision", FIRST)[0] == 0
    write_files(home, CONTENT | {"config.json": b"{}"})
    assert run(home, "--revision", SECOND, "--no-switch")[0] == 0
    model = store.model("Drafter")
    assert (model.revisions(), model.current()) == ([SECOND, FIRST], FIRST)


def hub_cache(root, content, revision=FIRST):
    """Write a cache as huggingface_hub does, and return the snapshot."""
    repository = root / "models--someone--Kimi-K2.5"
    snapshot = repository / "snapshots" / revision
    (repository / "blobs").mkdir(parents=True)
    for name, data in content.items():
        blob = (
            hashlib.sha256(data).hexdigest()
            if len(data) > 100
            else hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()  # noqa: S324 - git's
        )
        (repository / "blobs" / blob).write_bytes(data)
        link = snapshot / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(repository / "blobs" / blob, link.parent))
    return snapshot


def test_a_snapshot_of_the_hubs_cache_is_adopted_with_its_revision_and_stays(tmp_path, store, run):
    snapshot = hub_cache(tmp_path / "hub", CONTENT)
    code, told = run(snapshot)
    assert code == 0
    assert (told["name"], told["revision"]) == ("Kimi-K2.5", FIRST)
    path = store.root / "Kimi-K2.5" / FIRST
    assert content_of(path) == CONTENT
    assert not [each for each in path.rglob("*") if each.is_symlink()]
    assert load_manifest(path).source == "hf:someone/Kimi-K2.5"
    assert content_of(snapshot) == CONTENT
    assert (snapshot / "config.json").stat().st_ino == (path / "config.json").stat().st_ino
    assert run(snapshot)[0] == 0


def test_a_snapshot_whose_content_is_not_what_the_hub_names_it_is_not_adopted(tmp_path, store, run):
    snapshot = hub_cache(tmp_path / "hub", CONTENT)
    for name in ("assets/vocabulary.bin", "modeling.py"):
        with (snapshot / name).open("r+b") as file:
            file.write(b"XX")
    code, message = run(snapshot)
    assert code == 1
    assert "assets/vocabulary.bin has SHA-256" in message
    assert "modeling.py has git's name" in message
    assert "Nothing was adopted" in message
    assert store.model("Kimi-K2.5").revisions() == []


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda path: (path / "config.json").unlink(), "config.json leads to nothing"),
        (
            lambda path: relink(path / "config.json", "/etc/passwd"),
            "config.json leads out of the cache, to /etc/passwd",
        ),
    ],
)
def test_a_snapshot_that_leads_elsewhere_is_not_adopted(tmp_path, run, spoil, message):
    snapshot = hub_cache(tmp_path / "hub", CONTENT)
    if "nothing" in message:
        (snapshot / "config.json").resolve().unlink()
    else:
        spoil(snapshot)
    code, told = run(snapshot)
    assert code == 1
    assert message in told


def relink(path, target):
    path.unlink()
    path.symlink_to(target)


def test_with_a_source_the_files_are_compared_with_it(tmp_path, home, store, run):
    origin = store.model("Origin")
    source = publish(origin, CONTENT)
    code, told = run(home, "--source", source)
    assert (code, told["revision"]) == (0, FIRST)
    assert load_manifest(store.root / "Drafter" / FIRST).source == str(source)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"config.json": b"{}"}, "config.json has 2 bytes, and 54 by "),
        ({"modeling.py": b"print('HELLO')\n"}, "modeling.py has SHA-256 [0-9a-f]{64}, and [0-9a-f]{64} by "),
        ({"modeling.py": None}, "modeling.py is missing, which .* lists"),
        ({"more.py": b"1"}, "more.py is not what .* lists: move it away first"),
    ],
)
def test_what_differs_from_the_source_is_named_and_nothing_adopted(home, store, run, change, message):
    source = publish(store.model("Origin"), CONTENT)
    for name, data in change.items():
        (home / name).unlink(missing_ok=True)
        if data is not None:
            (home / name).write_bytes(data)
    before = content_of(home)
    code, told = run(home, "--source", source)
    assert code == 1
    assert re.search(message, told)
    assert "Nothing was adopted" in told
    assert content_of(home) == before
    assert store.model("Drafter").revisions() == []


def test_a_revision_that_is_published_with_other_files_is_not_replaced(home, run, store):
    publish(store.model("Drafter"), CONTENT | {"config.json": b"{}"})
    code, told = run(home, "--revision", FIRST)
    assert code == 1
    assert "is published with other files" in told
    assert "config.json is different" in told
    assert content_of(home) == CONTENT


def test_a_copy_leaves_the_original_and_shares_nothing(home, store, run):
    code, told = run(home, "--copy")
    assert code == 0
    path = store.root / "Drafter" / told["revision"]
    assert content_of(path) == content_of(home) == CONTENT
    assert not set(inodes(path).values()) & set(inodes(home).values())
    assert run(home, "--copy")[0] == 0


@pytest.mark.skipif(not SHARED_MEMORY.is_dir(), reason="no second file system here")
def test_from_another_file_system_it_says_to_copy(store, run, request):
    elsewhere = SHARED_MEMORY / f"aerie-test-{os.getpid()}"
    request.addfinalizer(lambda: shutil.rmtree(elsewhere, ignore_errors=True))
    write_files(elsewhere, CONTENT)
    code, told = run(elsewhere, "--name", "Drafter")
    assert code == 1
    assert "another file system? --copy copies it" in told
    assert content_of(elsewhere) == CONTENT
    assert not list(store.root.iterdir())
    code, told = run(elsewhere, "--name", "Drafter", "--copy")
    assert code == 0
    assert content_of(store.root / "Drafter" / told["revision"]) == CONTENT


def test_reflinks_are_made_or_told_to_be_impossible(home, run, store):
    code, told = run(home, "--reflink")
    assert content_of(home) == CONTENT
    if code == 0:
        assert content_of(store.root / "Drafter" / told["revision"]) == CONTENT
    else:
        assert "cannot share the blocks" in told
        assert run(home)[0] == 0


def test_a_published_directory_from_another_host_keeps_its_revision_and_is_compared(tmp_path, store, run):
    published = publish(store.model("Kimi"), CONTENT, source="hf:someone/Kimi")
    carried = tmp_path / "carried"
    shutil.copytree(published, carried)
    (carried / "config.json").chmod(0o644)
    (carried / "config.json").write_bytes(CONTENT["config.json"].upper())
    assert "config.json has SHA-256" in run(carried, "--name", "Other")[1]
    (carried / "config.json").write_bytes(CONTENT["config.json"])
    code, told = run(carried, "--name", "Other")
    assert (code, told["revision"]) == (0, FIRST)
    assert load_manifest(store.root / "Other" / FIRST).source == "hf:someone/Kimi"
    assert not carried.exists()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: (path / "link").symlink_to("/etc/passwd"), "link is no regular file"),
        (lambda path: os.mkfifo(path / "pipe"), "pipe is no regular file"),
        (lambda path: (path / "CONFIG.json").write_text(""), "differ by case alone"),
        (lambda path: (path / "a\nb").write_text(""), "characters that are not shown"),
        (shutil.rmtree, "is not there"),
        (lambda path: (shutil.rmtree(path), path.mkdir()), "has no files"),
        (lambda path: (shutil.rmtree(path), path.write_text("")), "is no directory"),
        (lambda path: (path.rename(path.parent / "x"), path.symlink_to("x")), "is a symlink to .*/x: name that"),
    ],
)
def test_what_cannot_be_adopted_is_told(home, run, store, make, message):
    make(home)
    code, told = run(home)
    assert code in (1, 2)
    assert re.search(message, told)
    assert not store.model("Drafter").revisions()


def test_the_models_directory_itself_and_what_is_published_are_not_adopted(store, run):
    path = publish(store.model("Model"), CONTENT)
    assert "holds the models directory" in run(store.root)[1]
    assert "holds the models directory" in run(store.root.parent)[1]
    assert f"is published already, as Model@{FIRST}" in run(path)[1]
    write_files(store.root / "Model" / "inner", CONTENT)
    assert "lies in" in run(store.root / "Model" / "inner", "--name", "Model")[1]


def test_a_bad_revision_or_name_is_a_mistake_of_usage(home, run):
    assert run(home, "--revision", "main")[0] == 2
    assert run(home, "--name", "a/b")[0] == 2
    assert content_of(home) == CONTENT


def test_what_git_and_the_hub_keep_beside_the_files_is_left(home, run):
    write_files(home, {".git/HEAD": b"x", ".cache/huggingface/download/config.json.metadata": b"y"})
    code, told = run(home)
    assert (code, told["files"]) == (0, len(CONTENT))
    assert sorted(each.name for each in home.iterdir()) == [".cache", ".git"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_the_owner_cannot_write_to_it_any_more(home, store, run):
    for each in home.rglob("*"):
        os.chown(each, 10001, 10001)
    _, told = run(home)
    path = store.root / "Drafter" / told["revision"]
    assert {(each.stat().st_uid, each.stat().st_gid) for each in (path, *path.rglob("*"))} == {(0, 0)}


def test_an_adoption_that_fails_leaves_nothing(home, store, run, monkeypatch):
    (home / "link").symlink_to("/etc/passwd")
    assert run(home)[0] == 1
    assert list(store.root.iterdir()) == []
    (home / "link").unlink()
    monkeypatch.setattr(os, "link", lambda *_args, **_more: (_ for _ in ()).throw(OSError(errno.EXDEV, "Invalid link")))
    assert "another file system?" in run(home)[1]
    assert store.model("Drafter").staging_keys() == []


def test_what_a_killed_adoption_has_hashed_is_not_hashed_again(home, store, run, monkeypatch):
    for name in CONTENT:
        os.utime(home / name, (1, 1))
    time.sleep(2.1)  # what was touched within two seconds is not remembered
    hashed = []

    def digest(descriptor, size, on_bytes):
        if len(hashed) == 2:
            raise KeyboardInterrupt
        hashed.append(size)
        return hashing.digest(descriptor, size, on_bytes)

    monkeypatch.setattr("aerie.cache.originals.digest", digest)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    with pytest.raises(KeyboardInterrupt):
        adopt(adopt_options(home, store))
    assert len(hashed) == 2
    hashed = [None]
    (home / "config.json").write_bytes(b"{ }")  # touched since: hashed again
    told = []
    monkeypatch.setattr("aerie.cache.originals.digest", lambda *given: told.append(given[1]) or hashing.digest(*given))
    code, result = run(home)
    assert code == 0
    assert len(told) < len(CONTENT)
    assert 3 in told
    path = Path(result["path"])
    assert load_manifest(path).files == tuple(file for file in described(path) if file.path != MANIFEST)
    assert not (store.root / "Drafter" / ".aerie" / "hashed").exists()


def adopt_options(directory, store):
    given = dict.fromkeys(
        ("name", "revision", "source", "endpoint", "token_file", "reflink", "copy", "as_it_is", "json")
    )
    return Options(directory=directory, models_dir=store.root, switch=True, **given)


def test_an_endpoint_of_a_manifest_that_somebody_brought_is_not_kept(tmp_path, store, run):
    """A repair sends the Hub's token there."""
    published = publish(
        store.model("Kimi"), CONTENT, source="hf:someone/Kimi", options={"endpoint": "https://evil.example"}
    )
    shutil.copytree(published, tmp_path / "carried")
    assert run(tmp_path / "carried", "--name", "Other")[0] == 0
    assert load_manifest(store.root / "Other" / FIRST).options == {}


def test_an_odd_name_comes_to_no_terminal(home, run):
    (home / os.fsdecode(b"odd\x1b[2J\xff")).symlink_to("x")
    code, told = run(home)
    assert code == 1
    assert "odd\\x1b[2J\\udcff is no regular file" in told
    assert "\x1b" not in told


SHARDS = {f"model-0000{number}-of-00002.safetensors": safetensors(5000) for number in (1, 2)}
CUT = SHARDS | {"model-00002-of-00002.safetensors": SHARDS["model-00002-of-00002.safetensors"][:4000]}
LACKING = dict(list(SHARDS.items())[:1])


@pytest.mark.parametrize(
    ("weights", "says"),
    [
        (CUT, "model-00002-of-00002.safetensors is cut off: 4,000 bytes of 5,000"),
        (LACKING, "1 of 2 shards are missing"),
    ],
)
def test_weights_that_are_not_whole_are_adopted_only_as_they_are(home, store, run, capsys, weights, says):
    write_files(home, weights)
    before = inodes(home)
    code, told = run(home)
    assert code == 1
    assert says in told
    assert "--as-it-is" in told
    assert inodes(home) == before
    assert not list(store.root.iterdir())
    code = cli.main(["model", "adopt", "--models-dir", str(store.root), str(home), "--as-it-is"])
    assert code == 0
    assert says in capsys.readouterr().err
    assert content_of(store.root / "Drafter/current") == CONTENT | weights


@pytest.mark.parametrize("weights", [CUT, LACKING])
def test_weights_that_a_source_proves_are_adopted_with_a_warning(home, tmp_path, store, capsys, weights):
    write_files(home, weights)
    published = publish(store.model("Same"), CONTENT | weights)
    words = ["--source", str(published), "--models-dir", str(store.root)]
    assert cli.main(["model", "adopt", str(home), *words]) == 0
    assert "model-00002-of-00002.safetensors" in capsys.readouterr().err
    assert store.model("Drafter").current() == FIRST


def test_it_is_told_where_the_directory_went_and_a_second_time_what_became_of_it(home, store, capsys):
    words = ["model", "adopt", str(home), "--models-dir", str(store.root)]
    assert cli.main(words) == 0
    revision = store.model("Drafter").current()
    assert f"in {store.root}/Drafter/{revision}, moved from {home}\n" in capsys.readouterr().out
    assert cli.main(words) == 1
    told = capsys.readouterr().err
    assert f"{home} is not there. If it was adopted before, its files are now Drafter@{revision}" in told
    assert "`aerie model list`" in told


def test_a_directory_of_models_is_no_model(tmp_path, store, run):
    for name in ("drafter", "target"):
        write_files(tmp_path / "copied" / name, CONTENT | {"aerie-manifest.json": b"{}"})
    code, told = run(tmp_path / "copied")
    assert code == 1
    assert f"{tmp_path / 'copied'} is no model: it holds what Aerie has published in drafter, target" in told
    assert (tmp_path / "copied/target/config.json").is_file()
    assert not list(store.root.iterdir())


def test_what_was_copied_is_told_to_be_there_still(home, store, capsys):
    assert cli.main(["model", "adopt", str(home), "--copy", "--models-dir", str(store.root)]) == 0
    assert f", also in {home}\n" in capsys.readouterr().out


@pytest.fixture
def open_place():
    """A directory that every user can enter, with a models directory that every user may write to."""
    with tempfile.TemporaryDirectory() as place:
        Path(place).chmod(0o755)
        (Path(place) / "models").mkdir()
        (Path(place) / "models").chmod(0o777)
        yield Path(place)


@contextlib.contextmanager
def user(number):
    os.seteuid(number)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another")
def test_what_is_anothers_is_told_before_it_is_hashed_and_nothing_is_left(open_place, capsys):
    write_files(open_place / "Drafter", CONTENT)
    words = ["model", "adopt", str(open_place / "Drafter"), "--models-dir", str(open_place / "models")]
    with user(65534):
        assert cli.main(words) == 1
    told = capsys.readouterr().err
    assert "is not yours: it belongs to user 0, and this is user 65534. Run this as its owner or as root" in told
    assert not list((open_place / "models").iterdir())
    with user(65534):
        assert cli.main([*words, "--copy"]) == 0
    assert content_of(open_place / "models/Drafter/current") == CONTENT


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another")
@pytest.mark.parametrize(("command", "more"), [("adopt", ["--copy"]), ("fetch", [])])
def test_the_services_user_brings_nothing(open_place, capsys, command, more):
    write_files(open_place / "Drafter", CONTENT)
    for each in (open_place / "Drafter").rglob("*"):
        os.chown(each, 10001, 10001)
    import_module(f"aerie.cache.{command}")  # which this user may not find, below a home directory
    with user(10001):
        words = ["--models-dir", str(open_place / "models"), *more]
        assert cli.main(["model", command, str(open_place / "Drafter"), *words]) == 1
    assert "this is user 10001, as whom the service runs" in capsys.readouterr().err
    assert not list((open_place / "models").iterdir())
