"""Waits until an engine has let go of everything: its processes, and their memory on the GPUs."""

import asyncio
import os
import time
from collections.abc import Collection

from aerie.diagnosis import Evidence, Kind
from aerie.supervisor import gpus
from aerie.supervisor.processes import Look, kill_below

# Seconds.
SURVIVES = 30.0
"""That a process has after SIGKILL. Freeing all memory of such a host takes a few; a stuck driver frees none."""
_RELEASED_WITHIN = 60.0  # after the last process has gone
_LOOK_AGAIN = 0.5

_MIB = 2**20


async def held_back(
    baseline: tuple[int, ...],
    survives: float = SURVIVES,
    released_within: float = _RELEASED_WITHIN,
    apart: Collection[int] = (),
) -> list[Evidence]:
    """Wait for the end of all processes below this one and for their GPU memory; return what has not gone in time.

    `baseline` is what the GPUs held before an engine had them, in bytes, () where that is not known; the limits are in
    seconds; `apart` are processes that are no part of it.
    """
    survivors = await kill_below(os.getpid(), survives, apart)
    if survivors:
        words = f"survives SIGKILL for {survives:.0f} s"
        meaning = "a driver does not let go of it"
        return [
            Evidence("supervisor", time.time(), f"{survivor} {words}", None, survivor.pid, Kind.HARDWARE, meaning)
            for survivor in survivors
        ]
    if not baseline:
        return []
    deadline = time.monotonic() + released_within
    look = Look(gpus.used_bytes)
    used: tuple[int, ...] | None = None
    while True:
        used = await look.take(max(_LOOK_AGAIN, deadline - time.monotonic()))
        if used is not None and gpus.released(baseline, used):
            return []
        if time.monotonic() > deadline:
            return _kept(baseline, used, released_within)
        await asyncio.sleep(_LOOK_AGAIN)


def _kept(baseline: tuple[int, ...], used: tuple[int, ...] | None, waited: float) -> list[Evidence]:
    after = f"{waited:.0f} s after the last process of the engine ended"
    if used is None:
        words = f"the GPUs' driver does not answer, {after}"
        return [Evidence("supervisor", time.time(), words, kind=Kind.HARDWARE, meaning="the driver is stuck")]
    words = f"MiB are in use {after}, before its start it was"
    meaning = "the driver has not released them, or another program took them: nvidia-smi names it"
    return [
        Evidence(
            "supervisor",
            time.time(),
            f"GPU {number}: {now // _MIB} {words} {before // _MIB}",
            kind=Kind.HARDWARE,
            meaning=meaning,
        )
        for number, (before, now) in enumerate(zip(baseline, used, strict=False))
        if not gpus.released((before,), (now,))
    ]
