"""Will it fit: what one GPU holds, from headers and settings alone, by vLLM 0.32.0's own accounting. Pure.

vLLM measures a budget for the KV cache: a share of the GPU, less the weights and what a profiled step of the largest
size took (v1/worker/gpu_worker.py, determine_available_memory). What it allocates after that has to find room in the
share that it leaves alone, as do the CUDA context and NCCL's buffers.
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache

from aerie.checkpoint.config import Drafter, Target
from aerie.rehearsal.static.hardware import GIB, Hardware
from aerie.rehearsal.static.settings import Settings

_BLOCK = 16
"""Tokens of a block: what both TRITON_MLA and FLASH_ATTN take, and the CPU's MLA."""
_CONTEXT = int(1.5 * GIB)
"""CUDA context and NCCL's buffers of eight ranks; not measured on the host that this is made for."""
_MOST_ROWS_OF_CONTEXT = 65536
"""Of MLA's workspace for the context of a chunked prefill (mla_attention.py)."""
_GRAPHS = int(0.75 * GIB)
"""CUDA graphs of target and drafter up to 512 rows, as vLLM estimates them; 0.63 GiB was seen on an H200."""
_BF16 = 2  # bytes
_FP32 = 4

# Not split over tensor-parallel ranks (deepseek_v2.py, kimi_k25_vit.py, deepseek_eagle3.py, llama_eagle3.py).
_REPLICATED = re.compile(
    r"(q_a_proj|kv_a_proj_with_mqa|norm\d?|gate|pos_emb|fc|d2t|mm_projector\..*|patch_embed\..*)"
    r"(\.weight|\.bias|\.e_score_correction_bias)?$|weight_shape$"
)


@dataclass(frozen=True)
class Term:
    """One part of a GPU's memory in bytes, with the formula that it comes from."""

    name: str
    size: int
    formula: str


