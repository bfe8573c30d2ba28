"""What the proof came to: one verdict, the tables, and JSON. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from aerie.fabric import pairs
from aerie.fabric.all_reduce import Reduction
from aerie.fabric.pairs import Pair, Tried
from aerie.fabric.sizes import COPIES, REDUCTIONS, words_of

SCHEMA = 1
_LARGE, _SMALL = REDUCTIONS[-1], REDUCTIONS[0]
_DEAD = frozenset({pairs.State.WRONG, pairs.State.HUNG, pairs.State.FAILED})
_CELLS = {
    pairs.State.NOT_OFFERED: "host",
    pairs.State.WRONG: "WRONG",
    pairs.State.HUNG: "HUNG",
    pairs.State.FAILED: "FAILED",
    pairs.State.UNTRIED: "?",
}
_TOLD = 8  # pairs told one by one
P2P_LEVEL = "NCCL_P2P_LEVEL"
WITHIN_NODES = "PHB"
"""Of NCCL's levels the last that stays within a NUMA node (NCCL user guide, NCCL_P2P_LEVEL)."""


class Verdict(StrEnum):
    """In one word."""

    WORKS = "works"
    LIMITED = "limited"
    """Peer traffic arrives within NUMA nodes and not between them, and NCCL keeps off what is dead."""
    DEAD = "dead"
    """Peer traffic does not arrive, and what goes through the host's memory does."""
    FAILED = "failed"
    """Nothing works, or nothing could be found out: also without peer traffic no service would start."""
    UNPROVEN = "unproven"
    """Nothing was tried."""


@dataclass(frozen=True)
class Gpu:
    """One that took part."""

    name: str
    address: str
    """On the PCI bus."""
    node: int = -1
    """Its NUMA node; -1 where the firmware does not say."""


