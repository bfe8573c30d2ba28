import errno
import fcntl
import os
import signal
import socket
import threading

import pytest
from sources_models import REVISION, SHARD

from aerie.cache.manifest import MANIFEST, SEGMENT
from aerie.cache.sources import directory as directory_module
from aerie.cache.sources.directory import DirectorySource
from aerie.cache.sources.source import SourceError, TryAgainError


@pytest.fixture
def open_directory():
    sources = []

    def open_(path, **options):
        sources.append(DirectorySource(path, **options))
        return sources[-1]

    yield open_
    for source in sources:
        source.close()


def offers(source):
    return {offer.path: offer for offer in source.list().files}


def test_a_plain_directory_is_listed_and_read_in_pieces(model, open_directory):
    source = open_directory(model)
    listing = source.list()
    assert listing.revision is None
    assert [(offer.path, offer.size) for offer in listing.files] == [
        ("code/a b's [1].py", 5),
        ("config.json", 27),
        ("model-1.safetensors", SHARD),
    ]
    assert all(offer.sha256 is None and offer.version for offer in listing.files)
    shard = listing.files[2]
    pieces = list(source.read(shard, SEGMENT - 5, 2 * SEGMENT + 3))
    assert max(map(len, pieces)) <= 2**20
    with (model / "model-1.safetensors").open("rb") as file:
        file.seek(SEGMENT - 5)
        assert b"".join(pieces) == file.read(SEGMENT + 8)
    assert source.description == str(model)


def test_a_published_directory_gives_its_digests_and_its_files_alone(model, publish, open_directory):
    manifest = publish(model)
    (model / "notes.txt").write_text("not the model's")
    listing = open_directory(model).list()
    assert listing.revision == REVISION
    assert [(offer.path, offer.size, offer.sha256) for offer in listing.files] == [
        (file.path, file.size, file.sha256) for file in manifest.files
    ]
    assert open_directory(model, revision=REVISION).list() == listing


@pytest.mark.parametrize("name", ["", "current", "previous", REVISION])
def test_a_models_directory_of_a_store_is_its_revision(name, model, publish, open_directory, tmp_path):
    publish(model)
    store = tmp_path / "models/Kimi-K2.5"
    (store / ".aerie").mkdir(mode=0o700, parents=True)
    model.rename(store / REVISION)
    for link in ("current", "previous"):
        (store / link).symlink_to(REVISION)
    source = open_directory(store / name)
    assert source.list().revision == REVISION
    assert source.description == str(store / name).rstrip("/")


def test_a_revision_that_is_not_current_any_more_is_found_beside_it(model, publish, open_directory, tmp_path):
    store = tmp_path / "models/Kimi-K2.5"
    old, new = "0" * 40, "1" * 40
    for revision in (old, new):
        (store / revision).mkdir(parents=True)
        (store / revision / "config.json").write_text(revision)
        publish(store / revision, revision=revision)
    (store / "current").symlink_to(new)
    assert open_directory(store / "current", revision=old).list().revision == old
    assert open_directory(store, revision=old).list().revision == old
    assert open_directory(store).list().revision == new


def test_another_revision_than_the_one_asked_for_is_refused(model, publish, open_directory):
    publish(model)
    with pytest.raises(SourceError, match=f"holds revision {REVISION} of Kimi-K2.5, and {'f' * 40} was asked for"):
        open_directory(model, revision="f" * 40).list()


def test_a_damaged_published_directory_is_refused(model, publish, open_directory):
    publish(model)
    (model / "config.json").write_text("{}")
    with pytest.raises(SourceError, match=r"config\.json has 2 bytes, and 27 by its manifest: .*aerie model verify"):
        open_directory(model).list()
    (model / "config.json").unlink()
    with pytest.raises(SourceError, match=r"lacks config\.json"):
        open_directory(model).list()


@pytest.mark.parametrize("content", [b"{}", b"\xff\xfe", b"[" * 100_000])
def test_a_manifest_that_is_none_is_refused(content, model, open_directory):
    (model / MANIFEST).write_bytes(content)
    with pytest.raises(SourceError, match=r"aerie-manifest\.json"):
        open_directory(model).list()


def test_a_snapshot_of_the_hubs_cache_is_followed_to_its_blobs(model, open_directory, tmp_path):
    repository = tmp_path / "hub/models--a--b"
    snapshot = repository / "snapshots" / REVISION
    (repository / "blobs").mkdir(parents=True)
    snapshot.mkdir(parents=True)
    (model / "config.json").rename(repository / "blobs/abc")
    (snapshot / "config.json").symlink_to("../../blobs/abc")
    source = open_directory(snapshot)
    offer = offers(source)["config.json"]
    assert offer.size == 27
    assert b"".join(source.read(offer, 0, 27)) == b'{"model_type": "kimi_k25"}\n'


@pytest.mark.parametrize("target", ["/etc/passwd", "../secret", "../model2/x"])
def test_a_link_out_of_the_directory_is_refused(target, model, open_directory, tmp_path):
    (tmp_path / "secret").write_text("x")
    (tmp_path / "model2").mkdir()
    (tmp_path / "model2/x").write_text("x")
    (model / "link").symlink_to(target)
    with pytest.raises(SourceError, match=r"link leads out of the directory, to /"):
        open_directory(model).list()


