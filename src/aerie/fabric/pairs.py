"""Which pairs of GPUs move bytes: every ordered one is tried in a child, and what hangs is killed and named."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from aerie.fabric.children import Children, Program, module, started
from aerie.fabric.sizes import LOADING, LOADING_SECONDS
from aerie.supervisor.tree import Survivor

ENOUGH = 3
"""Pairs of one kind that end their child; after so many the rest stays untried: each costs a deadline and a child."""
_PROGRAM = module("aerie.fabric.copies")

Numbers = tuple[int, int]


class State(StrEnum):
    """What came of a pair."""

    WORKS = "works"
    NOT_OFFERED = "not offered"
    """The driver lets neither see the other's memory: bytes come, by way of the host's."""
    WRONG = "wrong"
    HUNG = "hung"
    FAILED = "failed"
    UNTRIED = "untried"


@dataclass(frozen=True)
class Pair:
    """An ordered pair of GPUs: the first moves bytes into, and reads them from, the second's memory."""

    source: int
    destination: int
    state: State
    detail: str = ""
    gb_per_s: float | None = None
    """10^9 bytes a second by the copy engine: a figure, whatever it is."""

    @property
    def numbers(self) -> Numbers:
        """Both, in order."""
        return self.source, self.destination


@dataclass
class Tried:
    """All pairs, in the order of `in_rounds`, and what else is to be told."""

    pairs: list[Pair] = field(default_factory=list)
    no_kernel: str | None = None
    """Why no kernel was tried and the copy engine was all; None where one was."""
    survivors: list[Survivor] = field(default_factory=list)
    """Processes that a driver does not let go of."""


def in_rounds(count: int) -> list[Numbers]:
    """Return all ordered pairs of so many GPUs, each GPU once in a round: the first few already go everywhere."""
    return [(gpu, (gpu + distance) % count) for distance in range(1, count) for gpu in range(count)]


def is_between(pair: Numbers, nodes: Sequence[int]) -> bool:
    """Return whether the two GPUs are on different NUMA nodes, of which the firmware tells both."""
    source, destination = (nodes[gpu] if gpu < len(nodes) else -1 for gpu in pair)
    return source >= 0 and destination >= 0 and source != destination


def try_pairs(
    count: int,
    nodes: Sequence[int],
    environment: Mapping[str, str],
    deadline: float,
    say: Callable[[str], None],
    program: Sequence[str] = _PROGRAM,
) -> Tried:
    """Try all pairs of so many GPUs; what moves nothing for `deadline` seconds is killed. OSError if none can start.

    Those of one node come first, and stay untried for no pair between nodes (`nodes`: each GPU's).
    """
    tried = Tried()
    order = in_rounds(count)
    for left in ([pair for pair in order if is_between(pair, nodes) == between] for between in (False, True)):
        why = _try(left, tried, environment, deadline, say, program)
        tried.pairs += [Pair(*numbers, State.UNTRIED, why) for numbers in left if why]
    return tried


def _try(
    left: list[Numbers],
    tried: Tried,
    environment: Mapping[str, str],
    deadline: float,
    say: Callable[[str], None],
    program: Sequence[str],
) -> str:
    """Try these pairs, and take out of `left` what was tried; return why the others were not, empty where all were."""
    if any(pair.state is State.UNTRIED for pair in tried.pairs):
        return tried.pairs[-1].detail
    ended = 0
    while left:
        if ended == ENOUGH or tried.survivors:
            return "others had failed"
        command = [*program, json.dumps(left)]
        with started([Program("the copying process", command, environment)]) as children:
            watch = _Watch(children, deadline, say)
            why = watch.follow()
        tried.pairs += watch.pairs
        tried.no_kernel = tried.no_kernel or watch.no_kernel
        tried.survivors += children.survivors
        del left[: len(watch.pairs)]
        if why is None:
            break
        if watch.under_way is None:  # it never came to a pair, and would not the next time
            return why[1]
        ended += 1
        tried.pairs.append(Pair(*watch.under_way, *why))
        del left[0]
    return ""


class _Watch:
    """Follows one child through its pairs."""

    def __init__(self, children: Children, deadline: float, say: Callable[[str], None]) -> None:
        self._children = children
        self._deadline = deadline
        self._say = say
        self._step = LOADING
        self.under_way: Numbers | None = None
        self.pairs: list[Pair] = []
        self.no_kernel: str | None = None

    def follow(self) -> tuple[State, str] | None:
        """Return why it did not come to the end of its pairs, None if it did."""
        while True:
            limit = LOADING_SECONDS if self._step == LOADING else self._deadline
            said = self._children.next(limit)
            if said is None:
                return State.HUNG, f"{self._step}: nothing moved for {limit:.0f} s"
            message = said.message
            if message is None:
                how = self._children.failed_how(said.child)
                return (State.FAILED, f"{self._step}: {how}") if how else None
            if "no_kernel" in message:
                self.no_kernel = message["no_kernel"]
            elif "step" in message:
                self._step = message["step"]
                self.under_way = _numbers(message.get("pair"))
                if self.under_way is None:
                    self._say(self._step)
            else:
                self._settle(message["pair"], message)

    def _settle(self, numbers: Sequence[int], came: Mapping[str, object]) -> None:
        wrong, rate = came["wrong"], came["gb_per_s"]
        state = State.WRONG if wrong else State.WORKS if came["offered"] else State.NOT_OFFERED
        pair = Pair(numbers[0], numbers[1], state, str(wrong or ""), rate if isinstance(rate, float) else None)
        self.pairs.append(pair)
        self.under_way = None


def _numbers(pair: Sequence[int] | None) -> Numbers | None:
    return (pair[0], pair[1]) if pair else None
