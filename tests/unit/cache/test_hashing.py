"""Digests of files and their segments, and what reading them leaves in the page cache."""

import contextlib
import hashlib
import itertools
import os
import subprocess
import threading
from pathlib import Path

import pytest
from cache_store import described, write_files
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from aerie.cache.hashing import ShortFileError, Task, compare, digest, git_sha1
from aerie.cache.inside import directory
from aerie.cache.manifest import SEGMENT, spans
from aerie.cache.residency import Residency, _resident


@contextlib.contextmanager
def opened(path):
    descriptor = os.open(path, os.O_RDONLY)
    yield descriptor
    os.close(descriptor)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(st.binary(max_size=20000))
def test_the_digests_are_those_of_the_bytes(tmp_path, small_segments, content):
    path = tmp_path / "file"
    path.write_bytes(content)
    counted = []
    with opened(path) as descriptor:
        whole, segments = digest(descriptor, len(content), counted.append)
    assert whole == hashlib.sha256(content).hexdigest()
    assert segments == tuple(hashlib.sha256(content[at : at + 4096]).hexdigest() for at in range(0, len(content), 4096))
    assert sum(counted) == len(content)


def test_an_empty_file_has_a_digest_and_no_segment(tmp_path):
    (tmp_path / "file").touch()
    with opened(tmp_path / "file") as descriptor:
        assert digest(descriptor, 0) == (hashlib.sha256().hexdigest(), ())


def test_a_file_that_is_too_short_is_told(tmp_path):
    (tmp_path / "file").write_bytes(b"12345")
    with opened(tmp_path / "file") as descriptor, pytest.raises(ShortFileError, match="ends at 5 of 6 bytes"):
        digest(descriptor, 6)
    with opened(tmp_path / "file") as descriptor, pytest.raises(ShortFileError):
        git_sha1(descriptor, 6)


def test_gits_name_is_gits(tmp_path):
    (tmp_path / "file").write_bytes(b"hello\n")
    with opened(tmp_path / "file") as descriptor:
        assert git_sha1(descriptor, 6) == "ce013625030ba8dba906f756967f9e9ca394464a"


@pytest.mark.parametrize("size", [1, SEGMENT - 1, SEGMENT, SEGMENT + 1, 3 * SEGMENT])
def test_segments_cover_a_file_without_a_gap(size):
    found = spans(size)
    assert found[0][0] == 0
    assert found[-1][1] == size
    assert all(one[1] == other[0] for one, other in itertools.pairwise(found))


def all_of(files):
    return [Task(file, range(len(file.segments))) for file in files]


def test_the_segments_that_are_wrong_are_named_whatever_the_number_of_threads(tmp_path, small_segments):
    content = {f"d/{number}": os.urandom(number * 3000) for number in range(12)}
    write_files(tmp_path, content)
    files = described(tmp_path)
    with directory(tmp_path) as root:
        assert all(not found.wrong for found in compare(root, all_of(files), 4).values())
        for path, at in {"d/3": 8999, "d/7": 4096, "d/11": 0}.items():
            with (tmp_path / path).open("r+b") as file:
                file.seek(at)
                file.write(bytes([content[path][at] ^ 1]))
        for threads in (1, 3, 16):
            counted = []
            found = compare(root, all_of(files), threads, counted.append)
            assert {path: each.wrong for path, each in found.items() if each.wrong} == {
                "d/3": [2], "d/7": [1], "d/11": [0],
            }  # fmt: skip
            assert sum(counted) == sum(map(len, content.values()))


def test_a_file_that_is_shorter_by_now_is_wrong_from_there(tmp_path, small_segments):
    write_files(tmp_path, {"a": os.urandom(10000)})
    files = described(tmp_path)
    os.truncate(tmp_path / "a", 5000)
    with directory(tmp_path) as root:
        assert compare(root, all_of(files), 2)["a"].wrong == [1, 2]


def test_a_file_that_is_gone_or_a_symlink_is_unreadable(tmp_path):
    write_files(tmp_path, {"a": b"1", "b": b"2", "d/c": b"3"})
    files = described(tmp_path)
    (tmp_path / "a").unlink()
    (tmp_path / "b").unlink()
    (tmp_path / "b").symlink_to("/etc/passwd")
    (tmp_path / "d").rename(tmp_path / "e")
    (tmp_path / "d").symlink_to("e")
    with directory(tmp_path) as root:
        found = compare(root, all_of(files), 2)
    assert {path: (each.unreadable, each.error) for path, each in found.items()} == {
        "a": ([0], "No such file or directory"),
        "b": ([0], "Too many levels of symbolic links"),
        "d/c": ([0], "Not a directory"),
    }


def test_who_gives_up_ends_all_threads_and_leaves_no_file_open(tmp_path, small_segments):
    write_files(tmp_path, {str(number): bytes(40000) for number in range(8)})
    files = described(tmp_path)
    before = len(list(Path("/proc/self/fd").iterdir()))
    calls = []

    def give_up(_count):
        calls.append(1)
        if len(calls) > 5:
            raise KeyboardInterrupt

    with directory(tmp_path) as root, pytest.raises(KeyboardInterrupt):
        compare(root, all_of(files), 4, give_up)
    assert len(calls) < 20
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    assert not [each for each in threading.enumerate() if each.name.startswith("hash-")]


def test_what_was_not_cached_before_is_not_afterwards_and_what_was_stays(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(os.urandom(8 * 2**20))
    subprocess.run(["sync", path], check=True)
    files = described(tmp_path)
    with opened(path) as descriptor:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)  # no read-ahead: just what is asked for
        os.pread(descriptor, 2**20, 2**20)
        before = _resident(descriptor, path.stat().st_size)
        if not 256 <= sum(before) < 2048:
            pytest.skip("this file system's pages cannot be told apart: it keeps them all, as tmpfs does")
        with directory(tmp_path) as root:
            assert compare(root, all_of(files), 2)["file"].wrong == []
        assert _resident(descriptor, path.stat().st_size) == before


def test_a_file_without_pages_has_no_residency(tmp_path):
    (tmp_path / "file").touch()
    with opened(tmp_path / "file") as descriptor:
        Residency(descriptor).restore(0, 0)
