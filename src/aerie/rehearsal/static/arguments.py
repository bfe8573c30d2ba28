"""Settings that contradict each other, the pair or the hardware, each with the better value. Pure.

What vLLM finds only after the load, or never; and what it finds at once, so that all of it is told together. Places are
those of vLLM 0.32.0.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from difflib import get_close_matches

from aerie.checkpoint.config import Drafter, Target
from aerie.rehearsal.findings import Finding, failed, passed, warned
from aerie.rehearsal.static.hardware import Hardware
from aerie.rehearsal.static.settings import LOAD_TIMEOUT, Settings

_MLA_KV_DTYPES = frozenset({"auto", "bfloat16", "float16", "fp8", "fp8_e4m3"})
FP8_DECODE_PATCH = "decode-fp8-kv-fits-sm120"
FP8_DECODE_REMEDY = f"set kv-cache-dtype to bfloat16, or use an image with the patch {FP8_DECODE_PATCH}"
FP8_DECODE_SOURCE = "https://github.com/vllm-project/vllm/issues/46721"
_SAFE_WITH_DCP = 0.90
_MOST_DRAFTED = 16
_FLASH_ATTENTION_WITH_FP8 = frozenset({"sm_90", "sm_100", "sm_103"})
"""Chips whose FLASH_ATTN, 3 or 4, keeps keys in FP8 (v1/attention/backends/fa_utils.py)."""
_SLOW_LOAD = 2400
"""Seconds for Kimi-K2.5's 595 GB at 0.25 GB/s, the slowest that is told of such hosts."""


@dataclass(frozen=True)
class Setup:
    """All that the rules look at; `patches` are the names of those in this image's vLLM."""

    settings: Settings
    target: Target
    drafter: Drafter | None
    hardware: Hardware
    patches: frozenset[str]

    @property
    def longest(self) -> int:
        """Longest request in tokens."""
        given = self.settings.longest
        return given if given and given > 0 else self.target.positions

    @property
    def drafted(self) -> int:
        """Tokens drafted a step; 0 without speculation."""
        return self.settings.drafted

    @property
    def rows(self) -> int:
        """Rows of a step in which every sequence is verified."""
        return self.settings.rows

    @property
    def has_fp8_cache(self) -> bool:
        """Whether the KV cache is kept in FP8, by argument or by what the checkpoint says."""
        quantization = self.target.quantization
        by_checkpoint = bool(quantization and quantization.kv_cache == "float8")
        return self.settings.kv_dtype.startswith("fp8") or (self.settings.kv_dtype == "auto" and by_checkpoint)


Rule = Callable[[Setup], Iterator[Finding]]


def contradictions(setup: Setup) -> Iterator[Finding]:
    """Yield what each rule finds; where one finds nothing, what it looked at."""
    for check, rule in _RULES.items():
        found = list(rule(setup))
        yield from found or [passed(check, _LOOKED_AT[check](setup))]


def _parallelism(setup: Setup) -> Iterator[Finding]:
    check = "parallelism"
    settings = setup.settings
    ranks = settings.tensor_parallel
    heads = {"the target's": setup.target.attention.heads} | (
        {"the drafter's": setup.drafter.heads} if setup.drafter else {}
    )
    for whose, number in heads.items():
        if number % ranks:
            possible = ", ".join(str(each) for each in range(1, setup.hardware.count + 1) if number % each == 0)
            yield failed(
                check,
                f"tensor-parallel-size {ranks} does not divide {whose} {number} heads",
                f"set tensor-parallel-size to one of {possible}",
            )
        elif number == ranks:
            yield warned(
                check,
                f"{whose} {number} heads leave one a rank, for which MLA's decoding takes another kernel",
                "set a smaller tensor-parallel-size",
                "vllm/v1/attention/ops/triton_decode_attention.py",
            )
    needed = settings.ranks * settings.data_parallel
    if setup.hardware.chip and needed > setup.hardware.count:
        yield failed(
            check,
            f"{needed} GPUs are asked for, and there are {setup.hardware.count}",
            "lower tensor-, pipeline- or data-parallel-size",
        )
    if ranks % settings.context_parallel:
        yield failed(
            check,
            f"decode-context-parallel-size {settings.context_parallel} does not divide tensor-parallel-size {ranks}",
            "set one that does",
            "vllm/config/parallel.py",
        )
    if not settings.flag("enable-expert-parallel"):  # with it, an expert is whole on one rank
        yield from _cut_experts(setup, ranks * settings.data_parallel)


