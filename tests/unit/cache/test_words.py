"""What others have said comes to a terminal as text."""

import pytest

from aerie.cache.manifest import ManifestError, read_manifest
from aerie.cache.sources.source import SourceError, TryAgainError
from aerie.cache.words import counted, printable, quoted

HOSTILE = "no\x1b]0;title\x07 \u202ereversed\r\naerie model fetch: whole \udc80"


def test_nothing_of_it_is_obeyed():
    assert printable(HOSTILE) == r"no\x1b]0;title\x07 \u202ereversed\r\naerie model fetch: whole \udc80"
    assert printable("Grüße, 日本語 'a b'") == "Grüße, 日本語 'a b'"
    assert quoted(HOSTILE) == "no ]0;title reversed aerie model fetch: whole"
    assert len(quoted("x" * 10_000)) < 310


@pytest.mark.parametrize("kind", [SourceError, TryAgainError])
def test_whatever_a_source_says_is_printable(kind):
    assert str(kind(HOSTILE)).isprintable()


def test_a_manifest_that_somebody_else_wrote_does_not_reach_the_terminal():
    text = '{"format": 1, "segment": 67108864, "name": "a", "revision": "%s", "source": "x\\u001b[2J"}' % ("1" * 40)
    with pytest.raises(ManifestError, match="source has characters that are not shown"):
        read_manifest(text)


@pytest.mark.parametrize(("number", "said"), [(0, "0 files"), (1, "1 file"), (2, "2 files"), (1000, "1,000 files")])
def test_one_is_no_plural(number, said):
    assert counted(number, "file") == said
