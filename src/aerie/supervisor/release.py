"""Waits until an engine has let go of everything: its processes, and their memory on the GPUs."""

import asyncio
import os
import time

from aerie.diagnosis import Evidence, Kind
from aerie.supervisor import gpus
from aerie.supervisor.processes import kill_below, off_loop

# Seconds.
SURVIVES = 30.0
"""That a process has after SIGKILL. Freeing all memory of such a host takes a few; a stuck driver frees none."""
_RELEASED_WITHIN = 60.0  # after the last process has gone
_LOOK_AGAIN = 0.5

_MIB = 2**20


async def held_back(
    baseline: tuple[int, ...], survives: float = SURVIVES, released_within: float = _RELEASED_WITHIN
) -> list[Evidence]:
    """Wait for the end of all processes below this one and for their GPU memory; return what has not gone in time.

    `baseline` is what the GPUs held before the first engine, in bytes; both limits are in seconds.
    """
    survivors = await kill_below(os.getpid(), survives)
    if survivors:
        words = f"survives SIGKILL for {survives:.0f} s"
        meaning = "a driver does not let go of it"
        return [
            Evidence("supervisor", time.time(), f"{survivor} {words}", None, survivor.pid, Kind.HARDWARE, meaning)
            for survivor in survivors
        ]
    deadline = time.monotonic() + released_within
    while not await off_loop(gpus.released, baseline):
        if time.monotonic() > deadline:
            return await off_loop(_kept, baseline, released_within)
        await asyncio.sleep(_LOOK_AGAIN)
    return []


def _kept(baseline: tuple[int, ...], waited: float) -> list[Evidence]:
    words = f"MiB are in use {waited:.0f} s after the last process of the engine ended, before the first start it was"
    meaning = "the driver has not released them, or another program took them"
    return [
        Evidence(
            "supervisor",
            time.time(),
            f"GPU {number}: {now // _MIB} {words} {before // _MIB}",
            kind=Kind.HARDWARE,
            meaning=meaning,
        )
        for number, (before, now) in enumerate(zip(baseline, gpus.used_bytes(), strict=False))
        if now > before
    ]
