"""One line of what is right and wrong with a machine, and what the machine is wanted to have.

A verdict is
  ok       as wanted
  role     not yet, and a role of the play sets it; `role` names it
  warn     it serves, but not at its best, or somebody should know
  fail     only a person can mend it
  unknown  it could not be found out; the value says why
"""

from __future__ import annotations

import re
from dataclasses import dataclass

GIB = 1 << 30
GB = 1000**3


@dataclass(frozen=True)
class Wanted:
    """What the host is to have. Sizes in GiB or GB (1000^3 bytes) as their names say, the rate in GB/s."""

    gpus: int = 8
    gpu_model: str = "RTX PRO 6000 Blackwell"
    vram_gib: int = 94
    least_driver: str = "580.65.06"
    memory_gib: int = 128
    shm_gib: int = 16
    nofile: int = 65536
    data_free_gb: int = 700
    data_read_gb_s: float = 2.0
    least_docker: str = "25.0"
    least_compose: str = "2.24.4"
    least_toolkit: str = "1.18.2"
    driver_replace: bool = False  # as nvidia_driver_replace: another driver may go
    mok: bool = False  # as nvidia_driver_secure_boot: mok, a key of the host's own signs the modules
    clock: float | None = None  # the controller's, in seconds since the epoch
    accept: tuple[str, ...] = ()


@dataclass(frozen=True)
class Finding:
    """One line. `subject` is the PCI address where a check has a line a device."""

    check: str
    value: str
    wanted: str
    verdict: str
    remedy: str = ""
    role: str = ""
    subject: str = ""
    accepted: bool = False
    detail: tuple[str, ...] = ()  # lines shown as they are, below

    @property
    def name(self) -> str:
        """What an `accept` list calls this line: the check, or check:address."""
        return f"{self.check}:{self.subject}" if self.subject else self.check


def judged(
    right: bool | None,  # noqa: FBT001
    check: str,
    value: str,
    wanted: str,
    verdict: str,
    remedy: str,
    *,
    role: str = "",
    subject: str = "",
) -> Finding:
    """`ok` where it is right, `unknown` where that is None, else `verdict` with its remedy."""
    if right is None:
        return Finding(check, value, wanted, "unknown", subject=subject)
    if right:
        return Finding(check, value, wanted, "ok", subject=subject)
    return Finding(check, value, wanted, verdict, remedy, role, subject)


def version_of(text: str) -> tuple[int, ...]:
    """Read the numbers of a version, to compare."""
    return tuple(int(part) for part in re.findall(r"\d+", text)[:4])
