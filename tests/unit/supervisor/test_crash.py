"""What `/status` shows of a crash."""

from datetime import UTC, datetime
from pathlib import Path

import pytest

from aerie.diagnosis import Collector
from aerie.startup import lines
from aerie.supervisor.crash import shown

AT = datetime(2026, 11, 29, 12, tzinfo=UTC)
LOG = """\
(EngineCore pid=77) ERROR 11-29 11:59:58 [core.py:1010] Traceback (most recent call last):
(EngineCore pid=77) ERROR 11-29 11:59:58 [core.py:1010]   File "/opt/venv/vllm/v1/engine/core.py", line 12, in run
(EngineCore pid=77) ERROR 11-29 11:59:58 [core.py:1010] ValueError: cannot answer 'a private question'
"""


@pytest.fixture
def diagnosis():
    collector = Collector()
    collector.feed(lines.parse(LOG))
    return collector.diagnose("vllm serve ended with exit code 1")


def test_the_text_is_what_the_container_prints_last(diagnosis):
    written = shown(diagnosis, AT, Path("/r.txt"), served=False)
    assert written["text"] == diagnosis.text()
    assert "a private question" in written["text"]
    assert (written["at"], written["report"]) == ("2026-11-29T12:00:00Z", "/r.txt")


def test_what_may_quote_a_request_is_in_none_of_it(diagnosis):
    written = shown(diagnosis, AT, None, served=True)
    assert "private" not in str(written)
    assert written["root"]["text"] == "ValueError"
    assert "ValueError" in written["text"]
