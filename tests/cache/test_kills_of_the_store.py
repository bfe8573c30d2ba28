"""kill -9 at every point of what changes a store: it is the old one or the new one, and a second run completes.

A child counts what it asks of the file system, by Python's own audit events and the calls that have none, and kills
itself at the n-th; n goes from 1 until the child gets through.
"""

import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import pytest
from cache_store import FIRST, SECOND, THIRD, described, make_manifest, publish, write_files

from aerie import cli
from aerie.cache.layout import Store, load_manifest
from aerie.cache.manifest import MANIFEST, read_manifest

CHANGES = {f"os.{name}" for name in ("rename", "link", "symlink", "remove", "rmdir", "mkdir", "chmod", "chown")}
UNTOLD = ("fsync", "pwrite", "copy_file_range", "ftruncate", "fchmod")


@pytest.fixture
def tmp_path():
    """A directory in memory: some hundred runs would wait for a disk most of the time."""
    memory = "/dev/shm"  # noqa: S108
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as path:
        yield Path(path)


@pytest.fixture
def store(tmp_path):
    (tmp_path / "models").mkdir()
    return Store(tmp_path / "models")


def killed_at(number, program, *arguments):
    """Call `program` in a forked child that kills itself at its n-th change; return whether it did."""
    child = os.fork()
    if child == 0:
        try:
            count_down(number)
            os._exit(program(*arguments))
        finally:
            os._exit(99)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, -signal.SIGKILL)
    return status != 0


def count_down(left):
    def count():
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def counted(call):
        def counting(*args, **kwargs):
            count()
            return call(*args, **kwargs)

        return counting

    for name in UNTOLD:
        setattr(os, name, counted(getattr(os, name)))
    sys.addaudithook(lambda event, _: count() if event in CHANGES else None)


def check_whole(path, content):
    found = {
        each.relative_to(path).as_posix(): each.read_bytes()
        for each in path.rglob("*")
        if each.is_file() and each.name != MANIFEST
    }
    assert found == content
    assert load_manifest(path).files == tuple(file for file in described(path) if file.path != MANIFEST)


def every_kill():
    """Yield 1, 2, 3 ... until the caller says that nothing was killed."""
    number = 0
    ended = []
    while not ended:
        number += 1
        yield number, ended


def publish_staged(model, revision):
    with model.lock("test"):
        staging = model.staging(revision)
        model.publish(staging / "files", read_manifest((staging / "manifest").read_text()))
    return 0


def command(*arguments):
    return cli.main(["model", *map(str, arguments)])


SMALL = {"config.json": b"{}", "code/modeling.py": b"1", "shard": os.urandom(5000)}


def test_publishing_and_switching(store):
    for number, ended in every_kill():
        model = store.model(f"Model{number}")
        publish(model, SMALL, FIRST)
        content = SMALL | {"config.json": b'{"new": 1}'}
        staging = model.staging(SECOND)
        write_files(staging / "files", content)
        (staging / "manifest").write_text(make_manifest(described(staging / "files"), SECOND, model.name).to_json())
        if not killed_at(number, publish_staged, model, SECOND):
            ended.append(number)
        if model.is_published(SECOND):
            check_whole(model.path / SECOND, content)
            assert model.current() in (FIRST, SECOND)
            with model.lock("test"):
                model.switch(SECOND)
        else:
            assert model.current() == FIRST
            assert not killed_at(0, publish_staged, model, SECOND)
        check_whole(model.path / FIRST, SMALL)
        check_whole(model.path / "current", content)
        assert (model.current(), model.previous()) == (SECOND, FIRST)
        shutil.rmtree(model.path)
    assert number > 15


def test_rolling_back(store):
    for number, ended in every_kill():
        model = store.model(f"Model{number}")
        for revision in (FIRST, SECOND):
            publish(model, SMALL, revision)
        if not killed_at(number, command, "rollback", model.name, "--models-dir", store.root):
            ended.append(number)
        state = (model.current(), model.previous())
        assert state in {(SECOND, FIRST), (FIRST, SECOND)}
        assert command("rollback", model.name, "--models-dir", store.root) == 0
        assert (model.current(), model.previous()) == (state[1], state[0])
        shutil.rmtree(model.path)
    assert number > 1


@pytest.mark.parametrize("layout", ["beside", "in place"])
def test_adopting(store, tmp_path, layout):
    for number, ended in every_kill():
        model = store.model(f"Model{number}")
        old = model.path if layout == "in place" else tmp_path / model.name
        write_files(old, SMALL)
        before = {name: (old / name).stat().st_ino for name in SMALL}
        arguments = ("adopt", old, "--models-dir", store.root)
        if not killed_at(number, command, *arguments):
            ended.append(number)
        revisions = model.revisions()
        if not revisions:
            assert {name: (old / name).read_bytes() for name in SMALL} == SMALL
        if old.exists():
            assert command(*arguments) == 0
        (revision,) = model.revisions()
        check_whole(model.path / revision, SMALL)
        assert {name: (model.path / revision / name).stat().st_ino for name in SMALL} == before
        assert model.current() == revision
        assert {each.name for each in model.path.iterdir()} == {".aerie", revision, "current"}
        assert layout == "in place" or not old.exists()
        shutil.rmtree(model.path)
    assert number > 20


def test_pruning(store):
    for number, ended in every_kill():
        model = store.model(f"Model{number}")
        for revision in (FIRST, SECOND, THIRD):
            publish(model, SMALL, revision, source="hf:someone/Model")
        arguments = ("prune", "--keep", "0", "--models-dir", store.root)
        if not killed_at(number, command, *arguments):
            ended.append(number)
        for revision in model.revisions():
            check_whole(model.path / revision, SMALL)
        assert (model.current(), model.previous()) == (THIRD, SECOND)
        assert command(*arguments) == 0
        assert sorted(model.revisions()) == [SECOND, THIRD]
        assert not list(model.own.glob("trash/*"))
        shutil.rmtree(model.path)
    assert number > 5


def test_repairing(store, tmp_path):
    source = tmp_path / "source"
    write_files(source, SMALL)
    for number, ended in every_kill():
        model = store.model(f"Model{number}")
        path = publish(model, SMALL, source=str(source))
        (path / "shard").chmod(0o644)
        (path / "shard").write_bytes(bytes(5000))
        shutil.rmtree(path / "code")
        (path / "extra").write_bytes(b"mine")
        arguments = ("verify", "--repair", "--models-dir", store.root)
        if not killed_at(number, command, *arguments):
            ended.append(number)
        assert (path / "shard").read_bytes() in (bytes(5000), SMALL["shard"])
        assert command(*arguments) == 0
        check_whole(path, SMALL)
        assert [each.read_bytes() for each in model.own.rglob("extra")] == [b"mine"]
        assert not (model.own / "repair").exists()
        shutil.rmtree(model.path)
    assert number > 15
