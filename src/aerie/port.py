"""What a port of TCP may be."""

LAST = 2**16 - 1


def port_from(text: str) -> int:
    """Return the port that `text` names. Raises ValueError; 0 is none, for nobody would find what listens on it."""
    if not text.isascii() or not text.isdecimal() or len(text) > len(str(LAST)) or not 0 < int(text) <= LAST:
        raise ValueError(f"a port is a number from 1 to {LAST}")
    return int(text)
