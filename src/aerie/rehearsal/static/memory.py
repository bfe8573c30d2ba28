"""Will it fit: what one GPU holds, from headers and settings alone, by vLLM 0.32.0's own accounting. Pure.

vLLM measures a budget for the KV cache: a share of the GPU, less the weights and what a profiled step of the largest
size took (v1/worker/gpu_worker.py, determine_available_memory). What it allocates after that has to find room in the
share that it leaves alone, as do the CUDA context and NCCL's buffers.
"""

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache

from aerie.rehearsal.backends import ATTENTION, expected
from aerie.rehearsal.findings import Finding, failed, passed, skipped, warned
from aerie.rehearsal.kernels import splits
from aerie.rehearsal.static.arguments import Setup
from aerie.rehearsal.static.hardware import GIB
from aerie.rehearsal.static.settings import CPU_CACHE, Settings

_CHECK = "memory"
_BLOCK = 16
"""Tokens of a block: what both TRITON_MLA and FLASH_ATTN take, and the CPU's MLA."""
_BF16 = 2  # bytes
_FP32 = 4
_MIB = 2**20

_CONTEXT = int(1.5 * GIB)
"""CUDA context and NCCL's buffers of eight ranks; 0.5 GiB were seen on one H200."""
_LIBRARIES = int(0.3 * GIB)
"""Kernels and cuBLAS's buffers that the profiled step loads, as seen on an H200 with a pair of 0.01 GiB."""
_GRAPH_OF_LAYER = int(0.12 * _MIB)
"""Of a CUDA graph: of 51 + 49, with a rank's shapes at TP8, vLLM estimated 0.79 GiB on an H200 with 7 layers and 0.96
with 21. What they took in the end was two thirds of that."""
_FLASH_SPLITS, _FLASH_BUFFERS = 32, 5
"""FLASH_ATTN_MLA's partial results in graphs: so many for each row (config/attention.py), and so many times as vLLM
estimated 11.16 GiB with 64 heads. What they took in the end was three times."""
_COMPILER_STATES = 8
"""Hidden states that are held while the drafter is compiled, beside three auxiliary ones: the peak of 3.40 GiB on an
H200, whatever the heads and the depth, is these and the embedding's 2.19. Ranks split that: compiling for an embedding
of an eighth of the rows peaked at 0.88 GiB there, 0.27 of them the embedding."""
_VISION_GRID = 512  # patches a side (kimi_k25_vit.py)
_PICTURE = 16384  # patches; in_patch_limit of Kimi-K2.5's preprocessor_config.json
_MOST_ROWS_OF_CONTEXT = 65536
"""Of MLA's workspace for the context of a chunked prefill (mla_attention.py)."""

_TIGHT = 1.1
"""Longest requests at once, below which the plan's own error may decide whether one fits."""
_MARGIN = GIB
"""Bytes for what nobody counts: fragments, long prompts' attention, kernels that are loaded late."""
_STEP = 1024  # tokens; what is proposed is a multiple of it
_DECODE = "decode workspace"
_OF_TOKENS = frozenset({"experts' workspace", "buffers", "activations"})
"""What of a step grows with max-num-batched-tokens."""

# Not split over tensor-parallel ranks (deepseek_v2.py, kimi_k25_vit.py, deepseek_eagle3.py, llama_eagle3.py).
_REPLICATED = re.compile(
    r"(q_a_proj|kv_a_proj_with_mqa|\w*norm\d?|gate|pos_emb|fc|d2t)(\.weight|\.bias|\.e_score_correction_bias)?$"
)

# v1/worker/gpu/model_runner.py and v1/worker/gpu_worker.py; GiB.
_LOADED = re.compile(r"Model loading took ([\d.]+) GiB")
_ESTIMATED = re.compile(r"CUDA graph pool memory: .*, ([\d.]+) GiB \(estimated\)")
_USAGE = re.compile(
    r"Free memory on device \(([\d.]+)/([\d.]+) GiB\) on startup.* Actual usage is ([\d.]+) GiB for consumed memory"
    r".*, ([\d.]+) GiB for peak activation"
)


