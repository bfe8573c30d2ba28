"""The SMBIOS table (DMTF DSP0134), which the kernel gives to root: maker, firmware, and what the slots are called."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_FIRMWARE, _SYSTEM, _BOARD, _SLOT, _END = 0, 1, 2, 9, 127
_HEADER = 4
_UNKNOWN_BUS = 0xFF
_SLOT_WITH_ADDRESS = 0x11  # since SMBIOS 2.6


@dataclass(frozen=True)
class Smbios:
    """Strings as the maker wrote them; `slots` has the names printed on the board, by PCI address."""

    maker: str = ""
    product: str = ""
    board: str = ""
    firmware: str = ""
    firmware_date: str = ""
    slots: dict[str, str] = field(default_factory=dict)


def parse(table: bytes) -> Smbios:
    """Read /sys/firmware/dmi/tables/DMI. A table that breaks off gives what stands before the break."""
    said: dict[str, str] = {}
    slots: dict[str, str] = {}
    for kind, body, strings in _structures(table):

        def text(offset: int, body: bytes = body, strings: list[str] = strings) -> str:
            number = body[offset] if offset < len(body) else 0
            return strings[number - 1].strip() if 0 < number <= len(strings) else ""

        if kind == _FIRMWARE:
            said |= {"firmware": text(0x05), "firmware_date": text(0x08)}
        elif kind == _SYSTEM:
            said |= {"maker": text(0x04), "product": text(0x05)}
        elif kind == _BOARD:
            said |= {"board": text(0x05)}
        elif kind == _SLOT and len(body) >= _SLOT_WITH_ADDRESS:
            segment, bus, function = struct.unpack_from("<HBB", body, 0x0D)
            if bus != _UNKNOWN_BUS or function != _UNKNOWN_BUS:
                slots[f"{segment:04x}:{bus:02x}:{function >> 3:02x}.{function & 7}"] = text(0x04)
    return Smbios(slots=slots, **said)


def _structures(table: bytes) -> Iterator[tuple[int, bytes, list[str]]]:
    offset = 0
    while offset + _HEADER <= len(table):
        kind, length = table[offset], table[offset + 1]
        end = table.find(b"\0\0", offset + length)
        if kind == _END or length < _HEADER or end < 0:
            return
        strings = [part.decode("latin-1") for part in table[offset + length : end].split(b"\0") if part]
        yield kind, table[offset : offset + length], strings
        offset = end + 2
