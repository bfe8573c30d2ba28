from pathlib import Path

import pytest

from aerie.cache.sources.directory import DirectorySource
from aerie.cache.sources.opening import Bucket, Directory, Peer, Repository, SourceTextError, open_source, parse
from aerie.cache.sources.source import SourceError


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("hf:moonshotai/Kimi-K2.5", Repository("moonshotai/Kimi-K2.5")),
        ("moonshotai/Kimi-K2.5", Repository("moonshotai/Kimi-K2.5")),
        ("s3://weights/kimi/k2.5/", Bucket("weights", "kimi/k2.5")),
        ("s3://weights", Bucket("weights", "")),
        ("/mnt/nfs/Kimi-K2.5", Directory(Path("/mnt/nfs/Kimi-K2.5"))),
        ("file:///mnt/with%20space", Directory(Path("/mnt/with space"))),
        ("rsync://peer/models/Kimi-K2.5/current/", Peer("peer", "models/Kimi-K2.5/current", daemon=True)),
        ("rsync://me@peer.example:8730/models", Peer("peer.example", "models", "me", 8730, daemon=True)),
        ("rsync://[fd00::1]:8730/models/x", Peer("[fd00::1]", "models/x", None, 8730, daemon=True)),
        ("rsync://[fd00::1]/models/x", Peer("[fd00::1]", "models/x", daemon=True)),
        ("peer:/data/models/Kimi-K2.5", Peer("peer", "/data/models/Kimi-K2.5")),
        ("me@10.0.0.5:models/x y/", Peer("10.0.0.5", "models/x y", "me")),
        ("me@[fd00::1]:/data", Peer("[fd00::1]", "/data", "me")),
        ("peer:/", Peer("peer", "/")),
    ],
)
def test_each_form_names_its_place(text, place, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert parse(text) == place


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "no source"),
        ("hf:\x1b[2J/x", "no source"),
        ("Kimi-K2.5", "names no place"),
        ("a/b/c", "names no place"),
        ("hf:Kimi-K2.5", "no OWNER/NAME"),
        ("hf://moonshotai/Kimi-K2.5", "hf:OWNER/NAME"),
        ("HF:moonshotai/Kimi-K2.5", "not written like this"),
        ("s3:weights/kimi", "not written like this"),
        ("hf:moonshotai/Kimi-K2.5@main", "--revision main"),
        ("moonshotai/Kimi-K2.5@main", "--revision main"),
        ("https://huggingface.co/moonshotai/Kimi-K2.5", "hf:OWNER/NAME"),
        ("gs://bucket/x", "gs:// is not known"),
        ("ssh://peer/x", r"\[USER@\]HOST:PATH"),
        ("file://host/x", "three slashes"),
        ("file:x", "three slashes"),
        ("s3://", "no bucket's name"),
        ("s3://a b/x", "no bucket's name"),
        ("s3://weights/a//b", "no prefix"),
        ("s3://weights/../x", "no prefix"),
        ("rsync://peer", "which module"),
        ("rsync://peer/", "which module"),
        ("rsync://peer:0/m", "no port"),
        ("rsync://peer:99999/m", "no port"),
        ("rsync:///m", "no host's name"),
        ("rsync://-e/m", "no host's name"),
        ("rsync://peer/m/../x", r"no '\.\.'"),
        ("rsync://peer/m/*", "has none of"),
        ("-oProxyCommand=touch x:/data", "no host's name"),
        ("-lroot@peer:/data", "no user's name"),
        ("me@-peer:/data", "no host's name"),
        ("peer:", "which directory"),
        ("peer::models/x", "rsync://peer/models/x"),
        ("peer:/data/[ab]", "has none of"),
        ("peer;touch x:/data", "no host's name"),
    ],
)
def test_what_names_no_place_is_refused_with_the_forms(text, why, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SourceTextError, match=why) as raised:
        parse(text)
    assert "s3://BUCKET/PREFIX" in str(raised.value)


@pytest.mark.parametrize(
    "text", ["s3://AKIA:hunter2@weights/x", "rsync://me:hunter2@peer/m", "me:hunter2@peer:/data", "me:hunter2@peer:x"]
)
def test_a_secret_in_the_text_is_refused_and_not_repeated(text):
    with pytest.raises(SourceTextError) as raised:
        parse(text)
    assert "hunter2" not in str(raised.value)


def test_a_directory_needs_its_dot(tmp_path, monkeypatch, capsys):
    (tmp_path / "weights").mkdir()
    (tmp_path / "a/b/c").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for text in ("weights", "a/b/c"):
        with pytest.raises(SourceTextError, match=rf"as \./{text}"):
            parse(text)
        assert parse(f"./{text}") == Directory(tmp_path / text)
    assert parse("a/b").note == "'a/b' was taken as the repository hf:a/b; the directory of that name is ./a/b"
    assert parse("hf:a/b").note is None


def test_the_home_directory_is_found(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert parse("~/weights") == Directory(tmp_path / "weights")


def test_a_directory_is_opened_offline_and_the_rest_is_not(tmp_path):
    assert isinstance(open_source(str(tmp_path), revision=None, offline=True), DirectorySource)
    for text in ("s3://weights/x", "peer:/data", "rsync://peer/m"):
        with pytest.raises(SourceError, match="--offline"):
            open_source(text, revision=None, offline=True)


@pytest.mark.parametrize(
    ("text", "endpoint", "why"),
    [
        ("/x", "https://mirror.example", "for hf: and s3: alone"),
        ("s3://weights/x", "ftp://mirror.example", "no address such as"),
        ("s3://weights/x", "/mnt/mirror", "no address such as"),
        ("s3://weights/x", "http://[::1", "no address such as"),
        ("s3://weights/x", "http://mirror.example:http", "no address such as"),
        ("hf:o/n", "127.0.0.1:18400", "lacks its scheme: http://127.0.0.1:18400 or"),
        ("hf:o/n", "me:hunter2@mirror.example", "user or password"),
        ("s3://weights/x", "https://me:hunter2@mirror.example", "user or password"),
    ],
)
def test_an_endpoint_that_does_not_fit_is_refused(text, endpoint, why):
    with pytest.raises(SourceTextError, match=why) as raised:
        open_source(text, revision=None, endpoint=endpoint)
    assert "hunter2" not in str(raised.value)
    assert "a source is one of" not in str(raised.value)