@dataclass(frozen=True)
class Term:
    """One part of a GPU's memory in bytes, with the formula that it comes from."""

    name: str
    size: int
    formula: str


@dataclass(frozen=True)
class Plan:
    """One GPU's memory, of the pipeline stage whose cache has room for the fewest tokens."""

    setup: Setup
    weights: tuple[Term, ...]
    step: tuple[Term, ...]
    """What a step takes of the share that is vLLM's; the KV cache has the rest."""
    outside: tuple[Term, ...]
    """Of the share that it leaves alone."""
    token: int
    """Bytes of KV cache a token."""

    @property
    def memory(self) -> int:
        """Bytes that one rank can have: a GPU's, or of a CPU, which all ranks share, a part."""
        hardware = self.setup.hardware
        return hardware.memory if hardware.chip else hardware.memory // self.setup.settings.ranks

    @cached_property
    def share(self) -> int:
        """Bytes that vLLM takes."""
        given, share = self.setup.settings.cache, min(1.0, max(0.0, self.setup.settings.utilization))
        return math.ceil(self.memory * share) if given is None else self.used + given

    @property
    def inside(self) -> tuple[Term, ...]:
        """Of the share that vLLM takes, all but the KV cache."""
        return self.weights + self.step

    @cached_property
    def used(self) -> int:
        """Bytes of its share that are not the KV cache's."""
        return sum(term.size for term in self.inside)

    @property
    def cache(self) -> int:
        """Bytes of the KV cache; negative where even the weights do not fit."""
        return self.share - self.used

    @property
    def spare(self) -> int:
        """Bytes that are left of the share that vLLM leaves alone."""
        return self.memory - self.share - sum(term.size for term in self.outside)

    @property
    def blocks(self) -> int:
        """How many blocks the KV cache has."""
        return max(0, self.cache // (_BLOCK * self.token))

    @property
    def blocks_needed(self) -> int:
        """How many blocks one longest request takes on a rank."""
        return math.ceil(math.ceil(self.setup.longest / self.setup.settings.context_parallel) / _BLOCK)

    @property
    def tokens(self) -> int:
        """The KV cache's size as vLLM reports it (kv_cache_utils.py)."""
        return int(self.concurrency * self.setup.longest)

    @property
    def concurrency(self) -> float:
        """How many longest requests fit at once."""
        return self.blocks / self.blocks_needed

    @property
    def fits(self) -> bool:
        """Whether one longest request does; vLLM sets one block aside."""
        return self.blocks_needed <= self.blocks - 1

    @property
    def missing(self) -> int:
        """Bytes that the KV cache has too few for one longest request."""
        return (self.blocks_needed + 1) * _BLOCK * self.token - self.cache

    @property
    def longest_that_fits(self) -> int:
        """The longest request in tokens that would."""
        return max(0, self.blocks - 1) * _BLOCK * self.setup.settings.context_parallel

    @property
    def details(self) -> tuple[str, ...]:
        """Each figure with its formula, one a line."""
        terms = [*self.inside]
        if self.cache > 0:
            ranks = self.setup.settings.context_parallel
            cache = f"{self.tokens:,} tokens of {self.token:,} bytes" + (f", / {ranks} ranks" if ranks > 1 else "")
            spare = Term("to spare", self.spare, f"{_gib(self.memory)} GiB less all of these")
            terms += [Term("KV cache", self.cache, cache), *self.outside, spare]
        else:
            request = f"a GPU, for one request of {self.setup.longest:,} tokens in {_gib(self.share)} GiB"
            terms += [*self.outside, Term("missing", self.missing, request)]
        return tuple(f"{term.name:<20}{_gib(term.size):>6} GiB  {term.formula}" for term in terms)


def plan(setup: Setup, target_sizes: Mapping[str, int], drafter_sizes: Mapping[str, int]) -> Plan:
    """Return the memory of a GPU; the sizes are the bytes of each tensor."""
    step: tuple[Term, ...] = ()
    outside: tuple[Term, ...] = ()
    if setup.hardware.chip is not None:
        experts, decode = _experts_workspace(setup), _decode_workspace(setup)
        step = (
            experts,
            _sampling(setup),
            _buffers(setup),
            _activations(setup),
            Term("kernels, libraries", _LIBRARIES, "as measured on an H200"),
            _graphs(setup),
        )
        # One buffer that grows (v1/worker/workspace.py): what the experts had of it is not allocated again.
        grown = max(0, decode.size - experts.size)
        outside = (
            Term("CUDA context, NCCL", _CONTEXT, "not measured on this hardware"),
            Term(decode.name, grown, f"{decode.formula}, less the experts' workspace"),
            _prefill_workspace(setup),
        )
    plans = [
        Plan(setup, tuple(weights), step, outside, _token(setup, stage))
        for stage, weights in enumerate(_weights_of_stages(setup, target_sizes, drafter_sizes))
    ]
    return min(plans, key=lambda each: (each.tokens, each.cache))


def measured(plan: Plan, lines: Iterable[str], layers: int) -> Plan | None:
    """Return the plan with what an engine measured in place of what is assumed, None where it logged nothing of it.

    `lines` are the log of a start on the same hardware with the same arguments and widths, but of `layers` layers. What
    is taken: all that stayed beside the weights, a step's peak, the graphs, and what was gone before vLLM looked.
    """
    loaded = estimated = 0.0
    usage: tuple[float, float, float] | None = None
    for line in lines:  # of all ranks, the one that took the most
        if found := _LOADED.search(line):
            loaded = max(loaded, float(found[1]))
        elif found := _ESTIMATED.search(line):
            estimated = max(estimated, float(found[1]))
        elif found := _USAGE.search(line):
            free, total, consumed, peak = (float(each) for each in found.groups())
            usage = max(usage or (0.0, 0.0, 0.0), (consumed, peak, total - free))
    if usage is None:
        return None
    consumed, peak, context = usage
    stages, by = plan.setup.settings.pipeline_parallel, f"measured with {layers} layers"
    more = max(layers_of_stages(plan.setup.target.layers, stages)) - max(layers_of_stages(layers, stages))
    deeper = more * _graphs_of_layer(plan.setup)
    return dataclasses.replace(
        plan,
        step=(
            Term("beside weights", int((consumed - loaded) * GIB), by),
            Term("activations", int((peak - estimated) * GIB), by),
            Term("CUDA graphs", int(estimated * GIB) + deeper, f"{estimated} GiB {by}, {_gib(deeper)} for {more} more"),
        ),
        outside=(Term("gone before vLLM", int(context * GIB), by), *plan.outside[1:]),
    )


def will_fit(plan: Plan) -> Iterator[Finding]:
    """Yield whether a GPU holds the weights, one longest request, and what vLLM allocates outside of its own share."""
    if plan.setup.hardware.chip is None and plan.used > plan.memory:
        yield skipped(_CHECK, f"{_gib(plan.used)} GiB of weights are for GPUs: name their chip for a plan of them")
        return
    if not 0 < plan.setup.settings.utilization <= 1:  # which the rule on batches says
        return
    first, *others = _faults(plan) or [_judged(plan)]
    yield dataclasses.replace(first, details=plan.details)
    yield from others


def layers_of_stages(layers: int, stages: int) -> list[int]:
    """Return how many layers each pipeline stage has (vllm/distributed/utils.py, get_pp_indices); one at least."""
    stages = min(stages, layers)
    each, more = divmod(layers, stages)
    counts = [each] * stages
    # The last stage has the head, so what is left over goes to those before it.
    for number in range(2, more + 2):
        counts[-number] += 1
    return counts


def _faults(plan: Plan) -> list[Finding]:
    settings, faults = plan.setup.settings, []
    if plan.cache <= 0:
        text = (
            f"weights and a step take {_gib(plan.used)} GiB of a GPU, and vLLM may have {_gib(plan.share)}: nothing is "
            f"left for the KV cache, and {_gib(plan.missing)} GiB a GPU are missing for one request"
        )
        other = _more_memory(plan)
        return [failed(_CHECK, text, f"set {other}" if other else _smaller(plan))]
    if not plan.fits and not (settings.fits_itself and plan.longest_that_fits):
        needed = _gib(plan.blocks_needed * _BLOCK * plan.token)
        text = (
            f"one request of {plan.setup.longest:,} tokens takes {needed} GiB of KV cache, and {_gib(plan.cache)} are "
            f"left, for {plan.tokens:,} tokens"
        )
        longest = _rounded(plan.longest_that_fits)
        remedy = f"set max-model-len to {longest}" if longest else _smaller(plan)
        faults.append(failed(_CHECK, text, f"{remedy}, or {other}" if (other := _more_memory(plan)) else remedy))
    if plan.spare < 0 and plan.setup.hardware.chip is None:
        ranks = f"{settings.ranks} ranks" if settings.ranks > 1 else "the rank"
        taken, there = plan.share * settings.ranks, plan.setup.hardware.memory
        text = f"{ranks} would take {_gib(taken)} GiB of the machine's {_gib(there)}"
        faults.append(failed(_CHECK, text, f"set {CPU_CACHE} to {max(0, plan.memory - plan.used - 1) // GIB}"))
    elif plan.spare < 0:
        text = (
            f"vLLM may have {_gib(plan.share)} GiB and takes {_gib(sum(term.size for term in plan.outside))} beside "
            f"them, where a GPU has {_gib(plan.memory - plan.share)}: it runs out of memory after the load"
        )
        faults.append(failed(_CHECK, text, _less_outside(plan), "vllm/v1/attention/backends/mla/triton_mla.py"))
    return faults


def _judged(plan: Plan) -> Finding:
    settings, longest = plan.setup.settings, plan.setup.longest
    room = f"{plan.tokens:,} tokens of KV cache in {_gib(plan.cache)} GiB"
    if settings.fits_itself:
        return passed(_CHECK, f"{room}, so max-model-len auto is {min(longest, plan.longest_that_fits):,}")
    text = f"{room}: {plan.concurrency:.2f} requests of {longest:,} at once, and {_gib(plan.spare)} GiB to spare"
    if plan.setup.hardware.chip and plan.spare < _MARGIN:
        return warned(_CHECK, f"{text}, which long prompts may take", _less_outside(plan))
    if plan.concurrency < _TIGHT:
        better = _rounded(int(plan.tokens / _TIGHT))
        return warned(_CHECK, text, f"set max-model-len to {better}: no plan is exact to so little")
    return passed(_CHECK, text)


def _more_memory(plan: Plan) -> str | None:
    """Return the utilization with which one longest request would fit, None where there is none."""
    if plan.setup.settings.cache is not None or plan.missing > plan.spare - _MARGIN:
        return None
    return f"gpu-memory-utilization to {math.ceil((plan.share + plan.missing) / plan.memory * 100) / 100:.2f}"


def _smaller(plan: Plan) -> str:
    """Return what makes room where neither the share nor the request's length does: a smaller step, or more GPUs."""
    settings = plan.setup.settings
    if settings.cache is not None:
        return f"give the KV cache {_gib(plan.missing + settings.cache)} GiB or more"
    sampled = {term.name for term in plan.step if term.name == "sampling" or term.formula.endswith(": sampling")}
    seats = sum(term.size for term in plan.step if term.name in sampled)
    if seats > plan.missing:
        return f"set max-num-seqs to {max(1, settings.sequences * (seats - plan.missing) // seats)}"
    step = sum(term.size for term in plan.step if term.name in _OF_TOKENS - sampled)
    tokens = settings.step_tokens * (step - plan.missing) // step // _STEP * _STEP if step else 0
    if tokens >= max(_STEP, plan.setup.rows):
        return f"set max-num-batched-tokens to {tokens}"
    whole = sum(term.size for term in plan.weights if term.name == "vision") + sum(term.size for term in plan.step)
    room = plan.share - whole - (plan.missing + plan.cache)
    if room <= 0:
        return "set max-num-seqs, max-num-batched-tokens or max-model-len to much less"
    # Replicas share the experts alone, so the same GPUs hold more as tensor-parallel ranks.
    replicas, experts = settings.data_parallel, plan.weights[0].size
    split = (plan.used - whole + (replicas - 1) * experts) / room
    gpus = settings.ranks * 2 ** math.ceil(math.log2(max(split, 2 if replicas == 1 else 1)))
    there = plan.setup.hardware.count
    if gpus > there:
        return f"take about {gpus} such GPUs, where there are {there}, or larger ones"
    alone = " and data-parallel-size to 1" if replicas > 1 else ""
    tensor = gpus // settings.pipeline_parallel
    return f"set tensor-parallel-size to {tensor}{alone}: {gpus} of the {there} GPUs hold it"


def _less_outside(plan: Plan) -> str:
    settings, missing = plan.setup.settings, _MARGIN - plan.spare
    decode = _decode_workspace(plan.setup).size
    grown = next((term.size for term in plan.outside if term.name == _DECODE), 0)
    if grown > max(missing, _CONTEXT):  # what most of it goes to
        return f"set max-num-seqs to {max(1, settings.sequences * (decode - missing) // decode)}"
    if settings.cache is not None:
        return "give the KV cache less"
    return f"set gpu-memory-utilization to {math.floor((plan.share - missing) / plan.memory * 100) / 100:.2f}"


def _weights_of_stages(
    setup: Setup, target_sizes: Mapping[str, int], drafter_sizes: Mapping[str, int]
) -> list[list[Term]]:
    settings, vision = setup.settings, setup.target.vision
    ranks, of_experts = settings.tensor_parallel, settings.tensor_parallel * settings.data_parallel
    first_layers = [0]
    for count in layers_of_stages(setup.target.layers, settings.pipeline_parallel)[:-1]:
        first_layers.append(first_layers[-1] + count)
    experts, others = ([0] * len(first_layers) for _ in range(2))
    tower = 0
    for name, size in target_sizes.items():
        if name.startswith(("vision_tower", "mm_projector")):
            tower += _held(name, size, 1 if _vision_is_whole(setup) else ranks)
        elif ".experts." in name:  # nearly all of the names, so it is quick
            experts[_stage_of(name, first_layers)] += size // of_experts
        else:
            others[_stage_of(name, first_layers)] += _held(name, size, ranks)
    split = f"bytes of the tensors, / {ranks} where split"
    # Over all of them, whether experts are cut or, with enable-expert-parallel, whole (fused_moe/config.py).
    product = f" (TP {ranks} x DP {settings.data_parallel})" if settings.data_parallel > 1 else ""
    split_experts = f"bytes of the tensors, / {of_experts}{product}"
    stages = [
        [Term("routed experts", experts[stage], split_experts), Term("other weights", others[stage], split)]
        for stage in range(len(first_layers))
    ]
    if vision and not settings.flag("language-model-only"):
        # Every stage builds it (kimi_k25.py).
        for terms in stages:
            terms.append(Term("vision", tower, "bytes of the tensors" if _vision_is_whole(setup) else split))
    if drafter_sizes:
        held = sum(_held(name, size, ranks) for name, size in drafter_sizes.items())
        stages[-1].append(Term("drafter", held, split))
    return stages


def _stage_of(name: str, first_layers: list[int]) -> int:
    if len(first_layers) == 1:
        return 0
    _, _, rest = name.partition("model.layers.")
    if not rest:
        return 0 if "embed_tokens" in name else len(first_layers) - 1
    layer = int(rest.partition(".")[0])
    return max(number for number, first in enumerate(first_layers) if first <= layer)


def _vision_is_whole(setup: Setup) -> bool:
    """Return whether each rank has the whole tower; vLLM decides so, too, where its heads do not divide (vision.py)."""
    vision = setup.target.vision
    odd = vision is not None and vision.heads % setup.settings.tensor_parallel != 0
    return odd or setup.settings.text("mm-encoder-tp-mode") == "data"


def _held(name: str, size: int, ranks: int) -> int:
    whole = name.startswith("mm_projector") or ".patch_embed." in name
    return size if whole or _ends_replicated(name[name.rfind(".", 0, name.rfind(".")) + 1 :]) else size // ranks


@lru_cache(maxsize=4096)
def _ends_replicated(end: str) -> bool:
    return _REPLICATED.match(end) is not None


def _token(setup: Setup, stage: int) -> int:
    """Return the bytes of KV cache a token on a rank of this stage: MLA's are not split over ranks."""
    settings, attention, drafter = setup.settings, setup.target.attention, setup.drafter
    stages = layers_of_stages(setup.target.layers, settings.pipeline_parallel)
    element = 1 if setup.has_fp8_cache else _element(settings.kv_dtype, settings)
    size = stages[stage] * (attention.kv_lora_rank + attention.rope) * element
    if drafter is None or stage != len(stages) - 1:
        return size
    own = settings.speculation.text("kv_cache_dtype") if settings.speculation else None
    element = _element(own, settings) if own else element
    if drafter.is_mla:
        return size + drafter.layers * (drafter.attention.kv_lora_rank + drafter.attention.rope) * element
    heads = max(1, drafter.kv_heads // settings.tensor_parallel)
    return size + drafter.layers * heads * 2 * drafter.head_size * element


def _element(dtype: str, settings: Settings) -> int:
    if dtype == "auto":
        return _FP32 if settings.text("dtype") in {"float32", "float"} else _BF16
    return 1 if dtype.startswith("fp8") else _BF16


def _product(name: str, **factors: int) -> Term:
    return Term(name, math.prod(factors.values()), " x ".join(f"{each:,} {what}" for what, each in factors.items()))


def _experts_workspace(setup: Setup) -> Term:
    """Return the Marlin experts' scratch (modular_kernel.py, marlin_moe.py), which is in the profile."""
    settings, experts, hidden = setup.settings, setup.target.experts, setup.target.hidden_size
    replicas = settings.data_parallel
    is_whole = settings.flag("enable-expert-parallel")
    width = experts.width if is_whole else experts.width // (settings.tensor_parallel * replicas)
    elements = max(width, hidden) + max(2 * width, hidden)
    # A step's tokens of all replicas come together before the experts (prepare_finalize/naive_dp_ep.py).
    return _product(
        "experts' workspace",
        tokens=settings.step_tokens * replicas,
        experts=experts.active,
        elements=elements,
        bytes=_BF16,
    )


def _decode_workspace(setup: Setup) -> Term:
    """Return TRITON_MLA's partial results (triton_mla.py), which are not in the profile."""
    settings, attention = setup.settings, setup.target.attention
    if not _decodes_with(setup, "TRITON_MLA"):
        return Term(_DECODE, 0, "another backend than TRITON_MLA")
    # Under DCP each row is one token (v1/attention/backend.py), and all ranks' heads come together.
    return _product(
        _DECODE,
        rows=settings.sequences if settings.context_parallel > 1 else setup.rows,
        heads=attention.heads // settings.tensor_parallel * settings.context_parallel,
        parts=splits(setup.longest, setup.hardware.multiprocessors),
        elements=attention.kv_lora_rank + 1,
        bytes=_FP32,
    )


def _rows_of_context(setup: Setup) -> int:
    return min(max(8 * setup.longest, 4 * setup.settings.sequences * _BLOCK), _MOST_ROWS_OF_CONTEXT)


def _prefill_workspace(setup: Setup) -> Term:
    rows, parallel, attention = _rows_of_context(setup), setup.settings.context_parallel, setup.target.attention
    return _product(
        "chunked prefills",
        rows=rows + (rows // parallel if parallel > 1 else 0),
        elements=attention.kv_lora_rank + attention.rope,
        bytes=_BF16,
        models=2 if setup.drafter and setup.drafter.is_mla else 1,
    )


def _graphs(setup: Setup) -> Term:
    """Return CUDA graphs as vLLM estimates them (v1/worker/gpu/cudagraph_utils.py)."""
    name, settings, attention = "CUDA graphs", setup.settings, setup.target.attention
    if not settings.graph_sizes:
        return Term(name, 0, "none are captured")
    layers = max(layers_of_stages(setup.target.layers, settings.pipeline_parallel))
    graphs, rows = _graph_count(settings), settings.graph_sizes[-1]
    size = graphs * rows * setup.target.hidden_size * _BF16 + layers * _graphs_of_layer(setup)
    formula = f"{graphs} graphs x ({rows} rows of a state + {layers} layers x 0.12 MiB)"
    if not _decodes_with(setup, "FLASH_ATTN_MLA"):
        return Term(name, size, formula)
    heads = attention.heads // settings.tensor_parallel * settings.context_parallel
    partial = rows * heads * _FLASH_SPLITS * attention.kv_lora_rank * _FP32
    return Term(
        name, size + _FLASH_BUFFERS * partial, f"{formula}, {_FLASH_BUFFERS} x {_gib(partial)} GiB for decoding"
    )


def _graphs_of_layer(setup: Setup) -> int:
    return _graph_count(setup.settings) * _GRAPH_OF_LAYER


def _graph_count(settings: Settings) -> int:
    return len(settings.graph_sizes) + len(settings.decode_graph_sizes)


def _decodes_with(setup: Setup, backend: str) -> bool:
    choice = expected(setup, {}).get(ATTENTION)
    return choice is not None and choice.name == backend


def _sampling(setup: Setup) -> Term:
    """Return what penalties need (v1/worker/gpu/sample/penalties.py): a count and a bit for each token."""
    bits = _product("sampling", sequences=setup.settings.sequences, tokens=setup.target.vocabulary, bits=8 * _FP32 + 1)
    return dataclasses.replace(bits, size=bits.size // 8)


def _buffers(setup: Setup) -> Term:
    """Return what V2's runner keeps: the drafter's input; embeddings with pictures, and the patches' positions."""
    settings, vision = setup.settings, setup.target.vision
    seeing = vision is not None and not settings.flag("language-model-only")
    patches = _VISION_GRID**2 if seeing else 0
    states = seeing + (setup.drafter is not None)
    size = states * _state(setup) + (patches * vision.width // vision.heads * _FP32 if vision else 0)
    return Term(
        "buffers", size, f"{states} states of {settings.step_tokens:,} tokens, positions of {patches:,} patches"
    )


def _activations(setup: Setup) -> Term:
    """Return a profiled step's peak: of encoding pictures, of the layers, of sampling, or of compiling the drafter."""
    settings, attention, drafter = setup.settings, setup.target.attention, setup.drafter
    heads = attention.heads // settings.tensor_parallel
    queries = settings.step_tokens * heads * (attention.nope + attention.rope + attention.value) * _BF16
    imitated = _rows_of_context(setup) * heads * (attention.nope + attention.value) * _BF16  # mla_attention.py
    # Residual, normalised state, a layer's output and the pictures'; auxiliary states once more as fc's input.
    states = 4 + (2 * drafter.aux_states if drafter else 0)
    sampled = settings.sequences * setup.target.vocabulary * (_BF16 + 2 * _FP32)
    peaks = {
        "the layers": states * _state(setup) + queries + imitated,
        "sampling": sampled,
        "pictures": _vision_step(setup),
    }
    if drafter and not settings.eager:
        # Inductor times kernels that it may combine with copies of all that they read (config/compilation.py), and the
        # drafter's first ones read its embedding.
        embedding = drafter.vocabulary // settings.tensor_parallel * drafter.hidden_size * _BF16
        peaks["compiling the drafter"] = embedding + (drafter.aux_states + _COMPILER_STATES) * _state(setup)
    what = max(peaks, key=lambda name: peaks[name])
    return Term("activations", peaks[what], f"of {settings.step_tokens:,} tokens: {what}")


def _state(setup: Setup) -> int:
    """Return the bytes of a step's hidden states."""
    return setup.settings.step_tokens * setup.target.hidden_size * _BF16


def _vision_step(setup: Setup) -> int:
    """Return the bytes of the encoder over as many patches as a step's tokens stand for."""
    settings, vision = setup.settings, setup.target.vision
    if vision is None or settings.flag("language-model-only"):
        return 0
    if _vision_is_whole(setup):  # and each rank takes whole pictures
        return _PICTURE * (4 * vision.width + 2 * vision.mlp_width) * _BF16
    patches = max(_PICTURE, settings.step_tokens * vision.merge[0] * vision.merge[1])
    return patches * (4 * vision.width + 2 * vision.mlp_width // settings.tensor_parallel) * _BF16


def _gib(size: int) -> str:
    return f"{size / GIB:,.1f}"


def _rounded(tokens: int) -> int:
    return tokens // _STEP * _STEP or tokens
