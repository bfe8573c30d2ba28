"""What others have said or named, as it may be printed, and how many of what. Pure."""

_QUOTED = 300  # characters


def printable(text: str) -> str:
    """Return `text` on one line, what a terminal would obey, or not show, in Python's escapes."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def quoted(what: object) -> str:
    """Return what a server or a program has said: one line, no control characters, 300 characters at most."""
    text = " ".join("".join(each if each.isprintable() else " " for each in str(what)).split()).strip(" :")
    return text if len(text) <= _QUOTED else text[:_QUOTED] + "..."


def counted(number: int, noun: str) -> str:
    """Return `1 file`, `2 files`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
