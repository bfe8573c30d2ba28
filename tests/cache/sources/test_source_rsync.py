"""Against a real daemon on loopback, and a real rsync behind what stands in for ssh."""

import contextlib
import errno
import os
import shutil
import socket
import socketserver
import subprocess
import sys
import tempfile
import threading
import time

import pytest
from sources_models import REVISION, SHARD

from aerie.cache.manifest import MANIFEST, SEGMENT
from aerie.cache.sources.opening import open_source, parse
from aerie.cache.sources.rsync import RsyncSource
from aerie.cache.sources.source import Offer, SourceError, TryAgainError

# Drops ssh's options and the host, and runs the rest as sshd does.
SSH = """#!/bin/sh
while [ $# -gt 0 ]; do case $1 in -l) shift 2 ;; -*) shift ;; *) break ;; esac; done
shift
cd {home} && exec sh -c "$*"
"""


@pytest.fixture(autouse=True)
def alone(monkeypatch, tmp_path):
    """What rsync writes in between lies where the test looks."""
    for name in [name for name in os.environ if name.startswith("RSYNC_")]:
        monkeypatch.delenv(name)
    space = tmp_path / "space"
    space.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(space))
    return space


def wait_for(port, process):
    deadline = time.monotonic() + 20
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.02)
    pytest.fail("the daemon does not listen")


@pytest.fixture
def daemon(tmp_path):
    """The port of a daemon whose modules are: `m` everything here, `locked` with a password, `full` for nobody."""
    if shutil.which("rsync") is None:
        pytest.fail("rsync is not installed; `./run test-unit` installs it", pytrace=False)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    (tmp_path / "secrets").write_text("me:hunter2\n")
    (tmp_path / "secrets").chmod(0o600)
    settings = f"""
        port = {port}
        address = 127.0.0.1
        use chroot = no
        munge symlinks = no
        lock file = {tmp_path}/lock
        log file = {tmp_path}/log
        {f"uid = {os.geteuid()}" if os.geteuid() == 0 else ""}
        {f"gid = {os.getegid()}" if os.geteuid() == 0 else ""}
        [m]
        path = {tmp_path}
        [locked]
        path = {tmp_path}
        auth users = me
        secrets file = {tmp_path}/secrets
        [denied]
        path = {tmp_path}
        hosts deny = *
        [busy]
        path = {tmp_path}
        max connections = -1
    """
    (tmp_path / "rsyncd.conf").write_text("\n".join(line.strip() for line in settings.splitlines()))
    process = subprocess.Popen(["rsync", "--daemon", "--no-detach", f"--config={tmp_path / 'rsyncd.conf'}"])
    try:
        wait_for(port, process)
        yield port
    finally:
        process.terminate()
        process.wait(20)


@pytest.fixture
def opened():
    sources = []

    def open_(text, revision=None):
        sources.append(open_source(text, revision=revision))
        return sources[-1]

    yield open_
    for source in sources:
        source.close()


@pytest.fixture
def by_ssh(tmp_path, monkeypatch):
    """Let rsync call what stands in for ssh; return a function that replaces it by another script."""
    script = tmp_path / "stand-in"

    def write(text):
        script.write_text(text)
        script.chmod(0o755)

    write(SSH.format(home=tmp_path))
    monkeypatch.setenv("RSYNC_RSH", str(script))
    return write


def content(path, start, end):
    with path.open("rb") as file:
        file.seek(start)
        return file.read(end - start)


@pytest.mark.parametrize("way", ["daemon", "ssh"])
def test_a_peers_directory_is_listed_and_read_in_pieces(way, model, daemon, by_ssh, opened, alone):
    text = f"rsync://127.0.0.1:{daemon}/m/model" if way == "daemon" else f"peer:{model}"
    (model / ".git").mkdir()
    (model / ".git/config").write_text("x")
    (model / "empty").touch()
    source = opened(text + "/")
    assert source.description == text
    listing = source.list()
    assert listing.revision is None
    assert [(offer.path, offer.size) for offer in listing.files] == [
        ("code/a b's [1].py", 5),
        ("config.json", 27),
        ("empty", 0),
        ("model-1.safetensors", SHARD),
    ]
    odd, _, empty, shard = listing.files
    path = model / "model-1.safetensors"
    for start, end in ((0, SEGMENT), (SEGMENT - 5, 2 * SEGMENT + 3), (2 * SEGMENT, SHARD), (5, 6)):
        pieces = list(source.read(shard, start, end))
        assert max(map(len, pieces)) <= 2**20
        assert b"".join(pieces) == content(path, start, end)
    assert b"".join(source.read(odd, 0, 5)) == b"pass\n"
    assert list(source.read(empty, 0, 0)) == []
    source.close()
    assert list(alone.iterdir()) == []


