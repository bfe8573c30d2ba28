"""Whose key is in a file: OpenPGP public keys and their fingerprints (RFC 9580), without gpg, which bare hosts lack."""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

PUBLIC_KEY = 6
"""The packet type of a primary public key; subkeys are of another."""
BESIDE_IT = frozenset({2, 10, 12, 13, 14, 17, 21})
"""What else a public key consists of: signatures, marker, trust, names, subkeys, pictures, padding. A secret key in the
file would count as one more public key to whom apt asks (sqv)."""


class NoKeyError(ValueError):
    """What was given holds no OpenPGP public key."""


def dearmor(data: bytes) -> bytes:
    """Return the binary form of armoured keys; what is binary already comes back as it is."""
    if b"-----BEGIN PGP PUBLIC KEY BLOCK-----" not in data:
        return data
    blocks = re.findall(
        rb"-----BEGIN PGP PUBLIC KEY BLOCK-----\r?\n(?:[^\r\n]+\r?\n)*?\r?\n(.*?)\r?\n(?:=[^\r\n]+\r?\n)?-----END",
        data,
        re.DOTALL,
    )
    try:
        return b"".join(base64.b64decode(b"".join(block.split()), validate=True) for block in blocks)
    except binascii.Error as error:
        raise NoKeyError(f"its armour is damaged ({error})") from None


def fingerprints(data: bytes) -> list[str]:
    """Return the fingerprint of each primary key in a key file, in capitals. NoKeyError where there is none."""
    packets = list(_packets(dearmor(data)))
    if strange := {kind for kind, _ in packets} - BESIDE_IT - {PUBLIC_KEY}:
        raise NoKeyError(f"it holds a packet of type {min(strange)}, which no file of public keys has")
    found = [_fingerprint(body) for kind, body in packets if kind == PUBLIC_KEY]
    if not found:
        raise NoKeyError("it holds no OpenPGP public key")
    return found


def _packets(data: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    try:
        while at < len(data):
            head = data[at]
            if not head & 0x80:
                raise NoKeyError("it is no OpenPGP file")
            if head & 0x40:
                kind = head & 0x3F
                start, length = _length(data, at + 1)
            else:
                kind, size = head >> 2 & 0x0F, (1, 2, 4, 0)[head & 3]
                start, length = at + 1 + size, int.from_bytes(data[at + 1 : at + 1 + size], "big")
            body = data[start : start + length]
            if not length or len(body) != length:
                raise NoKeyError("it ends in the middle")
            yield kind, body
            at = start + length
    except IndexError:
        raise NoKeyError("it ends in the middle") from None


def _length(data: bytes, at: int) -> tuple[int, int]:
    """Where a packet of the newer format begins, and how long it is (RFC 9580, 4.2.1)."""
    first = data[at]
    if first in range(192):
        return at + 1, first
    if first in range(192, 224):
        return at + 2, (first - 192 << 8) + data[at + 1] + 192
    if first in range(224, 255):
        raise NoKeyError("its packets are in pieces, which keys never are")
    return at + 5, int.from_bytes(data[at + 1 : at + 5], "big")


def _fingerprint(body: bytes) -> str:
    """Hash a key as its version wants it (RFC 9580, 5.5.4)."""
    match body[0]:
        case 4:
            content = b"\x99" + len(body).to_bytes(2, "big") + body
            return hashlib.sha1(content, usedforsecurity=False).hexdigest().upper()
        case 6:
            return hashlib.sha256(b"\x9b" + len(body).to_bytes(4, "big") + body).hexdigest().upper()
    raise NoKeyError(f"its key is of version {body[0]}, and apt takes 4 and 6")
