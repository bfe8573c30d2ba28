"""GPUs that should be there and are not: named by address, slot and what the kernel said."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import pytest
from aerie_host.missing import in_words, missing_gpus
from aerie_host.nvidia import KernelEvent

if TYPE_CHECKING:
    from collections.abc import Callable

    from aerie_host.machine import Machine


@pytest.mark.parametrize("name", ["eight-one-switch", "eight-two-sockets", "eight-degraded", "eight-small-bars"])
@pytest.mark.parametrize("driver", [True, False])
def test_nothing_is_missing(name: str, driver: bool, machine: Callable[..., Machine]) -> None:  # noqa: FBT001
    assert missing_gpus(machine(name, driver=driver), 8) == []


def test_one_that_fell_off_and_is_still_listed(machine: Callable[..., Machine]) -> None:
    (gpu,) = missing_gpus(machine("seven-of-eight"), 8)
    assert (gpu.address, gpu.slot, gpu.port) == ("0000:06:00.0", "PCIE4 slot 4", "0000:02:03.0")
    assert gpu.event == KernelEvent(
        "2026-11-02T09:41:17.004251+00:00", "0000:06:00.0", "GPU has fallen off the bus.", 79
    )
    assert str(gpu) == (
        "0000:06:00.0 (PCIE4 slot 4, below port 0000:02:03.0) is listed and no longer answers on the bus; "
        "the kernel at 2026-11-02T09:41:17.004251+00:00: Xid 79: GPU has fallen off the bus."
    )


def test_one_that_a_reboot_did_not_bring_back(machine: Callable[..., Machine]) -> None:
    (gpu,) = missing_gpus(machine("seven-after-reboot"), 8)
    assert (gpu.address, gpu.slot, gpu.event and gpu.event.xid) == ("0000:06:00.0", "PCIE4 slot 4", 79)
    assert "is gone from the bus" in str(gpu)


def test_without_the_kernels_word_the_empty_slot_is_named(machine: Callable[..., Machine]) -> None:
    host = dataclasses.replace(machine("seven-after-reboot"), events_before=())
    (gpu,) = missing_gpus(host, 8)
    assert (gpu.address, gpu.port, gpu.slot) == ("", "0000:02:03.0", "PCIE4 slot 4")
    assert str(gpu).endswith("may be the one of this slot: no card is seen in it")


def test_a_card_without_a_link_comes_first(machine: Callable[..., Machine]) -> None:
    host = dataclasses.replace(machine("seven-after-reboot"), events_before=())
    port = host.devices["0000:02:03.0"]
    assert port.slot is not None
    devices = {
        **host.devices,
        port.address: dataclasses.replace(port, slot=dataclasses.replace(port.slot, present=True)),
    }
    (gpu,) = missing_gpus(dataclasses.replace(host, devices=devices), 8)
    assert "a card sits in it, and its link is down" in str(gpu)


def test_one_that_the_driver_does_not_serve(machine: Callable[..., Machine]) -> None:
    host = machine("eight-two-sockets")
    failed = KernelEvent("", "0000:c1:00.0", "RmInitAdapter failed! (0x22:0x56:897)")
    host = dataclasses.replace(
        host, served=tuple(gpu for gpu in host.served if gpu.address != "0000:c1:00.0"), events=(failed,)
    )
    (gpu,) = missing_gpus(host, 8)
    assert "is on the bus, but the driver does not serve it" in str(gpu)
    assert str(gpu).endswith("the kernel: RmInitAdapter failed! (0x22:0x56:897)")


def test_more_are_expected_than_there_are_slots(machine: Callable[..., Machine]) -> None:
    missing = missing_gpus(machine("four-root-ports"), 8)
    assert len(missing) == 4
    assert in_words(missing) == ["4 left no trace"]


def test_those_with_a_trace_are_named_first(machine: Callable[..., Machine]) -> None:
    first, last = in_words(missing_gpus(machine("seven-of-eight"), 10))
    assert first.startswith("0000:06:00.0 (PCIE4 slot 4")
    assert last == "2 left no trace"


def test_no_gpu_at_all(machine: Callable[..., Machine]) -> None:
    host = machine("no-gpu")
    assert len(missing_gpus(host, 8)) == 8
    assert missing_gpus(host, 0) == []


def test_a_lost_gpu_that_nobody_expects_is_no_gap(machine: Callable[..., Machine]) -> None:
    assert missing_gpus(machine("seven-of-eight"), 7) == []
