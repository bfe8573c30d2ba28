"""What the engine computes on: the GPUs of this machine, or those that a plan is made for."""

import dataclasses
import os
from collections.abc import Sequence
from dataclasses import dataclass

from aerie.supervisor import gpus

GIB = 2**30
_CORES = {(8, 0): 64}
"""CUDA cores of a multiprocessor, by compute capability; 128 of the others from 8.6 on (CUDA's programming guide)."""


@dataclass(frozen=True)
class Hardware:
    """One kind of GPU, and how many of it; `chip` is None for a CPU."""

    name: str
    chip: str | None
    memory: int
    """Bytes of one GPU that programs can have; of a CPU, those of the machine."""
    multiprocessors: int
    count: int

    @property
    def words(self) -> str:
        """One of it, for people."""
        return f"{self.name} ({self.chip + ', ' if self.chip else ''}{self.memory / GIB:.1f} GiB)"


RTX_PRO_6000 = Hardware("RTX PRO 6000 Blackwell", "sm_120", 101_972_967_424, 188, 8)
"""The host that Aerie is made for: 94.97 GiB of it are CUDA's, which is what vLLM divides, of the 95.59 that nvidia-smi
shows (multiprocessors: NVIDIA's RTX Blackwell PRO architecture paper)."""
H200 = Hardware("H200", "sm_90", int(139.8 * GIB), 132, 8)
"""Memory as vLLM reported it on one."""
_KNOWN = (RTX_PRO_6000, H200)
CHIPS = tuple(str(known.chip) for known in _KNOWN)
"""What `by_name` knows."""


def by_name(chip: str, count: int | None = None) -> Hardware:
    """Return the hardware that a chip is known by, `count` of it. Raises ValueError for another chip than of CHIPS."""
    found = next((known for known in _KNOWN if known.chip == chip), None)
    if found is None:
        raise ValueError(f"{chip} is no chip that is known here: name one of {', '.join(CHIPS)}")
    return found if count is None else dataclasses.replace(found, count=count)


def this_machine() -> Hardware:
    """Return the visible GPUs, or the CPU where there are none; of different ones, the smallest stands for all."""
    if found := gpus.devices():
        return _hardware(found)
    return Hardware("CPU", None, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), 0, 1)


def identity() -> str:
    """Return what the machine computes with, in words that change when a GPU or the driver does."""
    found = gpus.devices()
    return ", ".join([*(device.name for device in found), f"driver {gpus.driver()}"]) if found else "CPU"


def _hardware(devices: Sequence[gpus.Device]) -> Hardware:
    least = min(devices, key=lambda device: device.memory)
    major, minor = least.capability
    cores = _CORES.get(least.capability, 128)
    return Hardware(least.name, f"sm_{major}{minor}", least.memory, least.cores // cores, len(devices))
