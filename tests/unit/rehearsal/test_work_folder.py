"""The directory that a rehearsal works in."""

from __future__ import annotations

import pytest

from aerie.rehearsal.work_folder import work_folder


def test_it_goes_with_the_rehearsal(tmp_path):
    with work_folder(None, tmp_path) as folder:
        (folder / "target").mkdir()
        (folder / "target/model.safetensors").write_bytes(b"x")
    assert list(tmp_path.iterdir()) == []


def test_it_goes_with_one_that_fails(tmp_path):
    with pytest.raises(KeyboardInterrupt), work_folder(None, tmp_path):
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_one_that_was_asked_for_is_kept(tmp_path):
    asked = tmp_path / "asked"
    asked.mkdir()
    with work_folder(asked, tmp_path) as folder:
        (folder / "engine.log").touch()
    assert (asked / "engine.log").exists()


def test_what_was_killed_is_removed_by_the_next_and_what_works_is_not(tmp_path):
    (tmp_path / "aerie-rehearsal-killed/target").mkdir(parents=True)
    (tmp_path / "triton").mkdir()
    with work_folder(None, tmp_path) as first, work_folder(None, tmp_path) as second:
        assert {path.name for path in tmp_path.iterdir()} == {"triton", first.name, second.name}


def test_a_cache_that_is_not_there(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with work_folder(None, tmp_path / "nowhere") as folder:
        assert folder.parent == tmp_path
