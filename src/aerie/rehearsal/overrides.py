"""What the rehearsal's engine is told in place of the operator's own arguments, each with the reason.

What is overridden is taken out of the operator's words and out of a copy of their file: of an option that stays in
another spelling, vLLM's parser would take that one, or refuse both.
"""

import json
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from aerie.checkpoint.shrink import Profile
from aerie.engine_arguments import is_one_of, read_command_line, read_config_file, spelled, without
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

_ALSO = {"speculative-config": ("spec-method", "spec-model", "spec-tokens")}
"""Options that say the same as another, or a part of it."""
_FILE = "serve.yaml"

_CPU = "there is no GPU"
_ONE_RANK = "there is one rank"
_BESIDE = "a service has the rest of the memory"
_ADDRESS = "the service's own is not touched"
_ORDINARY = "the shrunken pair is an ordinary checkpoint"
_SMALLER = "it is for larger steps"

# Values of load-format (model_executor/model_loader/__init__.py); one that is not known is left to vLLM.
_READS_ANOTHER_FORM = frozenset({
    "dummy", "mistral", "npcache", "pt", "runai_streamer_sharded", "sharded_state", "tensorizer",
})  # fmt: skip
_READS_ON_GPUS = frozenset({"fastsafetensors", "instanttensor", "ipc_cache", "modelexpress", "runai_streamer"})
# On a CPU vLLM does not look at attention-backend, but at the name that it holds: that stays.
_OF_GPUS = (
    "kernel-config", "moe-backend", "linear-backend", "quantization", "quantization-config",
    "kv-cache-dtype-skip-layers", "mm-encoder-attn-backend", "mm-encoder-attn-dtype", "device-ids", "numa-bind",
    "numa-bind-nodes", "numa-bind-cpus", "enable-cumem-allocator", "cpu-offload-gb", "offload-backend",
    "kv-offloading-size", "kv-cache-memory-bytes", "num-gpu-blocks-override",
)  # fmt: skip
"""What only GPUs have, or their memory and kernels alone; the shrunken pair for a CPU is not quantised, either."""
_OF_RANKS = (
    "distributed-executor-backend", "nnodes", "node-rank", "prefill-context-parallel-size",
    "dcp-kv-cache-interleave-size", "cp-kv-cache-interleave-size", "dcp-comm-backend", "dcp-q-replicate",
    "data-parallel-rank", "data-parallel-start-rank", "data-parallel-size-local", "data-parallel-backend",
    "data-parallel-hybrid-lb", "data-parallel-external-lb", "data-parallel-multi-port-external-lb",
    "enable-expert-parallel", "enable-eplb", "eplb-config", "enable-elastic-ep", "all2all-backend", "enable-dbo",
)  # fmt: skip
_OF_SPECULATION = frozenset({"draft_tensor_parallel_size", "kv_cache_dtype", "moe_backend", "quantization"})
_OF_SIZES = ("max-num-active-seqs", "max-num-scheduled-tokens", "long-prefill-token-threshold")
"""Limits that vLLM refuses above those of sequences, steps and requests."""
_CAPTURED = ("cudagraph-capture-sizes", "max-cudagraph-capture-size")


@dataclass(frozen=True)
class Override:
    """One argument that is not the operator's: `given` is theirs, None where they left it to vLLM.

    `here` is None where it is left out.
    """

    argument: str
    given: Any
    here: Any
    why: str

    @property
    def words(self) -> list[str]:
        """It as vLLM's parser takes it."""
        match self.here:
            case None:
                return []
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
        dropped = _OF_SPECULATION & options.keys() if profile is Profile.CPU else set()
        here = {name: value for name, value in options.items() if name not in dropped} | {"model": str(drafter)}
        why = f"the shrunken drafter, and {_CPU}" if dropped else "the shrunken drafter"
        yield Override("speculative-config", options, here, why)
    load_format = (settings.text("load-format") or "").lower()
    is_for_gpus = profile is Profile.CPU and load_format in _READS_ON_GPUS
    if is_for_gpus or load_format in _READS_ANOTHER_FORM:
        why = _CPU if is_for_gpus else _ORDINARY
        yield from _left_out(settings, ("load-format", "model-loader-extra-config"), why)
    if profile is Profile.CPU:
        yield from _on_a_cpu(settings, longest)
    elif beside:
        yield from _beside(settings, longest, beside)


def engine_words(words: Sequence[str], target: Path, changed: Sequence[Override], folder: Path) -> list[str]:
    """Return the words for `vllm serve`: the shrunken target, what stays of the operator's, and the overrides.

    What stays of a --config file is written to `folder`. Raises ConfigurationError where that cannot be read, OSError
    where it cannot be written.
    """
    dropped = {"model", "config"}
    for override in changed:
        dropped |= {override.argument, *_ALSO.get(override.argument, ())}
    given = without(words, dropped)
    if file := read_command_line(words).get("config"):
        given = ["--config", str(_write_config(file, dropped, folder)), *given]
    return [str(target), *given, *(word for override in changed for word in override.words)]


def _write_config(file: str, dropped: Collection[str], folder: Path) -> Path:
    kept = {key: value for key, value in read_config_file(file).items() if not is_one_of(key, dropped)}
    place = folder / _FILE
    place.write_text(yaml.safe_dump(kept, sort_keys=False), encoding="utf-8")
    return place


def _left_out(settings: Settings, options: Sequence[str], why: str) -> Iterator[Override]:
    for option in options:
        if name := spelled(option, settings.given):
            given = settings.given[name]
            yield Override(option, True if given is None else given, None, why)


def _on_a_cpu(settings: Settings, longest: int) -> Iterator[Override]:
    for name, ranks in (
        ("tensor-parallel-size", settings.tensor_parallel),
        ("pipeline-parallel-size", settings.pipeline_parallel),
        ("decode-context-parallel-size", settings.context_parallel),
        ("data-parallel-size", settings.data_parallel),
    ):
        if ranks != 1:
            yield Override(name, ranks, 1, _ONE_RANK)
    if settings.kv_dtype != "auto":
        yield Override("kv-cache-dtype", settings.kv_dtype, "auto", _CPU)
    yield from _left_out(settings, _OF_RANKS, _ONE_RANK)
    yield from _left_out(settings, _OF_GPUS, _CPU)
    yield from _left_out(settings, _OF_SIZES, _SMALLER)
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
    yield from _left_out(settings, _OF_SIZES, _SMALLER)
    # With a size for the cache of its own, vLLM would not look at its share; graphs are part of that.
    yield from _left_out(settings, ("kv-cache-memory-bytes", "num-gpu-blocks-override", *_CAPTURED), _BESIDE)
    captured = {option.replace("-", "_") for option in _CAPTURED}
    if not captured.isdisjoint(settings.compilation):
        without_them = {name: value for name, value in settings.compilation.items() if name not in captured}
        yield Override("compilation-config", dict(settings.compilation), without_them, _BESIDE)
