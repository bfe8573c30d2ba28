"""A store with nothing in it yet."""

import pytest

from aerie.cache.layout import Store


@pytest.fixture
def store(tmp_path):
    root = tmp_path / "models"
    root.mkdir()
    return Store(root)


@pytest.fixture
def model(store):
    return store.model("Model")
