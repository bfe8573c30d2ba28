"""What is measured: which checkpoints, which loaders, cold and warm, on how many ranks, in which order."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import checkpoint

MULTITHREAD = {"model_loader_extra_config": {"enable_multithread_load": True, "num_threads": 8}}
LOADERS: dict[str, dict[str, Any]] = {
    "lazy": {},
    "eager": {"safetensors_load_strategy": "eager"},
    "prefetch": {"safetensors_load_strategy": "prefetch"},
    "multithread": MULTITHREAD,
    "runai_streamer": {"load_format": "runai_streamer"},
    "fastsafetensors": {"load_format": "fastsafetensors"},
    "instanttensor": {"load_format": "instanttensor"},
    "sharded_state": {"load_format": "sharded_state"},
    "warm beside": {},
    "warm first": {},
}
"""Arguments of `vllm serve` for each. The last two are `aerie model warm` with vLLM's default loader: begun with it, or
done before it (its time counted)."""
WARMED = ("warm beside", "warm first")
SAVED = "sharded_state"
DISK = "disk"


@dataclass(frozen=True)
class Set:
    """A checkpoint to write."""

    name: str
    size: int
    widths: checkpoint.Widths
    int4: bool = False


@dataclass(frozen=True)
class Part:
    """Every loader from cold, and from a page cache that has it all."""

    set: Set
    ranks: int
    loaders: tuple[str, ...]
    states: tuple[str, ...] = ("cold", "warm")
    repeats: int = 2


@dataclass(frozen=True)
class Run:
    """One measurement; `repeat` counts from 0."""

    set: Set
    ranks: int
    loader: str
    state: str
    repeat: int

    @property
    def key(self) -> str:
        """A name that is the same in each start of the program."""
        return f"{self.set.name}/{self.loader}/{self.state}/tp{self.ranks}/{self.repeat}"


@dataclass(frozen=True)
class Plan:
    """Parts one after the other."""

    parts: tuple[Part, ...] = field(default_factory=tuple)

    @property
    def runs(self) -> list[Run]:
        """All of them: within a part each repeat has an order of its own, and begins with the disk itself."""
        found = []
        for number, part in enumerate(self.parts):
            for repeat in range(part.repeats):
                runs = [
                    Run(part.set, part.ranks, loader, state, repeat)
                    for loader in part.loaders
                    for state in part.states
                    if state == "cold" or loader not in WARMED
                ]
                random.Random(100 * number + repeat).shuffle(runs)  # noqa: S311 - an order
                if number == 0 or self.parts[number - 1].set != part.set:
                    runs.insert(0, Run(part.set, 0, DISK, "cold", repeat))
                found += runs
        return found


_CPU = ("lazy", "eager", "prefetch", "multithread", "runai_streamer", "warm beside", "warm first")
_GPU = (*_CPU[:5], "fastsafetensors", "instanttensor", "warm beside", "warm first")
BF16_20 = Set("bf16-20", 20_000_000_000, checkpoint.NARROW)
BF16_8 = Set("bf16-8", 8_000_000_000, checkpoint.NARROW)
GPU_BF16 = Set("gpu-bf16-20", 20_000_000_000, checkpoint.REAL)
GPU_INT4 = Set("gpu-int4-10", 10_000_000_000, checkpoint.REAL, int4=True)
TRIAL = Set("trial-1", 1_000_000_000, checkpoint.NARROW._replace(layers=7))
TRIAL_TINY = Set("trial-tiny", 300_000_000, checkpoint.TINY)

PLANS: dict[str, Plan] = {
    # Twenty gigabytes of weights and the same as page cache do not fit beside one another in 24 GiB: no warm state.
    "cpu": Plan(
        (
            Part(BF16_20, 1, _CPU[:4], ("cold",)),
            Part(BF16_20, 2, _CPU[:4], ("cold",), repeats=1),
            Part(BF16_8, 1, _CPU),
            Part(BF16_8, 2, _CPU),
        )
    ),
    "cpu-8": Plan((Part(BF16_8, 1, _CPU), Part(BF16_8, 2, _CPU))),
    "gpu": Plan((Part(GPU_BF16, 1, _GPU),)),
    "gpu-int4": Plan((Part(GPU_INT4, 1, _GPU),)),
    "gpu-sharded": Plan((Part(GPU_BF16, 1, (SAVED, "lazy")),)),
    "quick": Plan((Part(TRIAL, 1, _CPU, repeats=1), Part(TRIAL, 2, _CPU, repeats=1))),
    "tiny": Plan((Part(TRIAL_TINY, 1, (*_GPU, SAVED), repeats=1),)),
}
