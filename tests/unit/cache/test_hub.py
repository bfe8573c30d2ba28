"""The Hub as a source: listings and ranges; tests/cache has what a whole fetch makes of it."""

import os

import pytest
from fetching import REPOSITORY
from hub_server import Hub

from aerie.cache.sources.hub import HubSource
from aerie.cache.sources.source import SourceError, TryAgainError

SHARD = os.urandom(300_000)


@pytest.fixture(autouse=True)
def environment(monkeypatch, tmp_path):
    for name in ("HF_TOKEN", "HF_ENDPOINT", "HF_HUB_DISABLE_XET", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def hub():
    with Hub() as hub:
        hub.repository(REPOSITORY).commit({"config.json": b"{}", "a b/ü#?.bin": SHARD, "empty": b""})
        yield hub


@pytest.fixture
def source(hub):
    source = HubSource(REPOSITORY, endpoint=hub.url)
    yield source
    source.close()


def offers(source):
    return {offer.path: offer for offer in source.list().files}


def read(source, offer, start=0, end=None):
    return b"".join(source.read(offer, start, offer.size if end is None else end))


def test_a_listing_has_the_digests(hub, source):
    listing = source.list()
    assert listing.revision == hub.repository(REPOSITORY).branches["main"]
    blobs = hub.repository(REPOSITORY).commits[listing.revision]
    for offer in listing.files:
        sha256, git = blobs[offer.path].digests
        assert (offer.size, offer.sha256, offer.git_sha1) == (
            (blobs[offer.path].size, sha256, None) if offer.size > 100 else (blobs[offer.path].size, None, git)
        )
    assert source.options == {"endpoint": hub.url}
    assert source.description == f"hf:{REPOSITORY}"


@pytest.mark.parametrize(("start", "end"), [(0, 300_000), (0, 1), (299_999, 300_000), (65_535, 131_073), (7, 7)])
def test_any_range(source, start, end):
    assert read(source, offers(source)["a b/ü#?.bin"], start, end) == SHARD[start:end]


def test_a_signed_address_serves_all_ranges_of_a_file(hub, source):
    offer = offers(source)["a b/ü#?.bin"]
    hub.reset_counters()
    for start in range(0, 300_000, 100_000):
        read(source, offer, start, start + 100_000)
    assert len([path for _, path, _ in hub.requests if "/resolve/" in path]) == 1


def test_a_range_without_a_total(hub, source):
    offer = offers(source)["a b/ü#?.bin"]
    hub.fault("/cdn/", status=206, headers={"Content-Range": "bytes 0-19/*"})
    assert read(source, offer, 0, 20) == b"as the test wants it"


@pytest.mark.parametrize("location", ["http://[", "file:///etc/passwd", "http://", "gopher://x/y", "javascript:1"])
def test_a_redirect_to_no_web_address(hub, source, location):
    offer = offers(source)["a b/ü#?.bin"]
    hub.fault("/resolve/", status=302, headers={"Location": location})
    with pytest.raises(SourceError, match="is redirected to"):
        read(source, offer)


def test_redirects_without_end(hub, source):
    offer = offers(source)["a b/ü#?.bin"]
    hub.fault("/", status=302, headers={"Location": "/again"})
    with pytest.raises(SourceError, match="redirected without end"):
        read(source, offer)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"size": None}, "does not tell how large"),
        ({"size": -1}, "does not tell how large"),
        ({"blobId": None}, "by which nothing can be proven"),
        ({"lfs": {"sha256": "abc", "size": 5, "pointerSize": 1}}, "by which nothing can be proven"),
    ],
)
def test_a_mirror_that_does_not_tell_all(hub, source, change, words):
    def changed(_kind, answer):
        answer["siblings"][0] |= change
        return answer

    hub.change = changed
    with pytest.raises(SourceError, match=words):
        source.list()


@pytest.mark.parametrize("answer", [{}, {"sha": "main"}, [], {"id": "x", "sha": None, "siblings": 5}])
def test_an_answer_that_is_no_description(hub, source, answer):
    hub.change = lambda _kind, _answer: answer
    with pytest.raises((SourceError, TryAgainError)):
        source.list()


def test_another_commit_than_the_one_asked_for(hub):
    commit = hub.repository(REPOSITORY).branches["main"]
    hub.change = lambda _kind, answer: answer | {"sha": "1" * 40}
    with pytest.raises(SourceError, match=f"gives commit {'1' * 40} where {commit} was asked for"):
        HubSource(REPOSITORY, endpoint=hub.url, revision=commit).list()


def test_retry_after_is_seconds_or_a_date_by_the_servers_clock(hub, source):
    for value, expected in (("17", 17), ("Tue, 01 Jan 2030 00:00:30 GMT", 30), ("soon", None)):
        hub.fault("/api/", status=429, headers={"Retry-After": value, "Date": "Tue, 01 Jan 2030 00:00:00 GMT"}, times=1)
        with pytest.raises(TryAgainError) as refused:
            source.list()
        assert refused.value.after == expected