def test_several_threads_read_at_once(model, daemon, opened):
    source = opened(f"rsync://127.0.0.1:{daemon}/m/model")
    shard = source.list().files[2]
    got = {}

    def read(start):
        got[start] = b"".join(source.read(shard, start, start + SEGMENT // 2))

    threads = [threading.Thread(target=read, args=(at,)) for at in range(0, 2 * SEGMENT, SEGMENT // 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert b"".join(got[at] for at in sorted(got)) == content(model / "model-1.safetensors", 0, 2 * SEGMENT)


def test_a_published_directory_gives_its_digests_and_its_files_alone(model, publish, daemon, opened, tmp_path):
    (model / "model-1.safetensors").unlink()
    manifest = publish(model)
    (model / "notes.txt").write_text("not the model's")
    store = tmp_path / "models/Kimi-K2.5"
    (store / ".aerie").mkdir(parents=True, mode=0o700)
    model.rename(store / REVISION)
    (store / "current").symlink_to(REVISION)
    for path in ("", "/current", f"/{REVISION}"):
        source = opened(f"rsync://127.0.0.1:{daemon}/m/models/Kimi-K2.5{path}")
        listing = source.list()
        assert listing.revision == REVISION
        assert [(offer.path, offer.sha256) for offer in listing.files] == [
            (file.path, file.sha256) for file in manifest.files
        ]
        config = listing.files[1]
        assert b"".join(source.read(config, 0, config.size)) == b'{"model_type": "kimi_k25"}\n'
    with pytest.raises(SourceError, match="has no revision ffff"):
        opened(f"rsync://127.0.0.1:{daemon}/m/models/Kimi-K2.5", "f" * 40).list()
    old = "a" * 40
    shutil.copytree(store / REVISION, store / old)
    publish(store / old, revision=old)
    assert opened(f"rsync://127.0.0.1:{daemon}/m/models/Kimi-K2.5", old).list().revision == old


def test_a_manifest_that_is_none_is_refused(model, daemon, opened):
    (model / MANIFEST).write_bytes(b"\xff")
    with pytest.raises(SourceError, match="not one that Aerie wrote"):
        opened(f"rsync://127.0.0.1:{daemon}/m/model").list()


def test_a_snapshot_of_the_hubs_cache_is_followed(model, daemon, opened):
    (model / "blob").write_text("content")
    snapshot = model / "snapshot"
    snapshot.mkdir()
    (snapshot / "config.json").symlink_to("../blob")
    source = opened(f"rsync://127.0.0.1:{daemon}/m/model/snapshot")
    (offer,) = source.list().files
    assert b"".join(source.read(offer, 2, 7)) == b"ntent"
    (snapshot / "gone").symlink_to("../gone")
    with pytest.raises(SourceError, match="link to nothing"):
        source.list()


def test_odd_names_come_as_they_are(daemon, opened, tmp_path):
    names = ["-rf", "a\nb", "ü 模", "back\\#012slash", " leading", "star*[?]", "trailing ", "--delete"]
    (tmp_path / "odd").mkdir()
    for name in names:
        (tmp_path / "odd" / name).write_text(name)
    (tmp_path / "odd" / os.fsdecode(b"\xff")).touch()
    source = opened(f"rsync://127.0.0.1:{daemon}/m/odd")
    found = {offer.path: offer for offer in source.list().files}
    assert set(found) == {*names, "\udcff"}
    for name in names:
        assert b"".join(source.read(found[name], 0, found[name].size)) == name.encode()


def test_what_is_no_file_is_refused(model, daemon, opened):
    os.mkfifo(model / "pipe")
    with pytest.raises(SourceError, match="pipe is a pipe, which no model has"):
        opened(f"rsync://127.0.0.1:{daemon}/m/model").list()


@pytest.mark.parametrize("change", ["touched", "replaced", "shrunk", "gone"])
def test_a_file_that_changed_since_it_was_listed_is_refused(change, model, daemon, opened):
    source = opened(f"rsync://127.0.0.1:{daemon}/m/model")
    shard = source.list().files[2]
    path = model / "model-1.safetensors"
    if change == "gone":
        path.unlink()
    elif change == "touched":
        os.utime(path, (1, 1))
    elif change == "replaced":
        path.write_bytes(b"x" * (SHARD + 1))
    else:
        os.truncate(path, SEGMENT)
    with pytest.raises(SourceError, match="does not have it" if change == "gone" else "listed: let what writes it"):
        list(source.read(shard, SEGMENT, 2 * SEGMENT))


@contextlib.contextmanager
def between(port, after=None):
    """A way to the daemon that counts what comes, and is cut after so many bytes."""
    passed = {"bytes": 0}

    def pump(source, target, count):
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                target.sendall(data)
                if count:
                    passed["bytes"] += len(data)
                    if after is not None and passed["bytes"] >= after:
                        break
        for each in (source, target):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    class Way(socketserver.BaseRequestHandler):
        def handle(self):
            # What waits in here has not come.
            self.request.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 65536)
            with socket.create_connection(("127.0.0.1", port)) as upstream:
                there = threading.Thread(target=pump, args=(self.request, upstream, 0), daemon=True)
                there.start()
                pump(upstream, self.request, 1)
                there.join()

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Way) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield server.server_address[1], passed
        server.shutdown()


def test_a_connection_that_is_cut_is_tried_again_after_what_it_brought(model, daemon, opened):
    shard = opened(f"rsync://127.0.0.1:{daemon}/m/model").list().files[2]
    with between(daemon, 5_000_000) as (port, _):
        source = opened(f"rsync://127.0.0.1:{port}/m/model")
        source._make_space()
        got = bytearray()
        pieces = source.read(shard, 0, SEGMENT)
        with pytest.raises(TryAgainError, match=r"model-1\.safetensors: the connection to 127\.0\.0\.1 failed"):
            keep(pieces, got)
    assert 2**21 < len(got) <= 5_000_000 + 65536
    assert got == content(model / "model-1.safetensors", 0, len(got))


def keep(pieces, got):
    for piece in pieces:
        got += piece


def test_little_more_than_what_is_asked_for_comes(model, daemon, opened):
    shard = opened(f"rsync://127.0.0.1:{daemon}/m/model").list().files[2]
    with between(daemon) as (port, passed):
        source = opened(f"rsync://127.0.0.1:{port}/m/model")
        source._make_space()
        for _ in source.read(shard, 0, SEGMENT):
            pass
        assert passed["bytes"] < SEGMENT * 1.1


def test_a_limit_is_shared_by_those_who_read(model, daemon):
    source = open_source(f"rsync://127.0.0.1:{daemon}/m/model", revision=None, limit=16 * 2**20)
    shard = source.list().files[2]
    began = time.monotonic()
    reads = [source.read(shard, 0, 2**23), source.read(shard, SEGMENT, SEGMENT + 2**23)]
    for pieces in reads:
        next(pieces)
    for pieces in reads:
        keep(pieces, bytearray())
    # Half a second for the first, a second for the second at half the rate.
    assert 0.7 < time.monotonic() - began < 5
    assert source._reads == 0
    source.close()


def test_a_read_that_is_given_up_leaves_nothing(model, daemon, opened, alone):
    source = opened(f"rsync://127.0.0.1:{daemon}/m/model")
    shard = source.list().files[2]
    pieces = source.read(shard, 0, SEGMENT)
    next(pieces)
    pieces.close()
    (space,) = alone.iterdir()
    assert list(space.iterdir()) == []


def test_closing_ends_what_is_still_read(model, daemon, opened, alone):
    source = opened(f"rsync://127.0.0.1:{daemon}/m/model")
    shard = source.list().files[2]
    source._limit = 2**20
    pieces = source.read(shard, 0, SEGMENT)
    next(pieces)
    (process,) = source._running
    source.close()
    assert process.wait(10) == -9
    assert list(alone.iterdir()) == []
    pieces.close()


def test_a_directory_for_temporary_files_without_room_is_named(model, daemon, opened, alone, monkeypatch):
    source = opened(f"rsync://127.0.0.1:{daemon}/m/model")
    shard = source.list().files[2]

    def fail(*_arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "truncate", fail)
    with pytest.raises(SourceError, match=rf"by way of {alone}: No space left on device; name a directory .*TMPDIR"):
        list(source.read(shard, 0, SEGMENT))


def test_what_a_killed_one_left_is_removed_by_the_next(model, daemon, opened, alone):
    text = f"rsync://127.0.0.1:{daemon}/m/model"
    code = (
        "import os, sys; from aerie.cache.sources.opening import open_source; import tempfile;"
        f"tempfile.tempdir = {str(alone)!r}; source = open_source({text!r}, revision=None);"
        "shard = source.list().files[2]; pieces = source.read(shard, 0, 2**26); next(pieces); os.kill(os.getpid(), 9)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False, timeout=60).returncode == -9
    (left,) = alone.iterdir()
    other = opened(text)
    other.list()
    assert left.exists()
    os.utime(left, (1, 1))
    opened(text).list()
    assert not left.exists()
    assert len(list(alone.iterdir())) == 2


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("nothing/x", "has no such module: `rsync rsync://127.0.0.1:[0-9]+/` lists those"),
        ("m/nothing", "does not have it: is the path right"),
        ("denied/x", "has no such module|does not let this machine in"),
        ("locked/model", "asks for a password or refuses it: put it into RSYNC_PASSWORD"),
    ],
)
def test_a_daemon_that_refuses_says_what_to_do(path, why, model, daemon, opened):
    with pytest.raises(SourceError, match=why):
        opened(f"rsync://127.0.0.1:{daemon}/{path}").list()


def test_a_password_comes_from_the_environment(model, daemon, opened, monkeypatch):
    monkeypatch.setenv("RSYNC_PASSWORD", "wrong-secret")
    text = f"rsync://me@127.0.0.1:{daemon}/locked/model"
    with pytest.raises(SourceError, match="RSYNC_PASSWORD") as raised:
        opened(text).list()
    assert "wrong-secret" not in str(raised.value)
    monkeypatch.setenv("RSYNC_PASSWORD", "hunter2")
    assert len(opened(text).list().files) == 3


def test_a_daemon_that_is_not_there_or_busy_is_tried_again(model, daemon, opened):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        with pytest.raises(TryAgainError, match=r"the connection to 127\.0\.0\.1 failed .*Connection refused"):
            opened(f"rsync://127.0.0.1:{taken.getsockname()[1]}/m/model").list()
    with pytest.raises(TryAgainError, match="as many callers as it takes; fewer --connections"):
        opened(f"rsync://127.0.0.1:{daemon}/busy/model").list()


@pytest.mark.parametrize(
    ("said", "code", "kind", "why"),
    [
        ("Host key verification failed.", 255, SourceError, "run `ssh me@peer` once by hand and compare"),
        ("@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @", 255, SourceError, "`ssh-keygen -R peer`"),
        ("me@peer: Permission denied (publickey,password).", 255, SourceError, "`ssh-copy-id me@peer` gives it a key"),
        ("ssh: Could not resolve hostname peer: Name or service not known", 255, SourceError, "look at its spelling"),
        ("ssh: Could not resolve hostname peer: Temporary failure in name resolution", 255, TryAgainError, "now"),
        ("ssh: connect to host peer port 22: Connection refused", 255, TryAgainError, "failed .*Connection refused"),
        ("sh: 1: rsync: not found", 127, SourceError, "peer has no rsync: install it there"),
    ],
)
def test_what_ssh_says_is_put_into_words(said, code, kind, why, by_ssh, opened):
    by_ssh(f"#!/bin/sh\necho '{said}' >&2\nexit {code}\n")
    with pytest.raises(kind, match=why):
        opened("me@peer:/data").list()


def test_a_shell_that_prints_at_login_is_named(by_ssh, opened, model, tmp_path):
    by_ssh(SSH.format(home=tmp_path).replace("cd ", "echo Welcome to this machine; cd "))
    with pytest.raises(SourceError, match="prints something at each login"):
        opened(f"peer:{model}").list()


def test_the_real_ssh_asks_nobody(opened, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        monkeypatch.setenv("RSYNC_RSH", f"ssh -F none -p {taken.getsockname()[1]}")
        with pytest.raises(TryAgainError, match="Connection refused"):
            opened("me@127.0.0.1:/data").list()


def test_a_path_below_the_home_directory_is_found(model, by_ssh, opened):
    for text in ("peer:model", "peer:~/model"):
        assert len(opened(text).list().files) == 3


def test_a_path_with_spaces_and_quotes_is_taken_as_it_is(by_ssh, opened, tmp_path):
    odd = tmp_path / "a 'b' $(touch hit); c"
    odd.mkdir()
    (odd / "x").write_text("x")
    source = opened(f"peer:{odd}")
    assert b"".join(source.read(source.list().files[0], 0, 1)) == b"x"
    assert not (tmp_path / "hit").exists()


def test_rsync_that_is_not_installed_is_named(opened, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SourceError, match="needs rsync, which is not installed: install rsync"):
        opened("rsync://peer/m").list()
    (tmp_path / "rsync").touch(0o755)
    with pytest.raises(SourceError, match="needs ssh, which is not installed: install openssh-client"):
        opened("peer:/data").list()


def test_a_directory_for_temporary_files_that_is_full_is_named():
    source = RsyncSource(parse("peer:/data"))
    error = source._failure(11, 'rsync: write failed on "x": No space left on device (28)', "a")
    assert isinstance(error, SourceError)
    assert "TMPDIR" in str(error)


def test_a_file_that_was_not_listed_is_not_there(model, daemon, opened):
    source = opened(f"rsync://127.0.0.1:{daemon}/m/model")
    source.list()
    with pytest.raises(SourceError, match="does not have it"):
        list(source.read(Offer("nothing", 5, version="x"), 0, 5))
