"""ACS redirection off on the ports above the GPUs: found, cleared, read back, and put back.

With its redirect bits on, a port sends a GPU's request to its neighbour up to the root complex instead of straight
across. Measured on one switch: 50 GB/s between neighbours with it, 103 without, root ports alone not being enough
(rtx6kpro wiki, hardware/asus-esc8000a-e13p-broadcom-switches.md, May 2026). On some boards the first all-reduce hangs
for good (https://github.com/NVIDIA/nccl/issues/2079, https://github.com/NVIDIA/nccl/issues/1999).

What is cleared are the bits that Linux itself clears for `pci=disable_acs_redir=` (request and completion redirect,
egress control: drivers/pci/pci.c), and upstream forwarding, which passes on what a port further down redirected. Source
validation and translation blocking stay as they are: they refuse forged requests and turn nothing around. The price is
isolation: a device below such a port reaches its neighbours past the IOMMU, so that none of them may be given to a
virtual machine that is not trusted.

The firmware switches the bits on anew at each boot, so a unit runs `apply` at each boot.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .pci import ACS_BITS, ACS_REDIRECTION, Acs, Device, bridges_on_paths, gpus, read_devices

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

CLEARED = ACS_REDIRECTION | ACS_BITS["EgressCtrl"]
"""The bits of the control word that turn peer traffic around."""
STATE = Path("/var/lib/aerie/acs.json")
"""By address: vendor, device and the control word that the firmware had set."""
_CONTROL = 6  # offset of the control word in the capability


class AcsError(Exception):
    """It could not be done; the message says why and what to do."""


def redirecting(devices: dict[str, Device]) -> list[Device]:
    """Return the ports above the GPUs that turn peer traffic around."""
    return [port for port in bridges_on_paths(devices, gpus(devices)) if port.acs and port.acs.control & CLEARED]


def describe(port: Device) -> str:
    """Name a port and, as `lspci` does, what turns traffic around: 0000:40:01.1 (root port: ReqRedir, CmpltRedir)."""
    bits = Acs(0, 0, port.acs.control & CLEARED).enabled if port.acs else ()
    return f"{port.address} ({port.kind}: {', '.join(bits)})"


# --- The way there and back -------------------------------------------------------------------------------------------


def apply(sys_dir: Path, state: Path) -> list[Device]:
    """Clear redirection on every port above the GPUs and return those that had it. AcsError where one keeps it."""
    devices = _readable(sys_dir)
    ports = redirecting(devices)
    try:
        known = _load(state)
    except AcsError as error:  # at a boot the ports are as the firmware set them, and have to be cleared all the same
        print(f"acs: {error}. It is written anew", file=sys.stderr)
        known = {}
    # Before anything is written, and only what is not known yet: a port that is found anew after a boot had the same.
    recorded = known | {
        port.address: {"vendor": port.vendor, "device": port.device, "control": port.acs.control}
        for port in ports
        if port.acs and not _is_same(known.get(port.address), port)
    }
    if recorded != known:
        _save(state, recorded)
    for port in ports:
        _write(sys_dir, port, lambda control: control & ~CLEARED)
    kept = redirecting(read_devices(sys_dir))
    if kept:
        raise AcsError(
            f"ACS was written and reads back with redirection on: {', '.join(map(describe, kept))}. The port does not "
            "take it: switch ACS off in the firmware's setup"
        )
    return ports


def undo(sys_dir: Path, state: Path) -> tuple[list[str], list[str]]:
    """Put the cleared bits back as recorded; return the ports put back, and those that are gone or others now."""
    recorded = _load(state)
    devices = _readable(sys_dir) if recorded else {}
    back, gone = [], []
    for address, before in sorted(recorded.items()):
        port = devices.get(address)
        if port is None or not _is_same(before, port):
            gone.append(address)
            continue
        was = before["control"] & CLEARED
        _write(sys_dir, port, lambda control, was=was: control & ~CLEARED | was)  # type: ignore[misc]
        back.append(address)
    state.unlink(missing_ok=True)
    return back, gone


def _readable(sys_dir: Path) -> dict[str, Device]:
    devices = read_devices(sys_dir)
    short = [port.address for port in bridges_on_paths(devices, gpus(devices)) if not port.whole]
    if short:
        raise AcsError(f"only root can read the capabilities of {', '.join(short)}: run this as root")
    return devices


def _is_same(before: dict[str, int] | None, port: Device) -> bool:
    return before is not None and (before["vendor"], before["device"]) == (port.vendor, port.device)


def _write(sys_dir: Path, port: Device, change: Callable[[int], int]) -> None:
    """Change a port's control word in its configuration space: these two bytes, in one write."""
    if port.acs is None:
        raise AcsError(f"{port.address} had Access Control Services and has none now: was it replaced?")
    place = sys_dir / "bus/pci/devices" / port.address / "config"
    offset = port.acs.offset + _CONTROL
    try:
        config = os.open(place, os.O_RDWR)
        try:
            now = int.from_bytes(os.pread(config, 2, offset), "little")
            wanted = change(now)
            if wanted != now:
                os.pwrite(config, wanted.to_bytes(2, "little"), offset)
        finally:
            os.close(config)
    except OSError as error:
        raise AcsError(_why(error, place, sys_dir)) from error


