"""The SMBIOS table: names of machine and slots, also from a table that breaks off."""

from __future__ import annotations

import pytest
from aerie_host import smbios
from build import _smbios as table

BOARD = {
    "maker": "Example Systems",
    "product": "Two sockets",
    "bios": {"version": "2.0", "date": "01/20/2026"},
    "slots": {"0000:02:03.0": "PCIE4", "0001:81:1f.7": "M.2 A"},
}


def test_names() -> None:
    found = smbios.parse(table(BOARD))
    assert (found.maker, found.product, found.board) == ("Example Systems", "Two sockets", "Two sockets board")
    assert (found.firmware, found.firmware_date) == ("2.0", "01/20/2026")
    assert found.slots == {"0000:02:03.0": "PCIE4", "0001:81:1f.7": "M.2 A"}


@pytest.mark.parametrize("length", range(0, len(table(BOARD)), 7))
def test_a_table_that_breaks_off(length: int) -> None:
    found = smbios.parse(table(BOARD)[:length])
    assert set(found.slots) <= set(BOARD["slots"])


def test_a_slot_without_an_address_is_left_out() -> None:
    slot = bytes([9, 17, 0, 0, 1, 0xB6, 13, 4, 4, 0, 0, 12, 1, 0, 0, 0xFF, 0xFF]) + b"PCIE1\0\0"
    assert smbios.parse(slot).slots == {}


def test_a_string_number_without_a_string_is_empty() -> None:
    assert smbios.parse(bytes([1, 6, 0, 0, 5, 9]) + b"one\0\0").maker == ""