@dataclass
class Report:
    """All that was found. `untried` says why nothing was tried."""

    backend: str
    gpus: Sequence[Gpu] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    """The NCCL variables that were in force."""
    tried: Tried | None = None
    peer: Reduction | None = None
    """With peer traffic, where NCCL finds it."""
    fallback: Reduction | None = None
    """With NCCL_P2P_DISABLE=1: through the host's memory."""
    untried: str = ""
    seconds: float = 0.0

    @property
    def dead(self) -> list[Pair]:
        """Pairs whose bytes do not arrive."""
        return [pair for pair in self.tried.pairs if pair.state in _DEAD] if self.tried else []

    @property
    def is_limited(self) -> bool:
        """Whether all pairs of one NUMA node work, of which there are some, and some between nodes do not."""
        states = {True: set[pairs.State](), False: set[pairs.State]()}
        nodes = [gpu.node for gpu in self.gpus]
        for pair in self.tried.pairs if self.tried else ():
            states[pairs.is_between(pair.numbers, nodes)].add(pair.state)
        return states[False] == {pairs.State.WORKS} and bool(states[True] - {pairs.State.WORKS})

    @property
    def verdict(self) -> Verdict:
        """What it all comes to."""
        return self._judged[0]

    @property
    def why(self) -> str:
        """The verdict in a sentence."""
        return self._judged[1]

    @property
    def peer_to_peer(self) -> str:
        """Whether peer traffic between GPUs works, is limited, dead or unproven: what an engine is to be told."""
        if self.backend != "nccl" or self.verdict not in {Verdict.WORKS, Verdict.LIMITED, Verdict.DEAD}:
            return Verdict.UNPROVEN.value
        return self.verdict.value

    @property
    def price(self) -> dict[str, float] | None:
        """What the fallback costs, measured: None where not both ways work here."""
        if not (self.peer and self.peer.works and self.fallback and self.fallback.works):
            return None
        return {
            "bytes": _LARGE,
            "peer_gb_per_s": round(self.peer.gb_per_s(_LARGE), 2),
            "fallback_gb_per_s": round(self.fallback.gb_per_s(_LARGE), 2),
            "ratio": round(self.peer.seconds[_LARGE] / self.fallback.seconds[_LARGE], 3),
            "small_bytes": _SMALL,
            "peer_us": round(self.peer.seconds[_SMALL] * 1e6, 1),
            "fallback_us": round(self.fallback.seconds[_SMALL] * 1e6, 1),
        }

    @property
    def _judged(self) -> tuple[Verdict, str]:
        if self.untried or self.peer is None:
            return Verdict.UNPROVEN, self.untried or "it was interrupted"
        if self.backend != "nccl":
            if not self.peer.works:
                return Verdict.FAILED, self.peer.detail
            return Verdict.WORKS, f"{self.peer.ranks} processes reduced on a CPU, which proves nothing about GPUs"
        return self._judged_on_gpus(self.peer, self.tried.pairs if self.tried else [])

    def _judged_on_gpus(self, peer: Reduction, tried: Sequence[Pair]) -> tuple[Verdict, str]:
        counted = f"{len(tried)} pairs of {len(self.gpus)} GPUs"
        not_offered = [pair for pair in tried if pair.state is pairs.State.NOT_OFFERED]
        if all(pair.state is pairs.State.WORKS for pair in tried) and peer.works:
            return Verdict.WORKS, f"bytes arrive between all {counted}, and NCCL reduces over all of them"
        if self.dead:
            first = self.dead[0]
            which = f"{first.source} to {first.destination} ({first.detail})"
            told = f"{len(self.dead)} of {counted} are dead, the first {which}"
        elif not_offered:
            told = f"the driver offers no peer access between {len(not_offered)} of {counted}"
        elif untried := [pair for pair in tried if pair.state is not pairs.State.WORKS]:
            return Verdict.FAILED, f"none of {counted} could be tried: {untried[0].detail}"
        else:
            told = f"bytes arrive between all {counted}, but NCCL's all-reduce does not work: {peer.detail}"
        if self.is_limited and peer.works:
            return Verdict.LIMITED, (
                f"peer traffic works within each NUMA node and not between them: {told}; NCCL reduces over all GPUs "
                f"with {P2P_LEVEL}={self.environment.get(P2P_LEVEL, WITHIN_NODES)}, which keeps off it there"
            )
        if self.fallback is None and peer.works:
            return Verdict.DEAD, f"peer traffic is dead: {told}"
        if self.fallback is None or not self.fallback.works:
            also = f"; without peer traffic neither: {self.fallback.detail}" if self.fallback else ""
            return Verdict.FAILED, told + also
        return (
            Verdict.DEAD,
            f"peer traffic is dead: {told}; the fallback works, {self._fallback_figures(self.fallback)}",
        )

    def _fallback_figures(self, fallback: Reduction) -> str:
        figure = f"at {fallback.gb_per_s(_LARGE):.1f} GB/s"
        price = self.price
        return f"{figure} against {price['peer_gb_per_s']:.1f}" if price else figure

    def to_json(self) -> dict[str, Any]:
        """Return the report as it is written."""
        return {
            "schema": SCHEMA,
            "verdict": self.verdict.value,
            "peer_to_peer": self.peer_to_peer,
            "why": self.why,
            "backend": self.backend,
            "gpus": [
                {"number": number, "name": gpu.name, "address": gpu.address, "node": gpu.node}
                for number, gpu in enumerate(self.gpus)
            ],
            "pairs": [
                {
                    "from": pair.source,
                    "to": pair.destination,
                    "state": pair.state.value,
                    "detail": pair.detail,
                    "gb_per_s": pair.gb_per_s,
                }
                for pair in (self.tried.pairs if self.tried else ())
            ],
            "no_kernel": self.tried.no_kernel if self.tried else None,
            "all_reduce": {"peer": _json_of(self.peer), "fallback": _json_of(self.fallback)},
            "price": self.price,
            "environment": dict(self.environment),
            "survivors": [str(each) for each in self.survivors],
            "seconds": round(self.seconds, 1),
        }

    @property
    def survivors(self) -> list[Any]:
        """Processes that SIGKILL did not end."""
        return [each for part in (self.tried, self.peer, self.fallback) if part for each in part.survivors]