def _why(error: OSError, place: Path, sys_dir: Path) -> str:
    try:
        lockdown = (sys_dir / "kernel/security/lockdown").read_text().strip()
    except OSError:
        lockdown = ""
    if error.errno in {errno.EPERM, errno.EACCES} and lockdown and "[none]" not in lockdown:
        # pci_write_config in drivers/pci/pci-sysfs.c asks LOCKDOWN_PCI_ACCESS.
        return (
            f"{place} cannot be written, because the kernel is locked down ({lockdown}), as it is under Secure Boot. "
            "Switch ACS or Secure Boot off in the firmware's setup, or name the ports in pci=disable_acs_redir= on the "
            "kernel's command line; pcie_fabric_clear_acs: false then leaves this unit out"
        )
    return f"{place} cannot be written: {error.strerror}. Run this as root, on the host itself"


def _load(state: Path) -> dict[str, dict[str, int]]:
    try:
        content: dict[str, Any] = json.loads(state.read_text())
        return {
            address: {name: int(before[name]) for name in ("vendor", "device", "control")}
            for address, before in content.items()
        }
    except FileNotFoundError:
        return {}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise AcsError(
            f"{state} is no record of ports ({type(error).__name__}: {error}): remove it; a boot brings back the "
            "firmware's bits"
        ) from error


def _save(state: Path, recorded: dict[str, dict[str, int]]) -> None:
    state.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    new = state.with_suffix(".new")
    with new.open("w") as file:
        file.write(json.dumps(recorded, indent=1, sort_keys=True) + "\n")
        file.flush()
        os.fsync(file.fileno())  # a power loss must not leave an empty one
    new.chmod(0o600)
    new.replace(state)


def wait_for_gpus(
    sys_dir: Path,
    count: int,
    seconds: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Wait until `count` GPUs are on the bus, for `seconds` at most, and return how many are."""
    deadline = clock() + seconds
    while (found := len(gpus(read_devices(sys_dir)))) < count and clock() < deadline:
        sleep(1)
    return found


# --- The command ------------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `aerie_host acs`: 0 as it should be, 1 a port turns traffic around, 2 it could not be done."""
    parser = argparse.ArgumentParser(prog="aerie_host acs", description="ACS redirection on the ports above the GPUs.")
    parser.add_argument("what", choices=["apply", "check", "undo"])
    parser.add_argument("--gpus", type=int, default=0, help="wait until so many are on the bus")
    parser.add_argument("--wait", type=float, default=0, help="seconds to wait for them at most")
    parser.add_argument("--sys", type=Path, default=Path("/sys"), help=argparse.SUPPRESS)
    parser.add_argument("--state", type=Path, default=STATE, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    try:
        return {"apply": _apply, "check": _check, "undo": _undo}[given.what](given)
    except AcsError as error:
        print(f"acs: {error}.", file=sys.stderr)
        return 2


def _apply(given: argparse.Namespace) -> int:
    found = wait_for_gpus(given.sys, given.gpus, given.wait)
    if found < given.gpus:
        # The others' ports are cleared all the same; who serves waits for the GPUs, and names the missing one.
        print(f"acs: {found} of {given.gpus} GPUs are on the bus after {given.wait:.0f} s", file=sys.stderr)
    for port in apply(given.sys, given.state):
        print(f"cleared {describe(port)}")
    print(f"peer traffic of {found} GPUs takes the short way")
    return 0


def _check(given: argparse.Namespace) -> int:
    devices = _readable(given.sys)
    ports = redirecting(devices)
    if ports:
        print(f"ACS turns peer traffic around at {', '.join(map(describe, ports))}")
        return 1
    print(f"peer traffic of {len(gpus(devices))} GPUs takes the short way")
    return 0


def _undo(given: argparse.Namespace) -> int:
    back, gone = undo(given.sys, given.state)
    for address in back:
        print(f"put back {address}")
    for address in gone:
        print(f"left alone {address}: it is gone, or another device now")
    return 0
