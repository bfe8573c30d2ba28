"""A store with nothing in it yet."""

import pytest
from hypothesis import settings

from aerie.cache.layout import Store

settings.register_profile("cache", deadline=None)  # what waits for a disk takes what it takes
settings.load_profile("cache")


@pytest.fixture
def store(tmp_path):
    root = tmp_path / "models"
    root.mkdir()
    return Store(root)


@pytest.fixture
def model(store):
    return store.model("Model")


@pytest.fixture
def small_segments(monkeypatch):
    """Segments of 4 KiB, pieces of 1 KiB: what a large file shows, with a small one."""
    monkeypatch.setattr("aerie.cache.manifest.SEGMENT", 4096)
    monkeypatch.setattr("aerie.cache.hashing._PIECE", 1024)
