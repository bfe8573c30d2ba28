"""An all-reduce over all ranks, with a deadline: NCCL's over all GPUs, or gloo's over processes of a CPU, for tests."""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from aerie.fabric.children import Children, Program, module, started
from aerie.fabric.sizes import LOADING, LOADING_SECONDS, REDUCTIONS
from aerie.supervisor.tree import Survivor

_PROGRAM = module("aerie.fabric.rank")
_PARTING = "parting"


class State(StrEnum):
    """What came of it."""

    WORKS = "works"
    WRONG = "wrong"
    HUNG = "hung"
    FAILED = "failed"


@dataclass
class Reduction:
    """One all-reduce after the other, from small to large."""

    backend: str
    ranks: int
    state: State
    detail: str = ""
    seconds: dict[int, float] = field(default_factory=dict)
    """By bytes: the slowest rank's median."""
    survivors: list[Survivor] = field(default_factory=list)

    @property
    def works(self) -> bool:
        """Whether all sums were right."""
        return self.state is State.WORKS

    def gb_per_s(self, size: int) -> float:
        """Return the bus bandwidth, 10^9 bytes a second: what each rank sends in a ring, 2 (n - 1) / n of the data.

        Source: NVIDIA's nccl-tests, doc/PERFORMANCE.md, so that the figures can be compared.
        """
        return size / self.seconds[size] * 2 * (self.ranks - 1) / self.ranks / 1e9


def all_reduce(
    backend: str,
    ranks: int,
    environment: Mapping[str, str],
    deadline: float,
    say: Callable[[str], None],
    program: Sequence[str] = _PROGRAM,
) -> Reduction:
    """Let so many ranks reduce, and end them where nothing moves for `deadline` seconds. OSError if none can start."""
    with tempfile.TemporaryDirectory(prefix="aerie-fabric-", ignore_cleanup_errors=True) as folder:
        command = [*program, backend, str(Path(folder, "rendezvous"))]
        programs = [
            Program(f"rank {rank}", command, {**environment, "RANK": str(rank), "WORLD_SIZE": str(ranks)})
            for rank in range(ranks)
        ]
        with started(programs) as children:
            watch = _Watch(children, ranks, deadline, say)
            state, detail = watch.follow()
        return Reduction(
            backend, ranks, state, detail, watch.slowest() if state is State.WORKS else {}, children.survivors
        )


class _Watch:
    """Follows all ranks."""

    def __init__(self, children: Children, ranks: int, deadline: float, say: Callable[[str], None]) -> None:
        self._children = children
        self._deadline = deadline
        self._say = say
        self._steps = [LOADING] * ranks
        self._moves = [0] * ranks
        self._told: set[str] = set()
        self._seconds: list[dict[int, float]] = [{} for _ in range(ranks)]

    def follow(self) -> tuple[State, str]:
        """Return what came of it, and why where it did not work."""
        running = set(range(len(self._steps)))
        while running:
            # Where one has read what all read, the disk is no excuse for the others.
            limit = LOADING_SECONDS if set(self._steps) == {LOADING} else self._deadline
            said = self._children.next(limit)
            if said is None:
                return State.HUNG, self._who_hangs(limit)
            rank, message = said.child, said.message
            if message is None:
                if how := self._children.failed_how(rank):
                    return State.FAILED, f"rank {rank}, {self._steps[rank]}: {how}"
                running.discard(rank)
                continue
            self._moves[rank] += 1
            if "step" in message:
                self._steps[rank] = message["step"]
                if message["step"] not in self._told:
                    self._told.add(message["step"])
                    self._say(message["step"])
            elif "timed" in message:
                self._seconds[rank][message["timed"]] = message["seconds"]
            elif message.get("wrong"):
                sums = f"{message['wrong']:,} of {message['reduced'] // 2:,} sums"
                return State.WRONG, f"{self._steps[rank]}: {sums} are wrong on rank {rank}"
        return State.WORKS, ""

    def slowest(self) -> dict[int, float]:
        """Return for each size the time of the rank that took longest."""
        return {size: max(rank[size] for rank in self._seconds) for size in REDUCTIONS}

    def _who_hangs(self, limit: float) -> str:
        """Name the ranks that came least far; where all came as far, none is to be told from the others."""
        behind = [rank for rank, moves in enumerate(self._moves) if moves == min(self._moves)]
        step = self._steps[behind[0]]
        if len(behind) == len(self._moves):
            return f"all {len(behind)} ranks: {step}: nothing moved for {limit:.0f} s"
        who = f"rank{'s' * (len(behind) > 1)} {', '.join(map(str, behind))}"
        ahead = next(each for rank, each in enumerate(self._steps) if rank not in behind)
        return f"{who} did not get past {step!r} within {limit:.0f} s; the others wait: {ahead}"
