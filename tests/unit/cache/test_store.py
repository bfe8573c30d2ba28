"""Where models lie: what is published, current, previous, locked, held."""

import fcntl
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from cache_store import CONTENT, FIRST, SECOND, THIRD, described, make_manifest, publish, write_files

from aerie.cache.directories import StoreError
from aerie.cache.inside import directory, open_inside
from aerie.cache.layout import BusyError, load_manifest
from aerie.cache.manifest import MANIFEST, ManifestError
from aerie.cache.names import NameRefusedError
from aerie.cache.users import hold, in_use, unused

MAPPED = "import mmap; f = open({path!r}); m = mmap.mmap(f.fileno(), 0, prot=1); f.close()"


def mode(path):
    return f"{path.lstat().st_mode & 0o7777:04o}"


def test_what_is_published_is_whole_read_only_and_open_to_all(model):
    old = os.umask(0o077)
    try:
        path = publish(model, CONTENT)
    finally:
        os.umask(old)
    assert path == model.path / FIRST
    assert {name: (path / name).read_bytes() for name in CONTENT} == CONTENT
    assert load_manifest(path).files == described_without_manifest(path)
    assert {mode(each) for each in path.rglob("*") if each.is_file()} == {"0444"}
    assert {mode(path), mode(path / "assets"), mode(model.path)} == {"0755"}
    assert mode(model.own) == "0700"
    assert str((model.path / "current").readlink()) == FIRST
    assert (model.current(), model.previous(), model.revisions()) == (FIRST, None, [FIRST])


def described_without_manifest(path):
    return tuple(file for file in described(path) if file.path != MANIFEST)


def test_the_revision_before_is_remembered_and_going_back_goes_both_ways(model):
    for revision in (FIRST, SECOND, THIRD):
        publish(model, CONTENT, revision)
    assert (model.current(), model.previous()) == (THIRD, SECOND)
    with model.lock("test"):
        model.switch(SECOND)
        assert (model.current(), model.previous()) == (SECOND, THIRD)
        model.switch(THIRD)
        assert (model.current(), model.previous()) == (THIRD, SECOND)
        model.switch(FIRST)
        assert (model.current(), model.previous()) == (FIRST, THIRD)
        model.switch(FIRST)
    assert (model.current(), model.previous()) == (FIRST, THIRD)


def test_going_back_works_where_two_names_cannot_be_exchanged(model, monkeypatch):
    publish(model, CONTENT, FIRST)
    publish(model, CONTENT, SECOND)
    monkeypatch.setattr("aerie.cache.layout._EXCHANGE", 2**20)  # no such flag: EINVAL, as a file system that cannot
    model.switch(FIRST)
    assert (model.current(), model.previous()) == (FIRST, SECOND)


def test_without_a_switch_the_current_one_stays(model):
    publish(model, CONTENT, FIRST)
    publish(model, CONTENT, SECOND, switch=False)
    assert (model.current(), model.previous()) == (FIRST, None)
    assert model.revisions() == [SECOND, FIRST]


def test_a_revision_is_published_once(model):
    publish(model, CONTENT)
    with pytest.raises(StoreError, match="is there already"):
        publish(model, CONTENT)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda path: (path / "config.json").unlink(), "lacks config.json"),
        (lambda path: (path / "config.json").write_bytes(b""), "config.json is a file of 0 bytes, .* of 54 bytes"),
        (lambda path: (path / "more").write_bytes(b"1"), "more is a file of 1 bytes, .* nothing of that name"),
        (lambda path: (path / "link").symlink_to("config.json"), "link is no regular file"),
        (lambda path: os.mkfifo(path / "pipe"), "pipe is no regular file"),
    ],
)
def test_what_the_manifest_does_not_list_is_not_published(model, spoil, message):
    with model.lock("test"):
        files = model.staging(FIRST) / "files"
        write_files(files, CONTENT)
        manifest = make_manifest(described(files))
        spoil(files)
        with pytest.raises(StoreError, match=message):
            model.publish(files, manifest)
    assert not model.is_published(FIRST)
    assert model.current() is None


def test_one_at_a_time_works_on_a_model_and_the_other_hears_who(model):
    who = rf"`aerie model fetch` \(process {os.getpid()}\): wait for its end"
    with (
        model.lock("aerie model fetch"),
        pytest.raises(BusyError, match=who),
        model.lock("aerie model prune"),
    ):
        pytest.fail("locked twice")
    with model.lock("aerie model prune"):
        pass


def test_who_waits_gets_the_lock_after_the_other(model):
    order = []
    got = threading.Event()

    def other():
        with model.lock("second", wait=True):
            order.append("second")
            got.set()

    with model.lock("first"):
        waiting = threading.Thread(target=other)
        waiting.start()
        assert not got.wait(0.1)
        order.append("first")
    waiting.join(10)
    assert order == ["first", "second"]


@pytest.mark.parametrize("where", ["", ".aerie", ".aerie/lock", ".aerie/staging", f".aerie/staging/{FIRST}"])
def test_a_symlink_in_the_place_of_what_is_aeries_own_is_not_followed(model, tmp_path, where):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    path = model.path / where
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(elsewhere)
    with pytest.raises(StoreError, match=f"{path} "):
        publish(model, CONTENT)
    assert not list(elsewhere.iterdir())


@pytest.mark.parametrize("target", ["../elsewhere", "/data", "latest"])
def test_a_current_that_points_elsewhere_is_told_and_not_replaced(model, target):
    publish(model, CONTENT, switch=False)
    (model.path / "current").symlink_to(target)
    with pytest.raises(StoreError, match=r"current points to '.*', expected a symlink to a revision beside it"):
        model.current()
    with pytest.raises(StoreError, match="current points to"):
        model.switch(FIRST)


