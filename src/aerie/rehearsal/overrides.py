"""What the rehearsal's engine is told over the operator's own arguments, each with the reason. Pure.

vLLM's parser takes the last of an option that is given twice, so overrides stand at the end.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aerie.checkpoint.shrink import Profile
from aerie.rehearsal.static.hardware import GIB, Hardware
from aerie.rehearsal.static.settings import Settings

_CPU_LONGEST = 2048  # tokens: a CPU reads a prompt of that length in seconds
_CPU_SEQUENCES = 16
# Beside a service, in what its own gpu-memory-utilization leaves free.
BESIDE_NEEDS = 8 * GIB
"""Bytes that must be free on every GPU."""
_BESIDE_TAKES = 7 * GIB
_BESIDE_LONGEST = 8192
_BESIDE_SEQUENCES = 4
_BESIDE_STEP = 2048

_CPU = "there is no GPU"
_BESIDE = "a service has the rest of the memory"
_ADDRESS = "the service's own is not touched"


@dataclass(frozen=True)
class Override:
    """One argument that is not the operator's: `given` is theirs, None where they left it to vLLM."""

    argument: str
    given: Any
    here: Any
    why: str

    @property
    def words(self) -> list[str]:
        """It as vLLM's parser takes it."""
        match self.here:
            case bool():
                return [f"--{self.argument}" if self.here else f"--no-{self.argument}"]
            case dict():
                return [f"--{self.argument}", json.dumps(self.here)]
            case _:
                return [f"--{self.argument}", str(self.here)]


def overrides(
    settings: Settings,
    drafter: Path | None,
    port: int,
    longest: int,
    profile: Profile,
    beside: Hardware | None,
) -> Iterator[Override]:
    """Yield what is to be told differently.

    `drafter` is the shrunken one, `longest` the longest request in tokens that is asked for; `beside` is the hardware
    where a service runs on it.
    """
    yield Override("host", settings.text("host"), "127.0.0.1", _ADDRESS)
    yield Override("port", settings.text("port"), port, _ADDRESS)
    if settings.text("shutdown-timeout") is not None:
        yield Override("shutdown-timeout", settings.text("shutdown-timeout"), 10, "nobody waits for answers here")
    if settings.speculation and drafter:
        options = {**settings.speculation.options}
        yield Override("speculative-config", options, options | {"model": str(drafter)}, "the shrunken drafter")
    if profile is Profile.CPU:
        yield from _on_a_cpu(settings, longest)
    elif beside:
        yield from _beside(settings, longest, beside)


def engine_words(words: Sequence[str], target: Path, changed: Sequence[Override]) -> list[str]:
    """Return the words for `vllm serve`: the shrunken target, what the operator gave, and the overrides."""
    given = list(words)
    while given and not given[0].startswith("-"):
        given.pop(0)  # the model's place
    return [str(target), *given, *(word for override in changed for word in override.words)]


def _on_a_cpu(settings: Settings, longest: int) -> Iterator[Override]:
    for name, ranks in (
        ("tensor-parallel-size", settings.tensor_parallel),
        ("pipeline-parallel-size", settings.pipeline_parallel),
        ("decode-context-parallel-size", settings.context_parallel),
        ("data-parallel-size", settings.data_parallel),
    ):
        if ranks != 1:
            yield Override(name, ranks, 1, _CPU)
    if settings.kv_dtype != "auto":
        yield Override("kv-cache-dtype", settings.kv_dtype, "auto", _CPU)
    if settings.text("load-format") not in {None, "auto", "safetensors"}:
        yield Override("load-format", settings.text("load-format"), "auto", _CPU)
    if not settings.eager:
        eager = settings.flag("enforce-eager")
        yield Override("enforce-eager", eager, here=True, why="compiling for a CPU proves nothing")
    shorter = min(longest, _CPU_LONGEST)
    if shorter != longest or settings.longest is None:
        yield Override("max-model-len", settings.text("max-model-len"), shorter, "a CPU is slow")
    if settings.step_tokens != shorter:
        given = settings.text("max-num-batched-tokens")
        yield Override("max-num-batched-tokens", given, shorter, "with MLA a CPU takes prompts whole")
    if settings.sequences > _CPU_SEQUENCES:
        yield Override("max-num-seqs", settings.text("max-num-seqs"), _CPU_SEQUENCES, "a CPU is slow")


def _beside(settings: Settings, longest: int, hardware: Hardware) -> Iterator[Override]:
    share = round(_BESIDE_TAKES / hardware.memory, 3)
    yield Override("gpu-memory-utilization", settings.utilization, share, _BESIDE)
    for name, given, here in (
        ("max-model-len", longest, _BESIDE_LONGEST),
        ("max-num-seqs", settings.sequences, _BESIDE_SEQUENCES),
        ("max-num-batched-tokens", settings.step_tokens, _BESIDE_STEP),
    ):
        if given > here:
            yield Override(name, given, here, _BESIDE)