@dataclass(frozen=True)
class Plan:
    """One GPU's memory, of the pipeline stage that has least to spare."""

    hardware: Hardware
    settings: Settings
    longest: int
    inside: tuple[Term, ...]
    """Of the share that vLLM takes, all but the KV cache."""
    outside: tuple[Term, ...]
    """Of the share that it leaves alone."""
    token: int
    """Bytes of KV cache a token."""

    @cached_property
    def share(self) -> int:
        """Bytes that vLLM takes."""
        return math.ceil(self.hardware.memory * self.settings.utilization)

    @cached_property
    def cache(self) -> int:
        """Bytes of the KV cache; negative where even the weights do not fit."""
        return self.share - sum(term.size for term in self.inside)

    @cached_property
    def spare(self) -> int:
        """Bytes that are left of the share that vLLM leaves alone."""
        return self.hardware.memory - self.share - sum(term.size for term in self.outside)

    @cached_property
    def _blocks(self) -> tuple[int, int]:
        """How many blocks there are, and how many one longest request takes."""
        there = max(0, self.cache // (_BLOCK * self.token))
        return there, blocks_of(self.longest, self.settings.context_parallel)

    @property
    def tokens(self) -> int:
        """Return the KV cache's size as vLLM reports it (kv_cache_utils.py)."""
        there, needed = self._blocks
        return int(there / needed * self.longest)

    @property
    def concurrency(self) -> float:
        """How many longest requests fit at once."""
        there, needed = self._blocks
        return there / needed

    @property
    def fits(self) -> bool:
        """Whether one longest request does; vLLM sets one block aside."""
        there, needed = self._blocks
        return needed <= there - 1

    @property
    def longest_that_fits(self) -> int:
        """The longest request in tokens that would."""
        there, _ = self._blocks
        return max(0, there - 1) * _BLOCK * self.settings.context_parallel


def blocks_of(tokens: int, context_parallel: int = 1) -> int:
    """Return how many blocks of KV cache a request of so many tokens takes on a rank."""
    return math.ceil(math.ceil(tokens / context_parallel) / _BLOCK)


def plan(
    target: Target,
    drafter: Drafter | None,
    target_sizes: Mapping[str, int],
    drafter_sizes: Mapping[str, int],
    settings: Settings,
    hardware: Hardware,
) -> Plan:
    """Return the memory of a GPU; the sizes are the bytes of each tensor."""
    longest = settings.longest if settings.longest and settings.longest > 0 else target.positions
    tokens = settings.speculation.tokens if settings.speculation else 0
    moe, decode = _moe_workspace(target, settings), _decode_workspace(target, settings, longest, tokens, hardware)
    weights = _weights_of_stages(target, target_sizes, drafter_sizes, settings)
    stage = weights.index(max(weights, key=lambda terms: sum(term.size for term in terms)))
    inside = [
        *weights[stage],
        Term("experts' workspace", moe, "(max(M x k x max(N, H), M x H) + M x k x max(2N, H)) x 2 bytes"),
        Term("activations of a step", _activations(target, settings, longest), "profiled with M tokens"),
        Term("CUDA graphs", 0 if settings.eager or hardware.chip is None else _GRAPHS, "as estimated by vLLM"),
    ]
    outside = [
        Term("CUDA context and NCCL", _CONTEXT, "not measured here"),
        Term("decode workspace", max(0, decode - moe),
             "S x (k + 1) x heads x DCP x splits x (kv_lora + 1) x 4 bytes, less the experts' workspace"),
        Term("context of chunked prefills", _prefill_workspace(target, drafter, settings, longest),
             "min(max(8L, 4S x 16), 65536) rows x (kv_lora + rope) x 2 bytes a user of MLA"),
    ]  # fmt: skip
    token = _target_token(target, settings, stage) + (_drafter_token(drafter, settings) if drafter else 0)
    if hardware.chip is None:
        outside = []
    return Plan(hardware, settings, longest, tuple(inside), tuple(outside), token)


def layers_of_stages(layers: int, stages: int) -> list[int]:
    """Return how many layers each pipeline stage has (vllm/distributed/utils.py, get_pp_indices)."""
    each, more = divmod(layers, stages)
    counts = [each] * stages
    # The last stage has the head, so what is left over goes to those before it.
    for number in range(2, more + 2):
        counts[-number] += 1
    return counts


def _weights_of_stages(
    target: Target, target_sizes: Mapping[str, int], drafter_sizes: Mapping[str, int], settings: Settings
) -> list[list[Term]]:
    ranks, stages = settings.tensor_parallel, settings.pipeline_parallel
    first_layers = [0]
    for count in layers_of_stages(target.layers, stages)[:-1]:
        first_layers.append(first_layers[-1] + count)
    vision_is_whole = settings.text("mm-encoder-tp-mode") == "data" or (
        target.vision is not None and target.vision.heads % ranks != 0
    )
    names = ("routed experts", "other weights", "vision")
    sizes = [dict.fromkeys(names, 0) for _ in range(stages)]
    for name, size in target_sizes.items():
        part = "vision" if name.startswith(("vision_tower", "mm_projector")) else "other weights"
        if part == "vision":
            if settings.flag("language-model-only"):
                continue
            held = size if vision_is_whole or _is_replicated(name) else size // ranks
            for stage in sizes:
                stage[part] += held
            continue
        if ".experts." in name:
            part = "routed experts"
        held = size if _is_replicated(name) else size // ranks
        sizes[_stage_of(name, first_layers)][part] += held
    terms = [
        [
            Term(part, stage[part], "bytes in the headers" + ("" if part == "vision" else " / TP, where split"))
            for part in names
        ]
        for stage in sizes
    ]
    if drafter_sizes:
        held = sum(size if _is_drafter_replicated(name) else size // ranks for name, size in drafter_sizes.items())
        terms[-1].append(Term("drafter", held, "bytes in the headers / TP, where split"))
    return terms


def _stage_of(name: str, first_layers: list[int]) -> int:
    _, _, rest = name.partition("model.layers.")
    if not rest:
        return 0 if "embed_tokens" in name else len(first_layers) - 1
    layer = int(rest.partition(".")[0])
    return max(number for number, first in enumerate(first_layers) if first <= layer)


def _is_replicated(name: str) -> bool:
    return _ends_replicated(name[name.rfind(".", 0, name.rfind(".")) + 1 :]) or name.startswith("mm_projector")


def _is_drafter_replicated(name: str) -> bool:
    return _is_replicated(name)


@lru_cache(maxsize=4096)
def _ends_replicated(end: str) -> bool:
    return _REPLICATED.match(end) is not None


def _target_token(target: Target, settings: Settings, stage: int) -> int:
    attention = target.attention
    layers = layers_of_stages(target.layers, settings.pipeline_parallel)[stage]
    return layers * (attention.kv_lora_rank + attention.rope) * _kv_bytes(settings.kv_dtype)


def _drafter_token(drafter: Drafter, settings: Settings) -> int:
    own = settings.speculation.text("kv_cache_dtype") if settings.speculation else None
    size = _kv_bytes(own or settings.kv_dtype)
    if drafter.is_mla:
        return drafter.layers * (drafter.attention.kv_lora_rank + drafter.attention.rope) * size
    heads = max(1, drafter.kv_heads // settings.tensor_parallel)
    return drafter.layers * heads * 2 * drafter.head_size * size


def _kv_bytes(dtype: str) -> int:
    return 1 if dtype.startswith("fp8") else _FP32 if dtype == "float32" else _BF16


def _moe_workspace(target: Target, settings: Settings) -> int:
    """Return the bytes of the Marlin experts' scratch (modular_kernel.py, marlin_moe.py), which is in the profile."""
    experts, hidden, step = target.experts, target.hidden_size, settings.step_tokens
    width = experts.width if settings.flag("enable-expert-parallel") else experts.width // settings.tensor_parallel
    first = max(step * experts.active * max(width, hidden), step * hidden)
    return (first + step * experts.active * max(2 * width, hidden)) * _BF16


def _decode_workspace(target: Target, settings: Settings, longest: int, drafted: int, hardware: Hardware) -> int:
    """Return the bytes of TRITON_MLA's partial results (triton_mla.py), which are not in the profile."""
    if hardware.chip is None:
        return 0
    splits = min(_power_of_two(max(1, longest // 512)), 2 * hardware.multiprocessors)
    rows = settings.sequences * (1 if settings.context_parallel > 1 else drafted + 1)
    heads = target.attention.heads // settings.tensor_parallel * settings.context_parallel
    return rows * heads * splits * (target.attention.kv_lora_rank + 1) * _FP32


def _prefill_workspace(target: Target, drafter: Drafter | None, settings: Settings, longest: int) -> int:
    rows = min(max(8 * longest, 4 * settings.sequences * _BLOCK), _MOST_ROWS_OF_CONTEXT)
    one = rows * (target.attention.kv_lora_rank + target.attention.rope) * _BF16
    if settings.context_parallel > 1:
        one += one // settings.context_parallel
    return one * (2 if drafter and drafter.is_mla else 1)


def _activations(target: Target, settings: Settings, longest: int) -> int:
    """Return the bytes of a profiled step: what stands side by side in the worst layer, and the sampler's rows."""
    step, hidden, attention = settings.step_tokens, target.hidden_size, target.attention
    heads = attention.heads // settings.tensor_parallel
    residual = (
        4 * step * hidden * _BF16
    )  # the residual, the normalised state, a layer's output, and three aux states' mean
    queries = step * heads * (attention.nope + attention.rope + attention.value) * _BF16
    context = min(max(8 * longest, 4 * settings.sequences * _BLOCK), _MOST_ROWS_OF_CONTEXT)
    imitated = context * heads * (attention.nope + attention.value) * _BF16  # mla_attention.py, while profiling
    states = 3 * step * hidden * _BF16 if settings.speculation else 0
    logits = settings.sequences * target.vocabulary * (_BF16 + _FP32)
    return residual + queries + imitated + states + logits + _vision_step(target, settings)


def _vision_step(target: Target, settings: Settings) -> int:
    """Return the bytes of the encoder over as many patches as one step's tokens stand for."""
    if target.vision is None or settings.flag("language-model-only"):
        return 0
    patches = settings.step_tokens * target.vision.merge[0] * target.vision.merge[1]
    return patches * (4 * target.vision.width + 2 * target.vision.mlp_width) * _BF16


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


def total(terms: Iterable[Term]) -> int:
    """Return the bytes of all terms."""
    return sum(term.size for term in terms)