@pytest.mark.parametrize("name", ["current", "previous"])
def test_a_current_that_is_no_symlink_is_told_and_not_replaced(model, name):
    publish(model, CONTENT, FIRST)
    publish(model, CONTENT, SECOND)
    publish(model, CONTENT, THIRD, switch=False)
    (model.path / name).unlink()
    (model.path / name).mkdir()
    with pytest.raises(StoreError, match=f"{name} is no symlink"):
        model.switch(THIRD)


def test_what_is_not_published_is_not_switched_to(model):
    publish(model, CONTENT)
    with pytest.raises(StoreError, match=f"Model@{SECOND} is not published"):
        model.switch(SECOND)
    assert model.current() == FIRST


def test_a_revision_that_is_held_is_in_use(model):
    publish(model, CONTENT)
    assert not in_use(model.path / FIRST)
    with hold(model.path / "current"):
        assert in_use(model.path / FIRST)
        with hold(model.path / "current"):
            pass
        assert in_use(model.path / FIRST)
    assert not in_use(model.path / FIRST)


@pytest.mark.skipif(os.geteuid() != 0, reason="a lease is the owner's or root's")
def test_a_file_that_any_process_has_open_or_mapped_is_in_use(model):
    path = publish(model, CONTENT)
    for program in ("f = open({path!r}, 'rb')", MAPPED):
        code = program.format(path=str(path / "assets/vocabulary.bin")) + "; print(1, flush=True); sys.stdin.read()"
        with subprocess.Popen(
            [sys.executable, "-c", f"import sys; {code}"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as other:
            assert other.stdout.readline() == b"1\n"
            assert in_use(model.path / FIRST)
            other.stdin.close()
            other.wait()
        assert not in_use(model.path / FIRST)


@pytest.mark.skipif(os.geteuid() != 0, reason="a lease is the owner's or root's")
def test_who_opens_a_file_while_it_is_asked_whether_it_is_in_use_gets_it(model):
    path = publish(model, CONTENT)
    with (path / "config.json").open("rb") as leased, directory(path) as root:
        fcntl.fcntl(leased, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(leased, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        threading.Timer(0.05, fcntl.fcntl, (leased, fcntl.F_SETLEASE, fcntl.F_UNLCK)).start()
        descriptor = open_inside(root, "config.json")
    assert os.read(descriptor, 100) == CONTENT["config.json"]
    os.close(descriptor)


def test_what_is_being_removed_cannot_be_held(model):
    publish(model, CONTENT)
    held = []

    def try_to_hold():
        try:
            with hold(model.path / FIRST):
                held.append(True)
        except FileNotFoundError:
            held.append(False)

    with unused(model.path / FIRST) as nobody:
        assert nobody
        thread = threading.Thread(target=try_to_hold)
        thread.start()
        thread.join(0.1)
        assert not held
        (model.path / FIRST).rename(model.own / "gone")
    thread.join(10)
    assert held == [False]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xff\xfe", "is no manifest"),
        (b"{", "is not JSON"),
        (b'{"format": 9, "segment": 1}', "another version of Aerie wrote it"),
        (None, "cannot be read: No such file"),
    ],
)
def test_a_manifest_that_is_none_is_named(model, content, message):
    path = publish(model, CONTENT)
    (path / MANIFEST).unlink()
    if content is not None:
        (path / MANIFEST).write_bytes(content)
    with pytest.raises(ManifestError, match=f"{path / MANIFEST}.*{message}"):
        load_manifest(path)


def test_a_manifest_is_not_read_through_a_symlink(model, tmp_path):
    path = publish(model, CONTENT)
    (path / MANIFEST).rename(tmp_path / MANIFEST)
    (path / MANIFEST).symlink_to(tmp_path / MANIFEST)
    with pytest.raises(ManifestError, match="cannot be read"):
        load_manifest(path)


def test_a_store_lists_what_is_aeries_and_nothing_else(store):
    publish(store.model("B"), CONTENT)
    publish(store.model("A"), CONTENT)
    (store.root / "a-persons-own").mkdir()
    (store.root / "link").symlink_to("A")
    (store.root / "file").write_text("")
    (store.root / ".hidden").mkdir()
    assert [model.name for model in store.models()] == ["A", "B"]


def test_a_models_directory_that_is_not_there_is_an_error(store):
    store.root.rmdir()
    with pytest.raises(StoreError, match=f"{store.root} cannot be read: No such file"):
        store.models()


@pytest.mark.parametrize("name", ["..", "a/b", "", ".aerie", "a b", "a" * 97])
def test_a_name_that_is_none_is_refused(store, name):
    with pytest.raises(NameRefusedError):
        store.model(name)


def test_who_locks_and_makes_nothing_leaves_nothing(model):
    with model.lock("test"):
        assert model.is_kept
    assert not model.path.exists()
    model.path.mkdir()  # by a person
    with model.lock("test"):
        pass
    assert list(model.path.iterdir()) == []
    publish(model, CONTENT)
    with model.lock("test"):
        pass
    assert (model.own / "lock").exists()


def test_a_lock_that_was_taken_away_while_one_waited_is_none(model):
    """Two who wait for one that leaves nothing: one after the other, not both at once."""
    inside, most = [], []

    def work():
        with model.lock("test", wait=True):
            inside.append(1)
            most.append(len(inside))
            time.sleep(0.02)
            inside.pop()

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] * 8
    assert not model.path.exists()
