"""Known failures: how `signatures.yaml` is read, and what each entry must hold."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any

import yaml

SIGNATURES = Path(__file__).with_name("signatures.yaml")


class Kind(StrEnum):
    """What sort of failure it is: decides the exit code, and whether another start is tried."""

    CONFIGURATION = "configuration"
    MEMORY = "memory"
    HARDWARE = "hardware"
    CRASH = "crash"
    KILLED = "killed"
    HUNG = "hung"


class Severity(StrEnum):
    """FATAL ends a start; DEGRADED serves worse than it could; HARMLESS is a line that people take for an error."""

    FATAL = "fatal"
    DEGRADED = "degraded"
    HARMLESS = "harmless"


class Where(StrEnum):
    """What `match` is searched in."""

    CAUSE = "cause"
    LINE = "line"
    EVIDENCE = "evidence"


class SignatureError(ValueError):
    """The file of signatures is wrong; the message names each entry and what it should be."""


@dataclass(frozen=True)
class Signature:
    """One known failure, as `signatures.yaml` describes its fields."""

    id: str
    title: str
    match: re.Pattern[str]
    where: Where
    kind: Kind
    severity: Severity
    cause: str
    remedy: str
    source: str
    excerpt: str
    needle: str = ""
    frame: re.Pattern[str] | None = None
    known: bool = True
    """Whether it is a cause; False for an end that is recognised while what brought it about is not."""
    cache: bool = False
    """Whether a damaged file in the cache of compiled graphs and kernels may be behind it, so that a new one helps."""


_ID = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
_WORDS = ("id", "title", "match", "where", "kind", "severity", "cause", "remedy", "source", "excerpt")
_CHOICES = (("where", Where), ("kind", Kind), ("severity", Severity))


@cache
def signatures(path: Path = SIGNATURES) -> tuple[Signature, ...]:
    """Read and check a file of signatures, in its order. Raises SignatureError, and OSError where it cannot be read."""
    text = path.read_text(encoding="utf-8")
    try:
        entries = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # noqa: S506 - both are safe
    except yaml.YAMLError as error:
        raise SignatureError(f"{path.name} is not YAML: {error}") from None
    if not isinstance(entries, list) or not entries:
        raise SignatureError(f"{path.name} must be a list of signatures, and is {type(entries).__name__}")
    problems = [
        f"entry {number} ({_name(entry)}): {problem}"
        for number, entry in enumerate(entries, start=1)
        for problem in _problems(entry)
    ]
    names = [_name(entry) for entry in entries]
    problems += [
        f"id {name} stands {names.count(name)} times" for name in sorted({n for n in names if names.count(n) > 1})
    ]
    if problems:
        raise SignatureError(f"{path.name}: " + "; ".join(problems))
    return tuple(_signature(entry) for entry in entries)


def _name(entry: Any) -> str:
    return str(entry.get("id", "without an id")) if isinstance(entry, dict) else "no mapping"


def _problems(entry: Any) -> Iterable[str]:
    if not isinstance(entry, dict):
        yield f"is {type(entry).__name__}, expected a mapping of {', '.join(_WORDS)}"
        return
    for word in _WORDS:
        if not isinstance(entry.get(word), str) or not entry[word].strip():
            yield f"{word} must be a text that is not empty, and is {entry.get(word)!r}"
    for word in sorted(map(str, entry.keys() - {*_WORDS, "needle", "frame", "known", "cache"})):
        yield f"{word} is no field of a signature"
    for word, choices in _CHOICES:
        if isinstance(entry.get(word), str) and entry[word] not in set(choices):
            yield f"{word} is {entry[word]!r}, expected one of {', '.join(choices)}"
    if isinstance(entry.get("id"), str) and not _ID.fullmatch(entry["id"]):
        yield "id must be words of small letters and digits with hyphens between them"
    for word in ("known", "cache"):
        if not isinstance(entry.get(word, True), bool):
            yield f"{word} is {entry[word]!r}, expected true or false"
    yield from _problems_of_match(entry)


def _problems_of_match(entry: dict[str, Any]) -> Iterable[str]:
    needle = entry.get("needle")
    if (entry.get("where") == Where.LINE) != (isinstance(needle, str) and bool(needle)):
        yield "needle, a literal that each such line contains, belongs to `where: line`, and to nothing else"
    if "frame" in entry and (entry.get("where") != Where.CAUSE or not isinstance(entry["frame"], str)):
        yield "frame, a regular expression, belongs to `where: cause`, and to nothing else"
    for word in ("match", "frame"):
        try:
            re.compile(entry[word])
        except (KeyError, TypeError):
            continue
        except re.error as error:
            yield f"{word} is no regular expression: {error}"


def _signature(entry: dict[str, Any]) -> Signature:
    said = {word: " ".join(entry[word].split()) for word in ("title", "cause", "remedy", "source")}
    return Signature(
        id=entry["id"],
        match=re.compile(entry["match"], re.MULTILINE),
        where=Where(entry["where"]),
        kind=Kind(entry["kind"]),
        severity=Severity(entry["severity"]),
        excerpt=entry["excerpt"],
        needle=entry.get("needle", ""),
        frame=re.compile(entry["frame"]) if "frame" in entry else None,
        known=entry.get("known", True),
        cache=entry.get("cache", False),
        **said,
    )
