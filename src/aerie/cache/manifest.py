"""What a published model consists of: every file with its size and SHA-256. Pure."""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from aerie.cache.names import NameRefusedError, check_files, check_model, check_revision

MANIFEST = "aerie-manifest.json"
"""Its name in the directory of the revision."""
SEGMENT = 64 * 2**20
"""Bytes of a segment, the unit in which a file is fetched, verified and repaired; the last one of a file is shorter."""
ADOPTED = "adopted"
"""A manifest's source where there is none."""
_FORMAT = 1


class ManifestError(Exception):
    """A manifest that cannot be used; the message says what was found and what was expected."""


@dataclass(frozen=True, slots=True)
class File:
    """One file: path in the model's directory, with `/`; bytes; SHA-256 in hexadecimal, its own and its segments'."""

    path: str
    size: int
    sha256: str
    segments: tuple[str, ...]

    def __post_init__(self) -> None:
        if len(self.segments) != segment_count(self.size):
            raise ManifestError(
                f"{self.path} of {self.size} bytes has {len(self.segments)} segments, "
                f"expected {segment_count(self.size)}"
            )


@dataclass(frozen=True, slots=True)
class Manifest:
    """A revision of a model. The files are in the order of their paths."""

    name: str
    revision: str
    source: str
    """Where it came from, as `aerie model fetch` takes it; no secret is in it. `adopted` where there is no source."""
    files: tuple[File, ...]
    tool: str
    """`aerie` and its version."""
    fetched: str
    """When it was whole: UTC, ISO 8601 to the second. For people; nothing is decided by it."""
    options: dict[str, str] = field(default_factory=dict)
    """What else `fetch` needs to reach the source again: `endpoint`, `region`. And which of its files the
    revision has, where that is not all: `include` and `exclude`, lists of patterns as JSON."""

    @property
    def chosen(self) -> dict[str, str]:
        """Those of the options that say which of the revision's files it has; empty where it has all."""
        return {name: self.options[name] for name in ("include", "exclude") if name in self.options}

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)

    def to_json(self) -> str:
        """Return it as it is stored."""
        return json.dumps({"format": _FORMAT, "segment": SEGMENT, **asdict(self)}, indent=1, sort_keys=True) + "\n"


def segment_count(size: int) -> int:
    """Return how many segments a file of `size` bytes has; an empty one has none."""
    return -(-size // SEGMENT)


def spans(size: int) -> list[tuple[int, int]]:
    """Return where each segment of a file of `size` bytes begins and ends."""
    return [(start, min(start + SEGMENT, size)) for start in range(0, size, SEGMENT)]


def content_revision(files: Iterable[File]) -> str:
    """Return 40 hexadecimal digits that name the content, for what comes from where there are no revisions.

    They begin the SHA-256 of the files' paths, sizes and digests.
    """
    lines = sorted(f"{file.sha256} {file.size} {file.path}\n" for file in files)
    return hashlib.sha256("".join(lines).encode()).hexdigest()[:40]


def read_manifest(text: str) -> Manifest:
    """Return the manifest in `text`; raises ManifestError where it is none, or names what a store does not take."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ManifestError(f"the manifest is not JSON ({error})") from None
    if not isinstance(content, dict):
        raise ManifestError(f"the manifest holds {type(content).__name__}, expected an object")
    if (content.get("format"), content.get("segment")) != (_FORMAT, SEGMENT):
        raise ManifestError(
            f"the manifest has format {content.get('format')!r} with segments of {content.get('segment')!r} bytes, "
            f"expected {_FORMAT} with {SEGMENT}: another version of Aerie wrote it"
        )
    try:
        manifest = Manifest(
            name=check_model(_text(content, "name")),
            revision=check_revision(_text(content, "revision")),
            source=_text(content, "source"),
            files=tuple(_file(each) for each in _list(content, "files")),
            tool=_text(content, "tool"),
            fetched=_text(content, "fetched"),
            options={name: _text(content["options"], name) for name in content.get("options") or {}},
        )
        check_files(file.path for file in manifest.files)
    except NameRefusedError as error:
        raise ManifestError(f"the manifest is wrong: {error}") from None
    except (KeyError, TypeError, AttributeError) as error:
        raise ManifestError(f"the manifest is not as it was written: {error!r}") from None
    return manifest


def _text(content: dict[str, Any], name: str) -> str:
    if not isinstance(value := content[name], str):
        raise TypeError(f"{name} is {type(value).__name__}")
    if not value.isprintable():  # whoever wrote it, it comes to a terminal
        raise TypeError(f"{name} has characters that are not shown")
    return value


def _list(content: dict[str, Any], name: str) -> list[Any]:
    if not isinstance(value := content[name], list):
        raise TypeError(f"{name} is {type(value).__name__}")
    return value


def _digest(value: str) -> str:
    if len(value) != hashlib.sha256().digest_size * 2 or set(value) - set("0123456789abcdef"):
        raise TypeError(f"{value!r} is no SHA-256")
    return value


def _file(content: dict[str, Any]) -> File:
    size = content["size"]
    if type(size) is not int or size < 0:
        raise TypeError(f"size is {size!r}")
    segments = tuple(_digest(str(each)) for each in _list(content, "segments"))
    return File(_text(content, "path"), size, _digest(_text(content, "sha256")), segments)
