"""Which names a store takes: of models, of revisions, and of the files that a source offers. Pure."""

import re
import unicodedata
from collections.abc import Iterable
from pathlib import Path

_MODEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
_REVISION = re.compile(r"[0-9a-f]{40}")
_LONGEST_PART = 255
"""Bytes of a file's name on Linux's file systems."""
_LONGEST_NAME = 1024
"""Bytes of a relative path, well within PATH_MAX."""
_LINKS = {"current", "previous"}
_OUR_OWN = {"aerie-manifest.json", "aerie-manifest.json.new"}


class NameRefusedError(ValueError):
    """A name that a store does not take; the message says which and why."""


def check_model(name: str) -> str:
    """Return the name of a model, which is that of its directory; raises NameRefusedError."""
    if not _MODEL.fullmatch(name):
        raise NameRefusedError(
            f"{name!r} is no name for a model: expected letters, digits, '.', '_' and '-', with a letter or digit first"
        )
    return name


def check_revision(revision: str) -> str:
    """Return the revision, 40 hexadecimal digits in lower case; raises NameRefusedError."""
    if not _REVISION.fullmatch(revision):
        raise NameRefusedError(f"{revision!r} is no revision: expected a commit's 40 hexadecimal digits, in lower case")
    return revision


def is_revision(text: str) -> bool:
    """Return whether a text is a revision's name."""
    return _REVISION.fullmatch(text) is not None


def model_of(directory: Path) -> str:
    """Return what people call the model in a directory: in a store it is the name above a revision or a link to one."""
    is_in_store = directory.name in _LINKS or _REVISION.fullmatch(directory.name)
    return directory.parent.name if is_in_store and directory.parent.name else directory.name


def check_files(names: Iterable[str]) -> None:
    """Raise NameRefusedError where a file must not be written as it is named, or two of them get in each other's way.

    Refused are: a path out of the directory, an absolute one, an empty part, control characters and others that a
    terminal does not show, what no file system stores, a name of Aerie's own, a file where another has its directory,
    and names that differ by case or by Unicode's normal form alone, of which a file system may keep one.
    """
    folded: dict[str, str] = {}
    files: set[str] = set()
    folders: set[str] = set()
    for name in names:
        _check_file(name)
        if name in files:
            raise NameRefusedError(f"the source names {name!r} twice")
        files.add(name)
        parts = name.split("/")
        folders.update("/".join(parts[:depth]) for depth in range(1, len(parts)))
    if both := sorted(files & folders):
        raise NameRefusedError(f"{both[0]!r} is a file and a directory at once")
    for name in sorted(files | folders):  # a directory before what is in it, so that it is the one that is named
        other = folded.setdefault(_folded(name), name)
        if other != name:
            raise NameRefusedError(
                f"{other!r} and {name!r} differ by case alone, and not every file system keeps both: "
                "leave one of them out with --exclude"
            )


def _folded(name: str) -> str:
    # Case folding may undo the normal form, and the other way round.
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", name).casefold())


def _check_file(name: str) -> None:
    shown = repr(name if len(name) <= 100 else name[:100] + "...")  # noqa: PLR2004 - of a message
    if not name or name.startswith("/") or "\\" in name or any(part in ("", ".", "..") for part in name.split("/")):
        raise NameRefusedError(f"the source names a file {shown}, which does not stay in the model's directory")
    if not all(character.isprintable() for character in name):
        raise NameRefusedError(f"the source names a file {shown}, with characters that are not shown")
    try:
        encoded = name.encode()
    except UnicodeEncodeError:
        raise NameRefusedError(f"the source names a file {shown}, which is no Unicode text") from None
    if len(encoded) > _LONGEST_NAME or any(len(part.encode()) > _LONGEST_PART for part in name.split("/")):
        raise NameRefusedError(f"the source names a file {shown}, which is too long for a file system")
    if name.partition("/")[0].casefold() in _OUR_OWN:
        raise NameRefusedError(f"the source names a file {shown}, which is Aerie's own")
