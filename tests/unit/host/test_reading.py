"""The read rate of a real file, past the cache; and what cannot be measured says so and waits for nobody."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import pytest
from aerie_host import reading

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "model.safetensors"
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, reading.LEAST_FILE)
        file.write(os.urandom(1 << 20))
    return path


def test_a_rate_in_bytes_a_second(large: Path) -> None:
    before = large.stat()
    began = time.monotonic()
    assert reading.read_rate(large, 0.2) > 1 << 20
    assert time.monotonic() - began < 5
    assert large.stat().st_mtime == before.st_mtime


def test_a_small_file_tells_nothing(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(b"{}")
    with pytest.raises(reading.Unmeasurable, match=r"config.json is too small to tell"):
        reading.read_rate(path, 0.1)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(reading.Unmeasurable, match=r"No such file"):
        reading.read_rate(tmp_path / "none", 0.1)


def test_the_largest_file_is_taken_and_links_are_not(large: Path, tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models/small").write_bytes(b"x" * 1000)
    assert reading.largest_file(tmp_path) is None
    (tmp_path / "models/link").symlink_to(large)
    assert reading.largest_file(tmp_path) is None
    assert reading.largest_file(large.parent) == large


def test_what_takes_too_long_is_given_up() -> None:
    began = time.monotonic()
    with pytest.raises(TimeoutError, match=r"no answer in 0.2 s"):
        reading.within(0.2, lambda: time.sleep(60))
    assert time.monotonic() - began < 5


def test_a_result_and_an_error_come_back() -> None:
    assert reading.within(5, lambda: {"free": 1 << 40}) == {"free": 1 << 40}
    with pytest.raises(reading.Unmeasurable, match="no such disk"):
        reading.within(5, lambda: (_ for _ in ()).throw(OSError("no such disk")))


def test_links_into_a_cache_count_once(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs/0a1b").write_bytes(b"x" * 1000)
    (tmp_path / "snapshots").mkdir()
    (tmp_path / "snapshots/model.safetensors").symlink_to("../blobs/0a1b")
    (tmp_path / "snapshots/gone").symlink_to("../blobs/none")
    assert reading.size_of(tmp_path) == 1000
    assert reading.size_of(tmp_path / "none") == 0


def test_half_of_a_file_and_a_second_name_are_no_bytes_more(tmp_path: Path) -> None:
    with (tmp_path / "half fetched").open("wb") as file:
        file.truncate(10**9)
    assert reading.size_of(tmp_path) == 0
    (tmp_path / "weights").write_bytes(bytes(5000))
    (tmp_path / "of the next revision, too").hardlink_to(tmp_path / "weights")
    assert reading.size_of(tmp_path) == 5000
