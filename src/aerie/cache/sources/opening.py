"""Which place a SOURCE names, and the source that reads it."""

import re
import sys
import urllib.parse
from dataclasses import dataclass
from pathlib import Path
from urllib.request import getproxies

from aerie.cache.names import NameRefusedError, check_model, is_revision
from aerie.cache.sources.source import Source, SourceError

FORMS = """a source is one of
  hf:OWNER/NAME                            a repository of the Hub, or of the mirror that --endpoint names
  s3://BUCKET/PREFIX                       a bucket of S3, or of the store that --endpoint names
  ./DIR, /DIR, file:///DIR                 a directory, on NFS too
  rsync://[USER@]HOST[:PORT]/MODULE/PATH   an rsync daemon
  [USER@]HOST:PATH                         rsync through ssh"""
"""What a message about a wrong SOURCE ends with."""

_REPOSITORY = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,95}/[A-Za-z0-9_][A-Za-z0-9._-]{0,95}")
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,61}[A-Za-z0-9]")
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}")
_HOST = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,252}|\[[0-9A-Fa-f:.]{2,45}(%[A-Za-z0-9._-]{1,15})?\]")
_LARGEST_PORT = 65535
_SCHEMES = {"hf", "s3", "rsync", "ssh", "http", "https"}
"""What is no host's name in HOST:PATH."""


class SourceTextError(SourceError):
    """A SOURCE that names no place; the message says why and which forms there are. A mistake of usage, exit code 2."""

    def __init__(self, text: str, why: str) -> None:
        super().__init__("")
        self.args = (f"{text!r}: {why}; {FORMS}",)  # several lines, all of our own


class EndpointError(SourceTextError):
    """An --endpoint that does not fit; the SOURCE may well be right. A mistake of usage, too."""

    def __init__(self, why: str) -> None:
        SourceError.__init__(self, why)


