"""One tiny pair for all tests that only read it."""

from __future__ import annotations

import pytest

from aerie.checkpoint.tiny import write_tiny


@pytest.fixture(scope="session")
def one_thread():
    """Small matrices gain nothing from threads, which spin while they wait: beside other work, ten times as long."""
    torch = pytest.importorskip("torch", reason="the weights are made with torch, which is in the image")
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def pair(tmp_path_factory, one_thread):
    out = tmp_path_factory.mktemp("pair") / "tiny"
    assert write_tiny(out, 0)
    return out
