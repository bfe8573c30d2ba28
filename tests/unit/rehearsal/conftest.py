"""The published pair's configuration, in directories that a test may change."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import pytest
from sparse_checkpoint import MODELS

if TYPE_CHECKING:
    from pathlib import Path


class Model:
    """A copy of a published model's files; `change` sets fields of its config.json, None takes one out."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def change(self, **fields: Any) -> Model:
        path = self.directory / "config.json"
        config = json.loads(path.read_text())
        part = config.get("text_config", config)
        for name, value in fields.items():
            part.pop(name, None)
            if value is not None:
                part[name] = value
        path.write_text(json.dumps(config))
        return self


@pytest.fixture
def published(tmp_path):
    def copy(name: str, called: str | None = None) -> Model:
        directory = tmp_path / (called or name)
        shutil.copytree(MODELS / name, directory)
        return Model(directory)

    return copy


@pytest.fixture
def kimi(published):
    return published("moonshotai--Kimi-K2.5")


@pytest.fixture
def mla_drafter(published):
    return published("lightseekorg--kimi-k2.5-eagle3-mla")
