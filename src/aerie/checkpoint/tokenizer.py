"""What a checkpoint's small files say of its tokenizer; it is not loaded, which takes seconds and runs its code."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aerie.checkpoint.files import regular_file

FAST, TIKTOKEN, SENTENCEPIECE = VOCABULARIES = "tokenizer.json", "tiktoken.model", "tokenizer.model"
"""Files that each are a vocabulary; transformers takes the first."""
CONFIG = "tokenizer_config.json"
_GENERATION = "generation_config.json"
_LONGEST_ID = 9  # digits


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer as its files describe it."""

    directory: Path
    names: frozenset[str]
    """Files in the directory."""
    config: Mapping[str, Any]
    """tokenizer_config.json."""
    generation: Mapping[str, Any]
    """generation_config.json."""
    ordinary: int | None
    """Ids up to the last one that is not special; None where the vocabulary's file does not tell it."""
    special: Mapping[str, int]
    """Ids of added tokens, most of them special."""
    faults: tuple[str, ...] = ()
    """Files that cannot be read, and why."""

    @property
    def vocabulary(self) -> str | None:
        """The file that holds it."""
        return next((name for name in VOCABULARIES if name in self.names), None)

    def role(self, name: str) -> str | None:
        """Return the token that has a role, such as bos_token."""
        given = self.config.get(name)
        given = given.get("content") if isinstance(given, dict) else given
        return given if isinstance(given, str) else None


class _BrokenError(Exception):
    """A file is not what its name says; the message says what it is."""


def read_tokenizer(directory: Path) -> Tokenizer:
    """Read what there is; a directory that cannot be read has no files."""
    faults: list[str] = []

    def read(name: str) -> Any:
        try:
            return _READERS.get(name, _read_object)(directory / name) if name in names else {}
        except OSError as error:
            faults.append(f"{name} cannot be read: {error.strerror}")
        except _BrokenError as error:
            faults.append(f"{name} {error}")
        return {}

    try:
        names = frozenset(path.name for path in directory.iterdir())
    except (OSError, ValueError):  # the second for a name that no file can have
        names = frozenset[str]()
    config, generation = read(CONFIG), read(_GENERATION)
    ordinary, special = None, _added(config)
    if FAST in names:
        ordinary, more = read(FAST) or (None, {})
        special |= more
    elif TIKTOKEN in names:
        ordinary = read(TIKTOKEN) or None
    return Tokenizer(directory, names, config, generation, ordinary, special, tuple(faults))


def _added(config: Mapping[str, Any]) -> dict[str, int]:
    """Return the tokens of added_tokens_decoder: id -> token."""
    listed = config.get("added_tokens_decoder")
    return {
        token["content"]: int(number)
        for number, token in (listed.items() if isinstance(listed, dict) else ())
        if isinstance(token, dict) and isinstance(token.get("content"), str)
        if number.isdecimal() and len(number) <= _LONGEST_ID
    }


def _read_object(path: Path) -> Mapping[str, Any]:
    try:
        content = json.loads(regular_file(path).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # a UnicodeDecodeError is a ValueError
        raise _BrokenError(f"is not JSON ({error})") from None
    if not isinstance(content, dict):
        raise _BrokenError(f"holds {type(content).__name__}, not an object")
    return content


def _read_fast(path: Path) -> tuple[int, dict[str, int]]:
    content = _read_object(path)
    try:
        added = {token["content"]: int(token["id"]) for token in content.get("added_tokens", ())}
        vocabulary = content["model"]["vocab"]
        # A Unigram vocabulary is a list. Added tokens stand in both places or in one.
        ids = (
            range(len(vocabulary))
            if isinstance(vocabulary, list)
            else [number for token, number in vocabulary.items() if token not in added]
        )
        return max(ids, default=-1) + 1, added
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise _BrokenError(f"has not the form of a tokenizer ({error!r})") from None


def _read_tiktoken(path: Path) -> int:
    words = regular_file(path).read_bytes().split()
    ranks = words[1::2]
    # They begin with 0 and have no gap.
    if len(words) != 2 * len(ranks) or not ranks or set(ranks) != {b"%d" % rank for rank in range(len(ranks))}:
        raise _BrokenError("is cut off, or no tiktoken vocabulary: lines of a token in base64 and its rank")
    return len(ranks)


_READERS = {FAST: _read_fast, TIKTOKEN: _read_tiktoken}
