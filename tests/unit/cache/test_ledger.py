"""The ledger: what it keeps, from one process to the next, over a crash of the machine, and for another listing."""

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from aerie.cache.ledger import Identity, Ledger, boot_id
from aerie.cache.manifest import SEGMENT, File
from aerie.cache.sources.source import Offer

SHA = "a" * 64
OTHER = "b" * 64
OFFERS = (
    Offer("config.json", 10, git_sha1="c" * 40),
    Offer("empty", 0, git_sha1="e" * 40),
    Offer("model.safetensors", 2 * SEGMENT + 5, sha256=SHA),
)
DIGESTS = ("1" * 64, "2" * 64, "3" * 64)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "ledger"


def opened(path, offers=OFFERS, boot="boot-1"):
    return Ledger(path, offers, boot)


def test_it_begins_with_nothing(path):
    ledger = opened(path)
    assert [list(ledger.segments(number)) for number in range(3)] == [[0], [], [1, 2, 3]]
    assert [ledger.file_written(number) for number in range(3)] == [0, 0, 0]
    assert path.stat().st_mode & 0o777 == 0o600
    assert not ledger.damaged


def test_what_was_written_is_there_after_a_kill(path):
    ledger = opened(path)
    ledger.note_written(0, 10)
    ledger.note_written(2, 1234)
    # Not closed and not synchronised, as a killed process leaves it.
    again = opened(path)
    assert (again.written(0), again.written(2), again.written(3)) == (10, 1234, 0)


def test_only_what_is_durable_is_there_after_a_crash_of_the_machine(path):
    ledger = opened(path)
    ledger.note_written(1, 100)
    counts = ledger.counts(2)
    ledger.note_written(1, 250)
    ledger.note_durable(2, counts)
    assert opened(path).written(1) == 250
    assert opened(path, boot="boot-2").written(1) == 100
    assert opened(path, boot="boot-2").written(1) == 100


def test_what_is_begun_anew_is_not_durable(path):
    ledger = opened(path)
    ledger.note_written(1, SEGMENT)
    counts = ledger.counts(2)
    ledger.forget(2)
    ledger.note_written(1, 10)
    ledger.note_durable(2, counts)
    assert opened(path, boot="boot-2").written(1) == 0


def test_a_verified_file_is_known_until_it_is_touched(path, tmp_path):
    file = tmp_path / "file"
    file.write_bytes(bytes(10))
    ledger = opened(path)
    ledger.note_verified(0, Identity.of(file.stat()), SHA, DIGESTS[:1])
    for boot in ("boot-1", "boot-2"):
        assert opened(path, boot=boot).verified(0, file.stat()) == File("config.json", 10, SHA, DIGESTS[:1])
    os.utime(file)
    assert opened(path).verified(0, file.stat()) is None


def test_a_forgotten_file_is_not_verified(path, tmp_path):
    file = tmp_path / "file"
    file.write_bytes(bytes(10))
    ledger = opened(path)
    ledger.note_verified(0, Identity.of(file.stat()), SHA, DIGESTS[:1])
    ledger.forget(0)
    assert opened(path).verified(0, file.stat()) is None


def test_digests_that_did_not_reach_the_disk_with_the_mark_verify_nothing(path, tmp_path):
    file = tmp_path / "file"
    file.write_bytes(bytes(10))
    ledger = opened(path)
    ledger.note_verified(0, Identity.of(file.stat()), SHA, DIGESTS[:1])
    content = path.read_bytes()
    path.write_bytes(content.replace(bytes.fromhex(DIGESTS[0]), bytes(32)))
    assert opened(path).verified(0, file.stat()) is None


def test_another_listing_keeps_what_is_the_same(path):
    ledger = opened(path)
    ledger.note_written(0, 10)
    ledger.note_written(3, 5)
    changed = (Offer("added", 3, version="1"), OFFERS[2], Offer("config.json", 10, git_sha1="d" * 40))
    again = opened(path, changed)
    assert [again.file_written(number) for number in range(3)] == [0, 5, 0]
    assert again.written(again.segments(1)[2]) == 5


@pytest.mark.parametrize(
    "other",
    [
        Offer("model.safetensors", 2 * SEGMENT + 5, sha256=OTHER),
        Offer("model.safetensors", 2 * SEGMENT + 6, sha256=SHA),
    ],
)
def test_another_content_is_begun_anew(path, other):
    opened(path).note_written(1, 7)
    assert opened(path, (*OFFERS[:2], other)).file_written(2) == 0


def test_another_version_of_unknown_content_is_begun_anew(path):
    opened(path, (Offer("a", 100, version="1"),)).note_written(0, 7)
    assert opened(path, (Offer("a", 100, version="1"),)).written(0) == 7
    assert opened(path, (Offer("a", 100, version="2"),)).written(0) == 0


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_damaged_one_is_set_aside_or_understood_but_never_a_crash(tmp_path, data):
    path = tmp_path / "ledger"
    path.unlink(missing_ok=True)
    ledger = opened(path)
    ledger.note_written(1, 1000)
    ledger.close()
    content = bytearray(path.read_bytes())
    kind = data.draw(st.sampled_from(["cut", "flip", "noise"]))
    if kind == "cut":
        content = content[: data.draw(st.integers(0, len(content) - 1))]
    elif kind == "flip":
        content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    else:
        content = bytearray(data.draw(st.binary(max_size=200)))
    path.write_bytes(content)
    again = opened(path)
    for number, offer in enumerate(OFFERS):
        assert 0 <= again.file_written(number) <= offer.size
    if kind != "flip":
        assert again.damaged
        assert again.file_written(2) == 0
    again.close()


def test_a_directory_or_a_link_in_its_place_is_set_aside(path, tmp_path):
    path.mkdir()
    assert opened(path).damaged
    path.unlink()
    precious = tmp_path / "precious"
    precious.write_text("precious")
    path.symlink_to(precious)
    (tmp_path / "ledger.damaged").rmdir()
    assert opened(path).damaged
    assert precious.read_text() == "precious"


def test_the_kernel_names_this_boot():
    assert boot_id() == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
