"""What one engine writes, and which of it anybody may see."""

import pytest

from aerie.startup.history import History
from aerie.startup.start import StartReader
from aerie.supervisor.output import Output


@pytest.fixture
def output():
    return Output(StartReader(0.0, History.from_json({}), 900.0))


@pytest.mark.parametrize("pieces", [1, 7, 4096])
def test_the_last_line_is_the_starts(output, pieces):
    said = b"INFO 11-29 13:35:03 [x.py:1] loading\nINFO:     Application startup complete.\nPOST a private question\n"
    output.feed(said[:37])
    assert (output.last_line, output.open) == ("loading", False)
    for begin in range(37, len(said), pieces):
        output.feed(said[begin : begin + pieces])
    assert output.open
    assert output.last_line.endswith("Application startup complete.")
    assert output.tail == said