def lines_of(report: Report) -> Iterator[str]:
    """Yield the tables and the verdict, for people."""
    if report.tried:
        yield from _pair_lines(report.tried, len(report.gpus))
    if report.peer:
        yield from _reduction_lines(report)
    for each in report.survivors:
        yield f"SIGKILL does not end {each}: a driver holds it; restart the host before anything else uses these GPUs"
    words = {Verdict.FAILED: "FAILED", Verdict.DEAD: "DEAD", Verdict.LIMITED: "LIMITED"}
    yield f"{words.get(report.verdict, report.verdict.value)}: {report.why}"
    if report.price:
        yield f"  without peer traffic: {price_in_words(report.price)}"
    if report.peer_to_peer == Verdict.LIMITED:
        yield "  Mend the path (ACS and IOMMU first: role pcie_fabric), or serve without it, by this in engine.env:"
        yield f"  {P2P_LEVEL}={WITHIN_NODES}."
    if report.peer_to_peer == Verdict.DEAD:
        yield "  Mend the path (ACS and IOMMU first: role pcie_fabric), or serve without it, by both of them:"
        yield "  NCCL_P2P_DISABLE=1 in engine.env, and disable-custom-all-reduce: true in the engine's configuration."
        yield "  The first alone hangs later."


def price_in_words(price: Mapping[str, float]) -> str:
    """Say what the fallback costs."""
    return (
        f"{words_of(int(price['bytes']))} are reduced at {price['fallback_gb_per_s']:.1f} GB/s against "
        f"{price['peer_gb_per_s']:.1f} ({price['ratio']:.2f}), {words_of(int(price['small_bytes']))} in "
        f"{price['fallback_us']:.0f} us against {price['peer_us']:.0f}"
    )


def _pair_lines(tried: Tried, count: int) -> Iterator[str]:
    by = {pair.numbers: pair for pair in tried.pairs}
    yield f"Copies of {words_of(COPIES[-1])} from the GPU of the row to that of the column, in GB/s"
    yield "      " + "".join(f"{number:>8}" for number in range(count))
    for source in range(count):
        cells = (_cell(by.get((source, destination))) for destination in range(count))
        yield f"{source:>6}" + "".join(f"{cell:>8}" for cell in cells)
    told = [pair for pair in tried.pairs if pair.state in _DEAD]
    for pair in told[:_TOLD]:
        yield f"  {pair.source} to {pair.destination} {pair.state.value}: {pair.detail}"
    if len(told) > _TOLD:
        yield f"  and {len(told) - _TOLD} more"
    if any(pair.state is pairs.State.NOT_OFFERED for pair in tried.pairs):
        yield "  host: the driver offers no peer access, and the bytes went through the host's memory"
    if untried := [pair for pair in tried.pairs if pair.state is pairs.State.UNTRIED]:
        yield f"  ?: {len(untried)} were not tried: {untried[0].detail}"
    if tried.no_kernel:
        yield f"  by the copy engine alone, not by a kernel: {tried.no_kernel}"


def _cell(pair: Pair | None) -> str:
    if pair is None:
        return "-"
    if pair.state is pairs.State.WORKS and pair.gb_per_s is not None:
        return f"{pair.gb_per_s:.1f}"
    return _CELLS.get(pair.state, pair.state.value)


def _reduction_lines(report: Report) -> Iterator[str]:
    ways = [("with peer traffic", report.peer), ("through the host's memory", report.fallback)]
    if report.backend != "nccl":
        ways = [("on a CPU", report.peer)]
    for way, reduction in ways:
        if reduction is None:
            continue
        heading = f"All-reduce by {reduction.backend} over {reduction.ranks} ranks, {way}"
        if not reduction.works:
            yield f"{heading}: {reduction.state.value.upper()}: {reduction.detail}"
            continue
        yield heading
        for size, seconds in reduction.seconds.items():
            yield f"  {words_of(size):>8} {seconds * 1e6:>10.0f} us {reduction.gb_per_s(size):>8.2f} GB/s on the bus"


def _json_of(reduction: Reduction | None) -> dict[str, Any] | None:
    if reduction is None:
        return None
    return {
        "state": reduction.state.value,
        "detail": reduction.detail,
        "ranks": reduction.ranks,
        "sizes": [
            {"bytes": size, "seconds": seconds, "gb_per_s": round(reduction.gb_per_s(size), 3)}
            for size, seconds in reduction.seconds.items()
        ],
    }
