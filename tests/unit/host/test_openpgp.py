"""Whose key is in a file."""

from __future__ import annotations

import pytest
from aerie_host import openpgp

# Two keys made for this test, whose secrets are gone; gpg says that these are their fingerprints.
FINGERPRINT = "62B53F97FFCF7A0A55135021D5B37EF7A093F711"
KEY = b"""-----BEGIN PGP PUBLIC KEY BLOCK-----
Comment: a header

mDMEaw1ogxYJKwYBBAHaRw8BAQdAeKeCnEsuh2uhHJMj5EgHvY4b+otiIzsTJA1m
M8mz/ki0F2VkMjU1MTlAZXhhbXBsZS5pbnZhbGlkiJAEExYIADgWIQRitT+X/896
ClUTUCHVs373oJP3EQUCaw1ogwIbAwULCQgHAgYVCgkICwIEFgIDAQIeAQIXgAAK
CRDVs373oJP3EQ6SAP4o7vDfhdlwh5IPb47/qr9L7m14qOiJt+v3tBq5fRhIRgEA
jW7ehXn6Z5lZD0OW7M3A01R8Vu8g+DRIewQ5jqqLoQk=
=nNlf
-----END PGP PUBLIC KEY BLOCK-----
"""


@pytest.mark.parametrize(
    "data",
    [
        KEY,
        openpgp.dearmor(KEY),
        b"some text before it\n\n" + KEY,
        KEY.replace(b"\n", b"\r\n"),
        KEY.replace(b"Comment: a header\n", b""),
    ],
    ids=["armoured", "binary", "with text", "with CRLF", "without headers"],
)
def test_a_key_is_known_by_its_fingerprint(data: bytes) -> None:
    assert openpgp.fingerprints(data) == [FINGERPRINT]


def test_every_key_of_a_file_counts() -> None:
    assert openpgp.fingerprints(KEY + KEY) == [FINGERPRINT, FINGERPRINT]
    assert openpgp.fingerprints(openpgp.dearmor(KEY) * 2) == [FINGERPRINT, FINGERPRINT]


def test_the_newer_packet_format_gives_the_same_fingerprint() -> None:
    binary = openpgp.dearmor(KEY)
    length = binary[1]
    assert openpgp.fingerprints(b"\xc6" + binary[1 : 2 + length]) == [FINGERPRINT]
    assert openpgp.fingerprints(b"\xc6\xff\x00\x00\x00" + binary[1 : 2 + length]) == [FINGERPRINT]


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "no OpenPGP public key"),
        (b"<html>404 Not Found</html>", "no OpenPGP file"),
        (openpgp.dearmor(KEY)[:20], "ends in the middle"),
        (openpgp.dearmor(KEY)[:1], "ends in the middle"),
        (KEY.replace(b"mDMEaw1o", b"mDME?w1o"), "armour is damaged"),
        (b"\x98\x04\x03\x00\x00\x00", "version 3"),
        (b"\xb4\x01a", "no OpenPGP public key"),
        # Secret keys: sqv takes the public half of one, whose fingerprint nobody compared, for a key to trust.
        (openpgp.dearmor(KEY) + b"\x94\x03\x04ab", "packet of type 5, which no file of public keys has"),
        (openpgp.dearmor(KEY) + b"\xc5\x03\x04ab", "packet of type 5, which no file of public keys has"),
        (b"\xc6\xe0a", "in pieces"),
    ],
    ids=[
        "empty",
        "a page",
        "cut",
        "cut at once",
        "damaged",
        "old",
        "no key",
        "secret",
        "secret, newer format",
        "pieces",
    ],
)
def test_what_is_no_key_is_refused(data: bytes, says: str) -> None:
    with pytest.raises(openpgp.NoKeyError, match=says):
        openpgp.fingerprints(data)
