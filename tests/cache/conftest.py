"""A hub with one small repository, and a fetcher for it."""

import pytest
from fetching import REPOSITORY, Fetcher, safetensors
from hub_server import Hub


@pytest.fixture
def hub():
    with Hub() as hub:
        yield hub


@pytest.fixture
def models(tmp_path):
    models = tmp_path / "models"
    models.mkdir()
    return models


@pytest.fixture
def fetcher(hub, models):
    return Fetcher(hub, models)


@pytest.fixture
def files(hub):
    """What the repository holds."""
    content = {
        "config.json": b'{"model_type": "kimi_k25"}',
        "modeling/kimi.py": b"print('hello')\n",
        "empty": b"",
        "model-00001-of-00002.safetensors": safetensors(3_000_001),
        "model-00002-of-00002.safetensors": safetensors(2_500_000),
    }
    hub.repository(REPOSITORY).commit(content)
    return content


@pytest.fixture
def size(files):
    return sum(map(len, files.values()))