def _cut_experts(setup: Setup, ranks: int) -> Iterator[Finding]:
    """Yield what is wrong with experts that are cut over tensor- and data-parallel ranks (fused_moe/config.py)."""
    width, quantization = setup.target.experts.width, setup.target.quantization
    group = quantization.group if quantization else 0
    cut, source = None, ""
    if width % ranks:
        cut, source = f"do not divide over {ranks} ranks", "vllm/model_executor/layers/fused_moe"
    elif group > 0 and width // ranks % group:
        cut, source = f"over {ranks} ranks cut groups of {group} that share a scale", "compressed_tensors_moe_wna16.py"
    if cut:
        yield failed(
            "parallelism",
            f"an expert's {width} columns {cut}",
            "set a smaller tensor- or data-parallel-size, or enable-expert-parallel",
            source,
        )


def _pipeline(setup: Setup) -> Iterator[Finding]:
    check = "pipeline stages"
    settings = setup.settings
    if settings.pipeline_parallel == 1 or not settings.speculation:
        return
    if "eagle3-over-pp" not in setup.patches:
        yield failed(
            check,
            "this vLLM does not hand auxiliary states from one pipeline stage to the next",
            "set pipeline-parallel-size to 1, or use an image with the patch eagle3-over-pp",
            "vllm/model_executor/models/eagle3_utils.py",
        )
    if settings.flag("async-scheduling") is False:
        yield failed(
            check,
            "speculation over pipeline stages without asynchronous scheduling hangs at the first request",
            "take async-scheduling: false out",
            "https://github.com/vllm-project/vllm/issues/30436",
        )


def _decode_context(setup: Setup) -> Iterator[Finding]:
    check = "decode context parallelism"
    settings = setup.settings
    if settings.context_parallel == 1 or not settings.speculation:
        return
    if setup.drafter and not setup.drafter.is_mla:
        yield failed(
            check,
            "a Llama drafter under decode-context-parallel-size attends with other heads' keys",
            "set decode-context-parallel-size to 1, or take an MLA drafter",
        )
    asked = str(settings.compilation.get("cudagraph_mode", "")).upper()
    patched = "dcp-graphs-of-verification" in setup.patches
    if not settings.eager and ("FULL" in asked or not (asked or patched)):
        yield (warned if patched else failed)(
            check,
            "speculation with DCP cannot be captured in full graphs"
            + (": vLLM takes piecewise ones instead" if patched else ", and the capture after the load asserts so"),
            "set compilation-config: {cudagraph_mode: PIECEWISE}",
            "https://github.com/vllm-project/vllm/issues/40608",
        )
    if settings.utilization > _SAFE_WITH_DCP:
        yield warned(
            check,
            f"at gpu-memory-utilization {settings.utilization} such hosts got ready, and out of memory under load",
            f"set gpu-memory-utilization to {_SAFE_WITH_DCP:.2f}",
            "https://github.com/local-inference-lab/rtx6kpro",
        )


def _graphs(setup: Setup) -> Iterator[Finding]:
    check = "CUDA graphs"
    settings = setup.settings
    largest = max(settings.graph_sizes, default=None)
    if largest is not None and largest < setup.rows:
        fewer = largest // (setup.drafted + 1)
        more = f"max-cudagraph-capture-size to {setup.rows}"
        yield warned(
            check,
            f"a full batch has {setup.rows} rows (max-num-seqs {settings.sequences} x {setup.drafted + 1}), and graphs "
            f"are captured up to {largest}: it runs without one",
            f"set max-num-seqs to {fewer}, or {more}" if fewer else f"set {more}",
            "vllm/v1/worker/gpu/cudagraph_utils.py",
        )


