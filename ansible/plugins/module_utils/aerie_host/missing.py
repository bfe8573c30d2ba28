"""Which GPUs of those that a host should have are missing: where each sat, and what the kernel said of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .machine import Machine
    from .nvidia import KernelEvent
    from .pci import Device


@dataclass(frozen=True)
class MissingGpu:
    """One that should be there. What could not be found out is empty: a GPU that never came up leaves no address."""

    reason: str
    address: str = ""
    slot: str = ""
    port: str = ""  # the port above it
    event: KernelEvent | None = None

    def __str__(self) -> str:
        """Name it as somebody needs who is about to open the machine."""
        place = ", ".join(part for part in (self.slot, f"below port {self.port}" if self.port else "") if part)
        said = ""
        if self.event:
            xid = f"Xid {self.event.xid}: " if self.event.xid is not None else ""
            said = f"; the kernel{' at ' + self.event.at if self.event.at else ''}: {xid}{self.event.text}"
        return f"{self.address or 'address unknown'}{f' ({place})' if place else ''} {self.reason}{said}"

    @property
    def left_a_trace(self) -> bool:
        """Whether there is a place to look at."""
        return bool(self.address or self.port)


def missing_gpus(machine: Machine, expected: int) -> list[MissingGpu]:
    """List what is missing to `expected`, surest first; empty where so many are on the bus and a driver serves them.

    Before a driver is loaded only the bus counts.
    """
    found: dict[str, MissingGpu] = {}
    served = {gpu.address for gpu in machine.served}
    for gpu in machine.gpus:
        if not gpu.answers:
            found[gpu.address] = _missing(machine, gpu.address, "is listed and no longer answers on the bus")
        elif machine.driver and gpu.driver == "nvidia" and gpu.address not in served:
            found[gpu.address] = _missing(machine, gpu.address, "is on the bus, but the driver does not serve it")
    for event in (*(machine.events or ()), *machine.events_before):
        if event.lost and event.address not in found and event.address not in machine.devices:
            found[event.address] = _missing(machine, event.address, "is gone from the bus")
    there = sum(1 for gpu in machine.gpus if gpu.address not in found)
    lacking = expected - there - len(found)
    if lacking > 0:
        taken = {missing.port for missing in found.values()}
        for port in [port for port in _empty_ports(machine) if port.address not in taken][:lacking]:
            state = (
                "a card sits in it, and its link is down"
                if port.slot and port.slot.present
                else "no card is seen in it"
            )
            reason = f"may be the one of this slot: {state}"
            found[port.address] = MissingGpu(reason, slot=machine.slot(port.address), port=port.address)
        found |= {str(number): MissingGpu("left no trace") for number in range(expected - there - len(found))}
    return list(found.values()) if expected > there else []


def in_words(missing: Sequence[MissingGpu]) -> list[str]:
    """Name each that left a trace, and count the others."""
    traced = [gpu for gpu in missing if gpu.left_a_trace]
    rest = len(missing) - len(traced)
    return [*map(str, traced), *([f"{rest} left no trace"] if rest else [])]


def _missing(machine: Machine, address: str, reason: str) -> MissingGpu:
    """Add what the kernel said, of this boot if it did, else of the one before; a line with an Xid says most."""
    for log in (machine.events or (), machine.events_before):
        events = [event for event in log if event.address == address and event.lost]
        if events:
            told = next((event for event in events if event.xid is not None), events[0])
            return MissingGpu(reason, address, machine.slot(address), _port(machine, address), told)
    return MissingGpu(reason, address, machine.slot(address), _port(machine, address))


def _port(machine: Machine, address: str) -> str:
    """Find the port whose secondary bus the address is on; it is there also when the device is not."""
    if address in machine.devices:
        return machine.devices[address].parent or ""
    domain, bus = address.split(":")[:2]
    at = (port.address for port in machine.devices.values() if port.buses and port.buses[1] == int(bus, 16))
    return next((port for port in at if port.startswith(domain + ":")), "")


def _empty_ports(machine: Machine) -> list[Device]:
    """List ports with nothing below that are like those with a GPU below, first those in whose slot a card is seen."""
    parents = [machine.devices[gpu.parent] for gpu in machine.gpus if gpu.parent in machine.devices]
    kinds = {(port.kind, port.vendor, port.device, port.link and port.link.max_width) for port in parents}
    occupied = {address for device in machine.devices.values() for address in device.path[:-1]}
    empty = [
        port
        for port in machine.devices.values()
        if port.address not in occupied
        and (port.kind, port.vendor, port.device, port.link and port.link.max_width) in kinds
    ]
    return sorted(empty, key=lambda port: (not (port.slot and port.slot.present), port.address))