def test_an_endpoint_of_the_environment(hub, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    assert HubSource(REPOSITORY).list().files
    monkeypatch.setenv("HF_ENDPOINT", "mirror.example")
    with pytest.raises(SourceError, match=r"HF_ENDPOINT is 'mirror\.example'"):
        HubSource(REPOSITORY)


def test_the_hubs_own_address_is_no_option(monkeypatch):
    assert HubSource(REPOSITORY).options == {}


@pytest.mark.parametrize("content", [b"", b"two words", b"\xff\xfe", b"x" * 5000])
def test_a_file_that_holds_no_token(tmp_path, content):
    file = tmp_path / "token"
    file.write_bytes(content)
    with pytest.raises(SourceError, match="holds no token"):
        HubSource(REPOSITORY, token_file=file)


# --- What must not come out, and what others say ----------------------------------------------------------------------


@pytest.mark.parametrize("token", ["hf_secret\nX-Evil: 1", "hf_sécret", "hf_secret\x00", "hf_secret hf_other"])
def test_a_token_that_no_header_takes_is_refused_and_not_repeated(hub, monkeypatch, token):
    """The libraries' own errors repeat such a header."""
    if "\x00" in token:
        monkeypatch.setattr("huggingface_hub.get_token", lambda: token)
    else:
        monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(SourceError, match="no token") as refused:
        HubSource(REPOSITORY, endpoint=hub.url).list()
    assert "secret" not in str(refused.value)
    assert "sécret" not in str(refused.value)


def test_a_password_in_the_endpoint_is_not_repeated(hub, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", hub.url.replace("http://", "http://me:secret@"))
    hub.fault("/api/models", status=404, headers={"X-Error-Code": "RepoNotFound"}, times=1)
    hub.fault("/api/models", status=503)
    source = HubSource(REPOSITORY)
    for kind in (SourceError, TryAgainError):
        with pytest.raises(kind) as refused:
            source.list()
        assert "127.0.0.1" in str(refused.value)
        assert "secret" not in str(refused.value)
    assert "secret" not in str(source.options)


def test_what_a_hostile_hub_says_is_not_obeyed(hub, source):
    hub.fault("/api/models", status=400, headers={"X-Error-Message": "no\x1b]0;title\x07\x1b[2J" + "x" * 5000})
    with pytest.raises(SourceError, match="answers 400") as refused:
        source.list()
    assert str(refused.value).isprintable()
    assert len(str(refused.value)) < 500


def test_xet_that_another_connection_has_left_meanwhile(hub, source):
    """Two read; the one leaves Xet for HTTPS while the other asks where Xet has its file."""
    offer = offers(source)["a b/ü#?.bin"]
    ask = source._ask_for_xet

    def left_meanwhile(*given):
        source._xet = None
        return ask(*given)

    source._ask_for_xet = left_meanwhile
    assert read(source, offer) == SHARD


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("ALL_PROXY", "socks5h://me:secret@127.0.0.1:1", "not SOCKS"),
        ("HTTPS_PROXY", "gopher://me:secret@127.0.0.1:1", "cannot be used"),
        ("SSL_CERT_FILE", "/nonexistent/ca.pem", "SSL_CERT_FILE is '/nonexistent/ca.pem', which cannot be read"),
    ],
)
def test_an_environment_that_cannot_be_used_is_told(monkeypatch, variable, value, words):
    monkeypatch.setenv(variable, value)
    with pytest.raises(SourceError, match=words) as refused:
        HubSource(REPOSITORY, endpoint="https://mirror.example").list()
    assert "secret" not in str(refused.value)


def test_httpx_takes_large_pieces_from_a_socket(hub, source):
    """By an attribute that is not of httpx's interface; where that moves, a fetch costs a third more of a core."""
    from httpcore._sync.http11 import HTTP11Connection  # noqa: PLC0415

    hub.repository(REPOSITORY).commit({"shard.bin": os.urandom(20_000_000)})
    asked = []
    real = HTTP11Connection._receive_event

    def receive(self, *given, **more):
        stream = self._network_stream
        if not hasattr(stream, "asked"):
            take = stream.read
            stream.asked = asked
            stream.read = lambda count, **rest: asked.append(count) or take(count, **rest)
        return real(self, *given, **more)

    HTTP11Connection._receive_event = receive
    try:
        offer = offers(source)["shard.bin"]
        assert sum(map(len, source.read(offer, 0, offer.size))) == offer.size
    finally:
        HTTP11Connection._receive_event = real
    assert set(asked) == {256 * 1024}


def test_a_hub_that_wants_patience_is_not_taken_for_one_without_xet(hub, source):
    """The first request for a large file asks for Xet; its 429 is heeded like any other."""
    offer = offers(source)["a b/ü#?.bin"]
    hub.fault("/resolve/", status=429, headers={"Retry-After": "7"}, times=1)
    with pytest.raises(TryAgainError) as later:
        read(source, offer)
    assert later.value.after == 7
    assert read(source, offer) == SHARD