@dataclass(frozen=True, slots=True)
class Repository:
    """A repository of the Hub."""

    name: str
    """`OWNER/NAME`."""
    note: str | None = None
    """Where the text could have been meant otherwise: how it was taken."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """A part of a bucket."""

    bucket: str
    prefix: str
    """Without `/` at either end; empty for the whole bucket."""


@dataclass(frozen=True, slots=True)
class Directory:
    """A directory of this machine."""

    path: Path
    """Absolute."""


@dataclass(frozen=True, slots=True)
class Peer:
    """A directory of another machine, to be had by rsync."""

    host: str
    """A name or an address, IPv6 in brackets; it begins with no `-`."""
    path: str
    """At a daemon: the module and what follows, without `/` in front. By ssh: as the remote side takes it."""
    user: str | None = None
    port: int | None = None
    daemon: bool = False


Place = Repository | Bucket | Directory | Peer


def hint_for(place: Place) -> str:
    """Return what to look at where nothing answers there."""
    if isinstance(place, Directory):
        return "is the file server up, and mounted?"
    if isinstance(place, Peer):
        if place.daemon:
            return "is the address right, the network up, the daemon running there?"
        login = f"{place.user}@{place.host}" if place.user else place.host
        return f"does `ssh -o BatchMode=yes {login} true` work?"
    proxy = "" if getproxies() else ", a proxy to be named in HTTPS_PROXY"
    return f"is the address right, the network up{proxy}?"


def parse(text: str) -> Place:
    """Return the place that `text` names; raises SourceTextError."""
    if not text.strip() or not text.isprintable():
        raise SourceTextError(text, "no source")
    if text in (".", "..", "~") or text.startswith(("/", "./", "../", "~/")):
        return _directory(text, Path(text))
    scheme, separator, rest = text.partition("://")
    if separator and re.fullmatch(r"[A-Za-z][A-Za-z0-9+.-]*", scheme):
        return _of_scheme(text, scheme.lower(), rest)
    if text.lower().startswith("file:"):
        raise SourceTextError(text, "a file: address has three slashes in front of its path")
    if text.startswith("hf:"):
        return _repository(text, text.removeprefix("hf:"))
    if ":" in text.partition("/")[0]:
        if (scheme := text.partition(":")[0]).lower() in _SCHEMES:
            raise SourceTextError(text, f"{scheme}: is not written like this")
        return _by_ssh(text)
    if _REPOSITORY.fullmatch(text):
        taken = f"{text!r} was taken as the repository hf:{text}; the directory of that name is ./{text}"
        return Repository(text, taken if Path(text).is_dir() else None)
    if "@" in text and _REPOSITORY.fullmatch(text.partition("@")[0]):
        return _repository(text, text)
    why = f"a directory is written with ./ in front, as ./{text}" if Path(text).exists() else "it names no place"
    raise SourceTextError(text, why)


def name_of(text: str, place: Place) -> str:
    """Return the last part of a source that is a name; raises NameRefusedError where there is none."""
    match place:
        case Repository(name=name):
            parts = name.split("/")
        case Bucket(bucket=bucket, prefix=prefix):
            parts = [bucket, *filter(None, prefix.split("/"))]
        case Directory(path=path):
            parts = list(path.parts)
        case Peer(path=path):
            parts = path.split("/")
    # A revision in another store.
    while len(parts) > 1 and (parts[-1] in {"", ".", "current", "previous"} or is_revision(parts[-1])):
        parts.pop()
    try:
        return check_model(parts[-1])
    except NameRefusedError as error:
        raise NameRefusedError(f"{text} gives the model no name ({error}): give --name NAME") from None


def open_source(
    text: str,
    *,
    revision: str | None,
    endpoint: str | None = None,
    region: str | None = None,
    token_file: Path | None = None,
    offline: bool = False,
    transport: str = "auto",
    limit: float | None = None,
) -> Source:
    """Return the source that `text` names; nothing is asked of it yet.

    `revision` is the one wanted, None for the newest. `endpoint` is another server than the Hub's or Amazon's,
    `region` that of a bucket; both are kept in the source's `options`. `token_file` and `transport` are for the Hub.
    `limit` (bytes a second) is for what brings more than it is asked for, Xet and rsync. `offline` refuses what needs
    a network. A bare OWNER/NAME that is a directory too is said on stderr. Raises SourceTextError where the text names
    no place or an option does not fit it, SourceError where the place cannot be had from here.
    """
    place = parse(text)
    if endpoint is not None:
        _check_endpoint(text, place, endpoint)
    if offline and not isinstance(place, Directory):
        raise SourceError(f"{text} needs a network, and --offline forbids one: run without it, or give a directory")
    # Each is imported where it is wanted: boto3 and huggingface_hub take a second, and the library may be missing.
    if isinstance(place, Repository):
        if place.note:
            print(place.note, file=sys.stderr)
        from aerie.cache.sources.hub import HubSource  # noqa: PLC0415

        return HubSource(
            place.name, revision=revision, endpoint=endpoint, token_file=token_file, transport=transport, limit=limit
        )
    if isinstance(place, Bucket):
        from aerie.cache.sources.s3 import S3Source  # noqa: PLC0415

        return S3Source(place.bucket, place.prefix, revision=revision, endpoint=endpoint, region=region)
    if isinstance(place, Directory):
        from aerie.cache.sources.directory import DirectorySource  # noqa: PLC0415

        return DirectorySource(place.path, revision=revision)
    from aerie.cache.sources.rsync import RsyncSource  # noqa: PLC0415

    return RsyncSource(place, revision=revision, limit=limit)


def _check_endpoint(text: str, place: Place, endpoint: str) -> None:
    if not isinstance(place, Repository | Bucket):
        raise EndpointError(f"--endpoint is for hf: and s3: alone, and {text} is neither: leave it out")
    # The endpoint goes into the manifest, which everybody on the host may read.
    if "@" in endpoint:
        raise EndpointError(
            "--endpoint has a user or password in it, which would be kept in the manifest: leave it out"
        )
    no_address = EndpointError(f"--endpoint {endpoint!r} is no address such as https://mirror.example")
    try:
        parts = urllib.parse.urlsplit(endpoint)
        complete = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # a port that is no number, half a bracket
        raise no_address from None
    if "://" not in endpoint and not endpoint.startswith(("/", ".")):
        raise EndpointError(f"--endpoint {endpoint!r} lacks its scheme: http://{endpoint} or https://{endpoint}")
    if not complete:
        raise no_address


def _of_scheme(text: str, scheme: str, rest: str) -> Place:
    if scheme == "s3":
        return _bucket(text, rest)
    if scheme == "file":
        if not rest.startswith("/"):
            raise SourceTextError(text, "a file: address has three slashes in front of its path")
        return _directory(text, Path(urllib.parse.unquote(rest)))
    if scheme == "rsync":
        return _by_daemon(text, rest)
    if scheme == "hf":
        raise SourceTextError(text, "hf: is written without slashes, as hf:OWNER/NAME")
    if scheme in ("http", "https"):
        raise SourceTextError(
            text,
            "a web address is no source; write a repository as hf:OWNER/NAME, and a mirror's address as --endpoint",
        )
    if scheme == "ssh":
        raise SourceTextError(text, "ssh is written as [USER@]HOST:PATH")
    raise SourceTextError(text, f"{scheme}:// is not known")


def _repository(text: str, name: str) -> Repository:
    if _REPOSITORY.fullmatch(name):
        return Repository(name)
    if "@" in name and _REPOSITORY.fullmatch(name.partition("@")[0]):
        raise SourceTextError(text, f"a revision goes into --revision {name.partition('@')[2]}")
    raise SourceTextError(text, f"{name!r} is no OWNER/NAME")


def _bucket(text: str, rest: str) -> Bucket:
    bucket, _, prefix = rest.partition("/")
    if "@" in bucket:
        # Of a text that may hold a key, nothing is repeated.
        raise SourceTextError("s3://...@...", "keys do not go into an address; see `Sources` in docs/weights.md")
    if not _BUCKET.fullmatch(bucket):
        raise SourceTextError(text, f"{bucket!r} is no bucket's name: expected 3 to 63 letters, digits, '.', '-', '_'")
    if any(part in ("", ".", "..") for part in prefix.strip("/").split("/")) and prefix.strip("/"):
        raise SourceTextError(text, f"{prefix!r} is no prefix: a part of it is empty, '.' or '..'")
    return Bucket(bucket, prefix.strip("/"))


def _directory(text: str, path: Path) -> Directory:
    try:
        return Directory(path.expanduser().absolute())
    except RuntimeError:
        raise SourceTextError(text, "there is no home directory here to look for it in") from None


def _by_daemon(text: str, rest: str) -> Peer:
    at, slash, path = rest.partition("/")
    user, host = _user_and_host(text, at)
    port = None
    if colon := re.fullmatch(r"(.*[^:\]]|.*\]):([0-9]*)", host):
        host = colon[1]
        port = int(colon[2] or 0)
        if not 0 < port <= _LARGEST_PORT:
            raise SourceTextError(text, f"{colon[2]!r} is no port")
    if not _HOST.fullmatch(host):
        raise SourceTextError(text, f"{host!r} is no host's name")
    path = path.strip("/")
    if not slash or not path:
        raise SourceTextError(text, f"which module? `rsync rsync://{at}/` lists those that the daemon has")
    _check_parts(text, path)
    return Peer(host, path, user, port, daemon=True)


def _by_ssh(text: str) -> Peer:
    # An IPv6 address has colons of its own, in brackets.
    found = re.fullmatch(r"((?:[^@/:\[]*@)?(?:\[[^\]/]*\]|[^@/:\[\]]*)):(.*)", text)
    if not found:
        if "@" in text and ":" in text.partition("@")[0]:
            raise SourceTextError("...:...@...", "a password does not go into an address; ssh takes a key")
        raise SourceTextError(text, "it names no place")
    at, path = found.groups()
    user, host = _user_and_host(text, at)
    if path.startswith(":"):
        raise SourceTextError(text, f"a daemon is written as rsync://{at}/{path.strip(':/')}")
    if not _HOST.fullmatch(host):
        raise SourceTextError(text, f"{host!r} is no host's name")
    if re.match(r"[^/]*@[^/]*:", path):
        raise SourceTextError("...:...@...", "a password does not go into an address; ssh takes a key")
    if not path:
        raise SourceTextError(text, "which directory of that host?")
    _check_parts(text, path)
    return Peer(host, path.rstrip("/") or "/", user)


def _user_and_host(text: str, at: str) -> tuple[str | None, str]:
    user, separator, host = at.rpartition("@")
    if ":" in user:
        raise SourceTextError(
            "rsync://...@...", "a password does not go into an address; rsync takes it from RSYNC_PASSWORD"
        )
    if separator and not _USER.fullmatch(user):
        raise SourceTextError(text, f"{user!r} is no user's name")
    return user if separator else None, host


def _check_parts(text: str, path: str) -> None:
    # rsync on the other side takes these for patterns.
    if any(character in path for character in "*?[\\"):
        raise SourceTextError(text, "a path on a peer has none of * ? [ \\")
    if ".." in path.split("/"):
        raise SourceTextError(text, "a path on a peer has no '..'")
