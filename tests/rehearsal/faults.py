"""The faults that the rehearsal must find before a load, each with what it must say."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pairs import change, cut, reshape, rewrite

from aerie.checkpoint.tiny.tokenizer import write_tiktoken_form

if TYPE_CHECKING:
    from collections.abc import Callable

    from pairs import Pair


@dataclass(frozen=True)
class Fault:
    """What is planted, which check finds it, and decisive parts of its text and of what it says to do."""

    name: str
    check: str
    text: str
    remedy: str
    plant: Callable[[Pair], object] = lambda _: None
    """Changes a copy of the pair that is whole."""
    arguments: tuple[str, ...] = ()
    """For vLLM, after those of the configuration."""
    options: tuple[str, ...] = ()
    """For `aerie rehearse`."""
    weights: bool = False
    """Whether it is in the headers of weights, which take seconds to read."""
    verdict: str = "failed"
    without: str | None = None
    """The patch that this vLLM lacks."""

    def __str__(self) -> str:
        return self.name


def _drafter(**fields: Any) -> Callable[[Pair], None]:
    return lambda pair: change(pair.drafter, **fields)


def _aux_layers(*ids: int) -> Callable[[Pair], None]:
    return _drafter(eagle_config={"eagle_aux_hidden_state_layer_ids": ids, "use_aux_hidden_state": True})


def _another_tokenizer(pair: Pair) -> None:
    for name in ("tiktoken.model", "tokenizer_config.json", "tokenization_kimi.py", "chat_template.jinja"):
        (pair.target / name).unlink()
    write_tiktoken_form(pair.target)


def _rename_drafter(pair: Pair) -> None:
    pair.drafter = pair.drafter.rename(pair.drafter.with_name("kimi-k2.6-eagle3-mla"))


FOLDER = "{folder}"
"""In arguments: where the container sees the folder of the changed pair."""
SHARD = "model-00007-of-000064.safetensors"
FULL_GRAPHS = ("--decode-context-parallel-size", "8", "--gpu-memory-utilization", "0.9", "--compilation-config",
               json.dumps({"cudagraph_mode": "FULL"}))  # fmt: skip
STAGES = ("--tensor-parallel-size", "4", "--pipeline-parallel-size", "2")

STATIC = [
    Fault("drafter of another generation", "drafter generation", "for Kimi-K2.6 and the target is a Kimi-K2.5",
          "trained on this target", _rename_drafter),
    Fault("drafter of another generation, accepted", "drafter generation", "(accepted with --accept)",
          "trained on this target", _rename_drafter, options=("--accept", "drafter generation"),
          verdict="warned"),
    Fault("drafter for a target of 4096 elements", "drafter hidden size", "states of 4096 elements, and the target's",
          "trained on this target", _drafter(hidden_size=4096)),
    Fault("auxiliary layer 70 of 61", "auxiliary layers", "layer 70 of 61", "correct them", _aux_layers(2, 30, 70)),
    Fault("auxiliary layers twice", "auxiliary layers", "occurs twice in [2, 30, 30]", "name each layer once",
          _aux_layers(2, 30, 30)),
    Fault("auxiliary layers not ascending", "auxiliary layers", "[58, 30, 2] is not in ascending order", "sort them",
          _aux_layers(58, 30, 2)),
    Fault("truncated shard", "target files", f"{SHARD} is cut off: 9,809,076,579 bytes of 9,809,077,579",
          f"fetch {SHARD} again", lambda pair: cut(pair.target / SHARD, 1000), weights=True),
    Fault("missing shard", "target files", f"1 of 64 shards are missing: {SHARD}", "fetch them",
          lambda pair: (pair.target / SHARD).unlink(), weights=True),
    Fault("wrong shape in a header", "target tensors",
          f"o_proj.weight in {SHARD} has the shape [8192, 7168], and config.json asks for [7168, 8192]",
          "from the same one",
          lambda pair: reshape(pair.target / SHARD, "language_model.model.layers.6.self_attn.o_proj.weight"),
          weights=True),
    Fault("tokenizer of another model", "tokenizer", "vocab_size is 163,840: it is another model's",
          "from one and the same revision", _another_tokenizer),
    Fault("no chat template", "chat template", "has no chat_template.jinja", "fetch chat_template.jinja",
          lambda pair: (pair.target / "chat_template.jinja").unlink()),
    Fault("ranks that do not divide the heads", "parallelism", "tensor-parallel-size 6 does not divide the target's 64",
          "one of 1, 2, 4, 8", arguments=("--tensor-parallel-size", "6"), options=("--chip", "sm_90")),
    Fault("requests longer than the KV cache", "memory", "one request of 262,144 tokens takes", "set max-model-len to",
          arguments=("--max-model-len", "262144")),
    Fault("KV cache of a type without kernels", "KV cache type", "kv-cache-dtype fp8_e5m2 is none that MLA has",
          "bfloat16", arguments=("--kv-cache-dtype", "fp8_e5m2")),
    Fault("full graphs with speculation and DCP", "decode context parallelism", "vLLM takes piecewise ones instead",
          "cudagraph_mode: PIECEWISE", arguments=FULL_GRAPHS, verdict="warned"),
    Fault("pipeline stages without async scheduling", "pipeline stages", "hangs at the first request",
          "take async-scheduling: false out", arguments=(*STAGES, "--no-async-scheduling")),
    Fault("no statistics", "arguments", "--disable-log-stats is refused", "change the --config file",
          arguments=("--disable-log-stats",)),
    Fault("bad YAML", "arguments", "bad.yaml is not YAML", "change the --config file",
          lambda pair: rewrite(pair.target.parent / "bad.yaml", "model: [Kimi-K2.5\nport: 8000\n"),
          arguments=("--config", f"{FOLDER}/bad.yaml")),
]  # fmt: skip

# What is no fault, and looks like one.
VALID = Fault("auxiliary layers 0 and 61 of 61", "auxiliary layers", "the inputs of layers 0, 30, 61", "",
              _aux_layers(0, 30, 61), verdict="passed")  # fmt: skip

# In an image whose series is shorter.
WITHOUT_A_PATCH = [
    Fault("nested auxiliary layers ignored", "auxiliary layers",
          "does not look into eagle_config for 4, 30, 58, and gives the drafter 2, 30, 58",
          "the patch eagle3-aux-layer-ids", _aux_layers(4, 30, 58), without="eagle3-aux-layer-ids"),
    Fault("full graphs with speculation and DCP, unpatched", "decode context parallelism",
          "the capture after the load asserts so", "cudagraph_mode: PIECEWISE", arguments=FULL_GRAPHS,
          without="dcp-graphs-of-verification"),
    Fault("pipeline stages with speculation, unpatched", "pipeline stages", "does not hand auxiliary states",
          "the patch eagle3-over-pp", arguments=STAGES, without="eagle3-over-pp"),
    Fault("FP8 cache on sm_120, unpatched", "KV cache type", "needs more shared memory than sm_120 has",
          "kv-cache-dtype to bfloat16", arguments=("--kv-cache-dtype", "fp8"),
          without="decode-fp8-kv-fits-sm120"),
]  # fmt: skip

# The record names the patch, so only the compiler knows.
COMPILED = Fault(
    "FP8 cache on sm_120, compiled unpatched", "decode kernel", "and a block of sm_120 has 101,376",
    "kv-cache-dtype to bfloat16", arguments=("--kv-cache-dtype", "fp8"), options=("--accept", "patches"),
    without="decode-fp8-kv-fits-sm120",
)  # fmt: skip

STARTED = [
    Fault("unknown argument of vLLM", "start", "vLLM does not know an option", "Correct what the line names",
          arguments=("--no-such-argument", "5")),
    Fault("unknown tool parser", "start", "vLLM does not know the tool parser", "Set `tool-call-parser: kimi_k2`",
          arguments=("--tool-call-parser", "kimi_k9")),
    Fault("unknown reasoning parser", "start", "vLLM does not know the reasoning parser",
          "Set `reasoning-parser: kimi_k2`", arguments=("--reasoning-parser", "kimi_k9")),
]  # fmt: skip
