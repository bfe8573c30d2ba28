"""A rehearsal beside a service that runs: only where there is room, and behind it in everything."""

import os

from aerie.rehearsal.findings import Finding, skipped
from aerie.rehearsal.overrides import BESIDE_NEEDS
from aerie.rehearsal.static.hardware import GIB
from aerie.supervisor import gpus

_LAST = 19  # of nice(2)


def low_priority() -> None:
    """Give way to every other process, in CPU time and on disks; what is started from here does so, too."""
    import psutil  # noqa: PLC0415 - in the image, with vLLM

    os.nice(_LAST)
    psutil.Process().ionice(psutil.IOPRIO_CLASS_IDLE)


def room_beside() -> Finding | None:
    """Return that there is none where a GPU has too little memory left, None where there is."""
    free = gpus.free_bytes()
    short = [number for number, left in enumerate(free) if left < BESIDE_NEEDS]
    if not short:
        return None
    return skipped(
        "room beside the service",
        f"GPU {short[0]} has {free[short[0]] / GIB:.1f} GiB free, and an engine beside takes {BESIDE_NEEDS / GIB:.0f}: "
        "the static checks were all",
    )
