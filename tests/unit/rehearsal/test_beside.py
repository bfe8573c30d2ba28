"""Whether there is room for an engine beside a service."""

import pytest

from aerie.rehearsal import beside
from aerie.rehearsal.findings import Verdict
from aerie.rehearsal.overrides import BESIDE_NEEDS


@pytest.mark.parametrize("free", [(), (BESIDE_NEEDS,), (2 * BESIDE_NEEDS, BESIDE_NEEDS)])
def test_room(monkeypatch, free):
    monkeypatch.setattr(beside.gpus, "free_bytes", lambda: free)
    assert beside.room_beside() is None


def test_no_room_on_one_gpu(monkeypatch):
    monkeypatch.setattr(beside.gpus, "free_bytes", lambda: (BESIDE_NEEDS, BESIDE_NEEDS - 2**30, 0))
    finding = beside.room_beside()
    assert finding.verdict is Verdict.SKIPPED
    assert finding.text.startswith("GPU 1 has 7.0 GiB free, and an engine beside takes 8")