def test_a_link_to_a_directory_to_nothing_or_to_itself_is_refused(model, open_directory):
    link = model / "link"
    for target, why in (("code", "link to a directory"), ("gone", "link to nothing"), ("link", "link to nothing")):
        link.symlink_to(target)
        with pytest.raises(SourceError, match=why):
            open_directory(model).list()
        link.unlink()


def test_a_link_within_the_directory_is_its_file(model, open_directory):
    (model / "same.json").symlink_to("config.json")
    assert offers(open_directory(model))["same.json"].size == 27


def test_what_is_no_file_is_refused(model, open_directory):
    os.mkfifo(model / "pipe")
    with pytest.raises(SourceError, match=r"pipe is a pipe, which no model has"):
        open_directory(model).list()
    (model / "pipe").unlink()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(model / "sock"))
        with pytest.raises(SourceError, match="is a socket"):
            open_directory(model).list()


def test_what_tools_left_beside_the_model_is_not_the_models(model, open_directory):
    for name in (".git/config", ".cache/huggingface/download/x.lock", "lost+found/x"):
        (model / name).parent.mkdir(parents=True)
        (model / name).write_text("x")
    assert len(offers(open_directory(model))) == 3


@pytest.mark.parametrize("change", ["touched", "replaced", "shrunk", "gone", "pipe"])
def test_a_file_that_changed_since_it_was_listed_is_refused(change, model, open_directory):
    source = open_directory(model)
    offer = offers(source)["model-1.safetensors"]
    path = model / "model-1.safetensors"
    if change == "touched":
        os.utime(path, (1, 1))
    elif change == "shrunk":
        os.truncate(path, 7)
    else:
        path.unlink()
        if change == "replaced":
            path.write_bytes(b"x")
        elif change == "pipe":
            os.mkfifo(path)
    with pytest.raises(SourceError, match="has changed since" if change != "gone" else "is not there"):
        list(source.read(offer, 0, 10))


def test_a_file_that_changes_while_it_is_read_is_refused_before_its_last_piece(model, open_directory):
    source = open_directory(model)
    offer = offers(source)["model-1.safetensors"]
    pieces = source.read(offer, 0, SEGMENT)
    next(pieces)
    with (model / "model-1.safetensors").open("r+b") as file:
        file.write(b"new")
    os.utime(model / "model-1.safetensors", (1, 1))
    read = []
    with pytest.raises(SourceError, match=r"has changed since it was listed: let what writes it end"):
        read.extend(len(piece) for piece in pieces)
    assert sum(read) < SEGMENT


def test_a_file_that_shrinks_while_it_is_read_is_refused(model, open_directory):
    source = open_directory(model)
    pieces = source.read(offers(source)["model-1.safetensors"], 0, SEGMENT)
    next(pieces)
    os.truncate(model / "model-1.safetensors", 2**20)
    with pytest.raises(SourceError, match="ended at 1048576 bytes"):
        list(pieces)


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO, errno.ETIMEDOUT])
def test_a_file_server_that_is_away_is_tried_again(number, model, open_directory, monkeypatch):
    source = open_directory(model)
    offer = offers(source)["model-1.safetensors"]

    def fail(*_arguments):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(directory_module.os, "pread", fail)
    with pytest.raises(TryAgainError, match=f"model-1.safetensors could not be read: {os.strerror(number)}"):
        list(source.read(offer, 0, 10))


def test_what_is_no_directory_says_so(model, open_directory, tmp_path):
    with pytest.raises(SourceError, match=r"missing is not there: is the path right"):
        open_directory(tmp_path / "missing").list()
    with pytest.raises(SourceError, match="is no directory"):
        open_directory(model / "config.json").list()
    (tmp_path / "empty").mkdir()
    with pytest.raises(SourceError, match="has no files: is it mounted"):
        open_directory(tmp_path / "empty").list()


def test_a_revision_that_is_read_is_held(model, publish, open_directory):
    publish(model)
    source = open_directory(model)
    source.list()
    other = os.open(model, os.O_RDONLY)
    try:
        with pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        source.close()
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(other)


def test_a_lease_that_somebody_has_for_a_moment_is_waited_for(model, open_directory):
    """`aerie model list` and `prune` look so whether a file is in use."""
    source = open_directory(model)
    offer = offers(source)["config.json"]
    holder = os.open(model / "config.json", os.O_RDONLY)
    fcntl.fcntl(holder, fcntl.F_SETSIG, signal.SIGURG)
    fcntl.fcntl(holder, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    try:
        threading.Timer(0.05, lambda: fcntl.fcntl(holder, fcntl.F_SETLEASE, fcntl.F_UNLCK)).start()
        assert b"".join(source.read(offer, 0, offer.size)) == (model / "config.json").read_bytes()
    finally:
        os.close(holder)


def test_a_lease_that_stays_is_tried_again_later(model, open_directory, monkeypatch):
    monkeypatch.setattr("aerie.cache.inside._LEASED", 2)
    source = open_directory(model)
    offer = offers(source)["config.json"]
    holder = os.open(model / "config.json", os.O_RDONLY)
    fcntl.fcntl(holder, fcntl.F_SETSIG, signal.SIGURG)
    fcntl.fcntl(holder, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    try:
        with pytest.raises(TryAgainError):
            list(source.read(offer, 0, offer.size))
    finally:
        os.close(holder)