def _batches(setup: Setup) -> Iterator[Finding]:
    check = "batches"
    settings = setup.settings
    step, sequences = settings.step_tokens, settings.sequences
    if step < sequences:
        yield failed(
            check,
            f"max-num-batched-tokens {step} is below max-num-seqs {sequences}",
            f"set max-num-batched-tokens to {max(setup.rows, 8192)}",
        )
    elif step < setup.rows:
        yield warned(
            check,
            f"max-num-batched-tokens {step} is below the {setup.rows} rows of a full batch: some sequences always wait",
            f"set max-num-batched-tokens to {max(setup.rows, 8192)}",
        )
    # A CPU takes them whole, too, but its engine is told a step of its own.
    if settings.flag("enable-chunked-prefill") is False and step < setup.longest:
        yield failed(
            check,
            f"prompts are taken whole here, and one of max-model-len {setup.longest} exceeds a step of {step}",
            f"set max-num-batched-tokens to {setup.longest}",
            "vllm/config/scheduler.py",
        )
    if setup.longest > setup.target.positions:
        yield failed(
            check,
            f"max-model-len {setup.longest} is above the {setup.target.positions} positions of the model",
            f"set max-model-len to {setup.target.positions} or less",
        )
    if not 0 < settings.utilization <= 1:
        yield failed(
            check,
            f"gpu-memory-utilization {settings.utilization} is no share of the memory",
            "set 0.90",
            "vllm/config/cache.py",
        )


def _kv_cache(setup: Setup) -> Iterator[Finding]:
    check = "KV cache type"
    settings = setup.settings
    if settings.kv_dtype not in _MLA_KV_DTYPES:
        yield failed(
            check,
            f"kv-cache-dtype {settings.kv_dtype} is none that MLA has kernels for on this hardware",
            f"set one of {', '.join(sorted(_MLA_KV_DTYPES))}",
            "vllm/v1/attention/backends/mla/triton_mla.py",
        )
    if not setup.has_fp8_cache:
        return
    if settings.kv_dtype == "auto":
        yield warned(
            check, "the checkpoint selects an FP8 cache by itself", "write kv-cache-dtype out, as fp8 or as bfloat16"
        )
    if setup.hardware.chip == "sm_120" and FP8_DECODE_PATCH not in setup.patches:
        yield failed(
            check,
            "MLA's decoding with an FP8 cache needs more shared memory than sm_120 has",
            FP8_DECODE_REMEDY,
            FP8_DECODE_SOURCE,
        )
    own = settings.speculation.text("kv_cache_dtype") if settings.speculation else None
    refuses = setup.hardware.chip not in _FLASH_ATTENTION_WITH_FP8
    if setup.drafter and not setup.drafter.is_mla and own is None and refuses:
        yield warned(
            check,
            "the Llama drafter would keep its keys in FP8, too, which FLASH_ATTN refuses on this chip",
            'add "kv_cache_dtype": "bfloat16" to speculative-config',
            "vllm/v1/attention/backends/fa_utils.py",
        )


def _speculation(setup: Setup) -> Iterator[Finding]:
    check = "speculation"
    speculation = setup.settings.speculation
    if speculation is None:
        yield warned(
            check, "no speculative-config: every token takes a step of its own", "see config/kimi-k2.5.yaml for one"
        )
        return
    if speculation.method != "eagle3":
        guessed = (
            "none, so vLLM guesses it from the drafter's path" if speculation.method is None else speculation.method
        )
        yield failed(check, f"the method is {guessed}", "set method: eagle3 in speculative-config")
    if not 0 < speculation.tokens <= _MOST_DRAFTED:
        name = "num_speculative_tokens"
        similar = get_close_matches(name, [key for key in speculation.options if key != name], 1)
        instead = f", and {similar[0]} is" if similar else ""
        is_given = speculation.text(name) is not None
        yield failed(
            check,
            f"{name} is {speculation.tokens}" if is_given else f"{name} is not set{instead}",
            "set num_speculative_tokens: 3, which was the best for Kimi-K2.5",
        )
    ranks = speculation.text("draft_tensor_parallel_size")
    if ranks is not None and ranks != str(setup.settings.tensor_parallel):
        remedy, source = "take it out: EAGLE-3's drafters run on the target's ranks", "vllm/config/speculative.py"
        if ranks == "1":
            yield warned(check, "draft_tensor_parallel_size 1 changes nothing", remedy, source)
        else:
            wanted = f"tensor-parallel-size {setup.settings.tensor_parallel}"
            yield failed(check, f"draft_tensor_parallel_size {ranks} is neither 1 nor {wanted}", remedy, source)


