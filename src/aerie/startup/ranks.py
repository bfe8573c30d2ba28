"""The ranks of one engine: who has arrived, who has said what, and who holds how much of the weights."""

import re
from typing import NamedTuple

from aerie.startup.activity import Activity
from aerie.startup.lines import Line

Speaker = int | str
"""A process, by its pid, or by its name where a log gives none."""

_ARRIVED = re.compile(r"world_size=(\d{1,5}) rank=(\d{1,5}) ")
_WORTH_COMPARING = 2**30  # bytes that rank 0 holds; below it CUDA contexts and libraries decide
_BEHIND = 0.9  # of what rank 0 holds: stages of a pipeline differ by some layers, and ranks by chance


class Lag(NamedTuple):
    """The rank that holds least of its weights, beside rank 0, whose bar is the one that shows."""

    rank: int
    holds: int
    """Bytes, since loading began."""
    rank_0_holds: int

    @property
    def ratio(self) -> float:
        """Below 1."""
        return self.holds / self.rank_0_holds


def speaker_of(line: Line) -> Speaker:
    """Return who says a line."""
    return line.process if line.pid is None else line.pid


class Ranks:
    """Knows the ranks from the line that each writes when it arrives at the rendezvous."""

    def __init__(self) -> None:
        self.world_size = 0
        self._arrived: dict[Speaker, int] = {}
        self._before: Activity | None = None
        self._now: Activity | None = None

    def arrives(self, line: Line) -> bool:
        """Return whether this line is a rank's arrival, and remember it."""
        found = _ARRIVED.search(line.text)
        if found is None:
            return False
        self.world_size = int(found[1])
        self._arrived[speaker_of(line)] = int(found[2])
        return True

    @property
    def arrived(self) -> int:
        """How many have arrived."""
        return len(self._arrived)

    def missing(self) -> list[int]:
        """Return the ranks that have not arrived."""
        return sorted(set(range(self.world_size)) - set(self._arrived.values()))

    def silent(self, speakers: set[Speaker]) -> list[int]:
        """Return the ranks that are not among the speakers."""
        return sorted(rank for speaker, rank in self._arrived.items() if speaker not in speakers)

    def begin_loading(self) -> None:
        """From now on what a rank holds are weights."""
        self._before = self._now

    def observe(self, activity: Activity) -> None:
        """Take what the kernel and the driver show into account."""
        self._now = activity
        self._before = self._before or activity

    def lag(self) -> Lag | None:
        """Return who is behind; None where nobody is, or where it cannot be seen."""
        held = self._held()
        if held.get(0, 0) < _WORTH_COMPARING:
            return None
        rank = min(held, key=lambda rank: (held[rank], rank))
        return Lag(rank, held[rank], held[0]) if held[rank] < _BEHIND * held[0] else None

    def read_bytes(self) -> int:
        """Return how much all of them have read from storage since loading began."""
        if self._before is None or self._now is None:
            return 0
        before = {process.pid: process.read_bytes for process in self._before.processes}
        return sum(max(0, process.read_bytes - before.get(process.pid, 0)) for process in self._now.processes)

    def _held(self) -> dict[int, int]:
        """Return the bytes by which each rank has grown: on its GPU, and without GPUs in its memory."""
        if self._before is None or self._now is None:
            return {}
        before, now = self._before.gpu_used_bytes, self._now.gpu_used_bytes
        if self.world_size <= len(now) == len(before):
            return {rank: max(0, now[rank] - before[rank]) for rank in range(self.world_size)}
        if now:  # several hosts, or a device for several ranks: which GPU is whose cannot be told
            return {}
        resident = {process.pid: process.rss_bytes for process in self._before.processes}
        return {
            self._arrived[process.pid]: max(0, process.rss_bytes - resident.get(process.pid, 0))
            for process in self._now.processes
            if process.pid in self._arrived
        }
