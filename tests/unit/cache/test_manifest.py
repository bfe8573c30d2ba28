"""The manifest: what is written is read, and what is not as it was written is refused with words."""

import hashlib
import json

import pytest
from cache_store import FIRST, make_manifest
from hypothesis import given
from hypothesis import strategies as st

from aerie.cache.manifest import SEGMENT, File, ManifestError, content_revision, read_manifest, segment_count, spans

DIGESTS = st.binary(min_size=32, max_size=32).map(bytes.hex)
SIZES = st.integers(min_value=0, max_value=5 * SEGMENT)
PATHS = st.lists(st.text("abcdefgh", min_size=1, max_size=5), min_size=1, max_size=1).map("/".join)


@st.composite
def files(draw):
    size = draw(SIZES)
    segments = draw(st.lists(DIGESTS, min_size=segment_count(size), max_size=segment_count(size)))
    return File(draw(PATHS), size, draw(DIGESTS), tuple(segments))


MANIFESTS = st.builds(
    make_manifest,
    st.lists(files(), max_size=5, unique_by=lambda file: file.path).map(
        lambda found: sorted(found, key=lambda x: x.path)
    ),
    source=st.text(max_size=20),
    options=st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=3),
)


@given(MANIFESTS)
def test_what_is_written_is_read(manifest):
    assert read_manifest(manifest.to_json()) == manifest


@given(st.text(max_size=200))
def test_any_text_is_a_manifest_or_refused(text):
    with pytest.raises(ManifestError):
        read_manifest(text)


ONE = make_manifest(
    [File("a/b", SEGMENT + 1, "0" * 64, ("1" * 64, "2" * 64))], options={"endpoint": "https://mirror.example"}
)


def changed(**values):
    return json.dumps(json.loads(ONE.to_json()) | values)


def with_file(**values):
    content = json.loads(ONE.to_json())
    content["files"][0] |= values
    return json.dumps(content)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not JSON"),
        ("[]", "holds list, expected an object"),
        ("[" * 100000, "is not JSON"),
        (changed(format=2), "has format 2"),
        (changed(segment=1), "segments of 1 bytes"),
        (changed(name="../x"), "is no name for a model"),
        (changed(revision="main"), "is no revision"),
        (changed(source=None), "source is NoneType"),
        (changed(files={}), "files is dict"),
        (changed(files=[1]), "not as it was written"),
        (changed(options=[]), None),
        (changed(options={"a": 1}), "a is int"),
        (changed(options="text"), "not as it was written"),
        (with_file(path="../x"), "does not stay"),
        (with_file(path="aerie-manifest.json"), "Aerie's own"),
        (with_file(path=5), "path is int"),
        (with_file(size=-1), "size is -1"),
        (with_file(size=True), "size is True"),
        (with_file(size=1.0), "size is 1.0"),
        (with_file(size=10**30), "segments, expected"),
        (with_file(size=1), "has 2 segments, expected 1"),
        (with_file(sha256="0"), "is no SHA-256"),
        (with_file(sha256="A" * 64), "is no SHA-256"),
        (with_file(segments=["1" * 64]), "has 1 segments, expected 2"),
        (with_file(segments=["1" * 64, 5]), "is no SHA-256"),
        (with_file(segments="12"), "segments is str"),
    ],
)
def test_what_is_not_as_it_was_written_is_refused(text, message):
    if message is None:
        assert read_manifest(text).options == {}
        return
    with pytest.raises(ManifestError, match=message):
        read_manifest(text)


@given(st.data())
def test_a_manifest_with_a_part_replaced_is_refused_or_read_and_nothing_else(data):
    content = json.loads(ONE.to_json())
    at = content if data.draw(st.booleans()) else content["files"][0]
    key = data.draw(st.sampled_from(sorted(at)))
    odd = st.none() | st.booleans() | st.integers() | st.text(max_size=3) | st.lists(st.none(), max_size=2)
    at[key] = data.draw(odd | st.dictionaries(st.text(max_size=2), st.none(), max_size=2))
    try:
        read_manifest(json.dumps(content))
    except ManifestError:
        return


@given(SIZES)
def test_spans_cover_a_file(size):
    found = spans(size)
    assert len(found) == segment_count(size)
    assert sum(end - start for start, end in found) == size
    assert all(0 < end - start <= SEGMENT for start, end in found)


@given(st.lists(files(), max_size=4, unique_by=lambda file: file.path), st.randoms())
def test_a_contents_revision_is_that_of_the_content_in_whatever_order(found, random):
    revision = content_revision(found)
    random.shuffle(found)
    assert content_revision(found) == revision
    assert len(revision) == len(FIRST)
    if found:
        other = File(found[0].path, found[0].size, hashlib.sha256(b"other").hexdigest(), found[0].segments)
        assert content_revision([other, *found[1:]]) != revision
