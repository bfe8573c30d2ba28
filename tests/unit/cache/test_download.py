"""The download's engine with a source that does what a test wants, on a real directory."""

import errno
import hashlib
import os
import threading
import time
from pathlib import Path

import pytest

from aerie.cache import download as download_module
from aerie.cache.download import Download
from aerie.cache.ledger import Ledger, boot_id
from aerie.cache.patience import GaveUpError, Patience
from aerie.cache.progress import Counts
from aerie.cache.sources.source import Offer, SourceError, TryAgainError
from aerie.cache.staging import DiskError

CONTENT = os.urandom(100)
OFFER = Offer("shard", len(CONTENT), sha256=hashlib.sha256(CONTENT).hexdigest())


class Scripted:
    """Yields what `script`, a generator function of the number of the reading, does."""

    description = "peer.example:weights"

    def __init__(self, script):
        self._script = script
        self._readings = 0

    def read(self, _offer, start, end):
        self._readings += 1
        yield from self._script(self._readings, start, end)


@pytest.fixture
def staging(tmp_path):
    (tmp_path / "files").mkdir()
    return tmp_path


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr("aerie.cache.patience.FIRST_PAUSE", 0.01)
    monkeypatch.setattr("aerie.cache.patience.LONGEST_PAUSE", 0.01)
    monkeypatch.setattr(download_module, "_JOIN_SECONDS", 0.3)


def start(script, staging, tally=None):
    return Download(Scripted(script), [OFFER], staging, tally or Counts(OFFER.size, 0), connections=1)


def written(staging, boot=None):
    return Ledger(staging / "ledger", [OFFER], boot or boot_id(), only_look=True).file_written(0)


def durable(staging):
    """What counts after a crash of the machine."""
    return written(staging, "another boot")


def until(condition, seconds=5):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


class Enough(Exception):  # noqa: N818 - no error
    pass


def stop_when(condition):
    def tick():
        if condition():
            raise Enough

    return tick


def test_what_a_source_does_not_foresee_is_told_as_the_sources(staging):
    def script(_reading, _start, _end):
        raise PermissionError(errno.EACCES, "Permission denied", "/mnt/nfs/shard")
        yield

    with pytest.raises(GaveUpError, match=r"10 attempts .* peer.example:weights/shard: Permission denied"):
        start(script, staging).run(lambda: None)


def test_what_came_before_a_connection_stalls_is_kept_from_a_kill(staging):
    released = threading.Event()

    def script(_reading, start, end):
        yield CONTENT[start:60]
        released.wait(10)
        yield CONTENT[60:end]

    begun = time.monotonic()
    with pytest.raises(Enough):
        start(script, staging).run(stop_when(lambda: written(staging) == 60 or time.monotonic() > begun + 3), 0.05)
    assert time.monotonic() - begun < 2
    released.set()


def test_what_waits_for_the_limit_is_written_before(staging):
    source = Scripted(lambda _reading, start, end: iter([CONTENT[start:end]]))
    counts = Counts(OFFER.size, 0)
    begun = time.monotonic()
    download = Download(source, [OFFER], staging, counts, connections=1, limit=10)
    with pytest.raises(Enough):
        download.run(stop_when(lambda: written(staging) == 100 or time.monotonic() > begun + 3), 0.05)
    assert time.monotonic() - begun < 2


def test_nobody_writes_after_it_has_returned(staging, monkeypatch):
    monkeypatch.setattr("aerie.cache.held._SECONDS", 1e9)
    released, ended = threading.Event(), threading.Event()

    def script(_reading, start, _end):
        yield CONTENT[start:60]
        try:
            released.wait(10)
        finally:
            ended.set()

    begun = time.monotonic()
    with pytest.raises(Enough):
        start(script, staging).run(stop_when(lambda: time.monotonic() > begun + 0.2), 0.05)
    before = (staging / "ledger").read_bytes(), (staging / "files/shard").exists()
    released.set()
    assert ended.wait(5)
    time.sleep(0.2)
    assert before == ((staging / "ledger").read_bytes(), (staging / "files/shard").exists())
    assert written(staging) == 0


def test_a_slow_synchronisation_says_nothing_of_a_file_that_was_begun_anew(staging, monkeypatch):
    monkeypatch.setattr(download_module, "_SYNC_SECONDS", 0.05)
    begun, go_on, after, released = (threading.Event() for _ in range(4))
    real = os.fdatasync

    def fdatasync(descriptor):
        name = Path(f"/proc/self/fd/{descriptor}").readlink().name
        if name == "shard" and not begun.is_set():
            begun.set()
            go_on.wait(10)
        real(descriptor)
        if name == "ledger" and go_on.is_set():
            after.set()

    monkeypatch.setattr(os, "fdatasync", fdatasync)

    def script(reading, start, end):
        if reading == 1:
            yield bytes(50)
            assert begun.wait(10)  # 50 bytes are being synchronised, while all of it comes and is found wrong
            yield bytes(50)
            return
        yield CONTENT[start:60]
        until(lambda: written(staging) == 60)
        go_on.set()
        released.wait(10)
        yield CONTENT[60:end]

    seen = []

    def look():
        if after.is_set():
            seen.append(durable(staging))
            raise Enough

    monkeypatch.setattr(download_module, "_SYNC_BYTES", 2**40)
    with pytest.raises(Enough):
        start(script, staging).run(look, 0.005)
    released.set()
    # 0, or 60 where it was synchronised itself by then; 50 is what the file had that is gone.
    assert seen[0] != 50


def test_what_could_not_be_synchronised_is_not_taken_for_written(staging, monkeypatch):
    """The kernel drops such pages, and says so once: what is read back later is what was there before."""
    monkeypatch.setattr(download_module, "_SYNC_SECONDS", 0.1)

    real = os.fdatasync

    def fail(descriptor):
        if Path(f"/proc/self/fd/{descriptor}").readlink().name == "shard":
            raise OSError(errno.EIO, "Input/output error")
        real(descriptor)

    monkeypatch.setattr(os, "fdatasync", fail)
    released = threading.Event()

    def script(_reading, start, end):
        yield CONTENT[start:60]
        released.wait(5)
        yield CONTENT[60:end]

    with pytest.raises(DiskError, match="the disk fails"):
        start(script, staging).run(lambda: None, 0.05)
    released.set()
    assert written(staging) == 0


def test_connections_that_were_sent_away_together_do_not_come_back_together():
    patience = Patience(threading.Event())
    patience.pause(TryAgainError("429", 0.4), 0.4)
    began, came = time.monotonic(), []

    def wait():
        patience.wait_for_leave()
        came.append(time.monotonic() - began)

    threads = [threading.Thread(target=wait) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert min(came) >= 0.39
    assert max(came) - min(came) > 0.05


def test_content_that_stays_wrong_is_an_error(staging):
    with pytest.raises(SourceError, match="twice"):
        start(lambda _reading, start, end: iter([bytes(end - start)]), staging).run(lambda: None)