def _pictures(setup: Setup) -> Iterator[Finding]:
    settings = setup.settings
    if not settings.flag("language-model-only"):
        return
    for option in ("mm-encoder-tp-mode", "limit-mm-per-prompt"):
        if settings.text(option) is not None:
            yield warned(
                "pictures",
                f"language-model-only leaves the vision tower out, so {option} means nothing",
                f"take {option} out, or language-model-only where pictures are to be read",
            )


def _parsers(setup: Setup) -> Iterator[Finding]:
    check = "parsers"
    settings = setup.settings
    tools, choice = settings.text("tool-call-parser"), settings.flag("enable-auto-tool-choice")
    if choice and tools is None:
        yield failed(check, "enable-auto-tool-choice without a tool-call-parser", "set tool-call-parser: kimi_k2")
    if tools is not None and not choice:
        yield warned(
            check,
            "without enable-auto-tool-choice no request may leave the choice of a tool to the model",
            "set enable-auto-tool-choice: true",
        )


def _timeouts(setup: Setup) -> Iterator[Finding]:
    servers, timeout = setup.settings.servers, setup.settings.load_timeout
    if servers > 1 and timeout is not None and timeout < _SLOW_LOAD:
        yield failed(
            "timeouts",
            f"{servers} API servers give the engine {timeout} s to load, by {LOAD_TIMEOUT}; from a slow disk it takes "
            f"up to {_SLOW_LOAD}",
            f"take {LOAD_TIMEOUT} out of the environment: the supervisor sets it, and ends a start that stands still",
            "vllm/v1/engine/core_client.py",
        )


_RULES: dict[str, Rule] = {
    "parallelism": _parallelism,
    "pipeline stages": _pipeline,
    "decode context parallelism": _decode_context,
    "CUDA graphs": _graphs,
    "batches": _batches,
    "KV cache type": _kv_cache,
    "speculation": _speculation,
    "pictures": _pictures,
    "parsers": _parsers,
    "timeouts": _timeouts,
}


def _ranks_in_words(setup: Setup) -> str:
    settings = setup.settings
    sizes = f"TP {settings.tensor_parallel} x PP {settings.pipeline_parallel} x DP {settings.data_parallel}"
    return f"{sizes} on {setup.hardware.count} GPUs" if setup.hardware.chip else sizes


def _stages_in_words(setup: Setup) -> str:
    stages = setup.settings.pipeline_parallel
    return f"{stages} of them" if stages > 1 else "one"


def _decode_in_words(setup: Setup) -> str:
    ranks = setup.settings.context_parallel
    return f"over {ranks} ranks" if ranks > 1 else "none"


def _graphs_in_words(setup: Setup) -> str:
    sizes = setup.settings.graph_sizes
    return f"graphs to {sizes[-1]} rows, a full batch has {setup.rows}" if sizes else "none are captured"


def _batches_in_words(setup: Setup) -> str:
    settings = setup.settings
    return f"{settings.sequences:,} sequences and {settings.step_tokens:,} tokens a step, {setup.longest:,} a request"


def _pictures_in_words(setup: Setup) -> str:
    if setup.target.vision is None:
        return "the model has no vision tower"
    return "left out, with the vision tower" if setup.settings.flag("language-model-only") else "the model reads them"


_LOOKED_AT: dict[str, Callable[[Setup], str]] = {
    "parallelism": _ranks_in_words,
    "pipeline stages": _stages_in_words,
    "decode context parallelism": _decode_in_words,
    "CUDA graphs": _graphs_in_words,
    "batches": _batches_in_words,
    "KV cache type": lambda setup: setup.settings.kv_dtype,
    "speculation": lambda setup: f"eagle3, {setup.drafted} tokens a step",
    "pictures": _pictures_in_words,
    "parsers": lambda setup: f"of tools: {setup.settings.text('tool-call-parser') or 'none'}",
    "timeouts": lambda setup: f"API servers: {setup.settings.servers}",
}
"""What a rule that finds nothing looked at."""
