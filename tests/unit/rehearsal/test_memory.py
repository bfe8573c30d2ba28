"""The plan of a GPU's memory, against what vLLM reported of real starts."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest

from aerie.checkpoint.config import Drafter, Target, read_drafter, read_target
from aerie.checkpoint.layout import drafter_layout, target_layout
from aerie.checkpoint.tiny import configs
from aerie.engine_arguments import read_arguments
from aerie.rehearsal.findings import Verdict
from aerie.rehearsal.static.arguments import Setup
from aerie.rehearsal.static.hardware import GIB, H200, RTX_PRO_6000, Hardware
from aerie.rehearsal.static.memory import layers_of_stages, measured, plan, will_fit
from aerie.rehearsal.static.settings import settings_from

REPOSITORY = Path(__file__).parents[3]
CONFIG = REPOSITORY / "config/kimi-k2.5.yaml"
LOGS = REPOSITORY / "tests/fixtures/logs"
MEASURED = Path(__file__).parent / "measured"
"""Lines of the logs of starts on one H200."""
SPECULATION = {"method": "eagle3", "model": "/d", "num_speculative_tokens": 3}
SPECULATING = ["--speculative-config", json.dumps(SPECULATION)]
CPU = Hardware("CPU", None, 24 * GIB, 0, 1)
FAILS, WARNS, PASSES, SKIPS = Verdict.FAILED, Verdict.WARNED, Verdict.PASSED, Verdict.SKIPPED
A_GIB = {"VLLM_CPU_KVCACHE_SPACE": "1"}
TARGET = Target(Path("/t"), configs.TARGET)
MLA, LLAMA = (Drafter(Path("/d"), config) for config in (configs.MLA_DRAFTER, configs.LLAMA_DRAFTER))


def planned(words, target, drafter=None, hardware=RTX_PRO_6000, environment=None, *, own=None, fp8=False):
    """Return the plan; `own` is which of embedding and head the drafter has, `fp8` whether its weights are."""
    settings = settings_from(read_arguments(words), hardware, environment or {})
    drafted = drafter_layout(drafter, own) if drafter else {}
    setup = Setup(settings, target, drafter, hardware, frozenset())
    return plan(setup, sizes_of(target), {name: each.size // (1 + fp8) for name, each in drafted.items()})


_SIZES = {}


def sizes_of(target):
    """Return the bytes of a target's tensors, which take a second to list for 208,550."""
    known = json.dumps(target.whole)
    if known not in _SIZES:
        _SIZES[known] = {name: each.size for name, each in target_layout(target).items()}
    return _SIZES[known]


def reported(log):
    """Return tokens, and how many longest requests, as vLLM logged them."""
    found = re.search(r"KV cache size: ([\d,]+) tokens.* per request: ([\d.]+)x", (LOGS / log).read_text())
    return int(found[1].replace(",", "")), float(found[2])


@pytest.mark.parametrize(
    ("log", "words", "drafter", "hardware", "environment"),
    [
        ("vllm-0.32.0-cpu-healthy-compiled.log", ["--max-model-len", "4096"], MLA, CPU, A_GIB),
        ("vllm-0.32.0-cpu-healthy-eager.log", ["--max-model-len", "512"], None, CPU, A_GIB),
        ("vllm-0.32.0-cpu-no-common-block-size.log", ["--max-model-len", "512"], LLAMA, CPU, A_GIB),
        ("vllm-0.32.0-cpu-healthy-tp2.log", ["--max-model-len", "4096", "-tp", "2"], MLA, CPU, A_GIB),
        ("vllm-0.32.0-h200x2-healthy-pp2.log",
         ["--max-model-len", "1024", "-pp", "2", "--kv-cache-memory-bytes", "1073741824"], MLA, H200, {}),
        ("vllm-0.32.0-h200x2-healthy-tp2.log",
         ["--max-model-len", "1024", "-tp", "2", "--kv-cache-memory-bytes", "1073741824"], LLAMA, H200, {}),
    ],
)  # fmt: skip
def test_tokens_in_a_given_cache_are_vllms(log, words, drafter, hardware, environment):
    found = planned(["m", *words, *(SPECULATING if drafter else [])], TARGET, drafter, hardware, environment)
    assert (found.tokens, round(found.concurrency, 2)) == reported(log)


@pytest.mark.parametrize(
    ("log", "words"),
    [("vllm-0.32.0-h200-healthy-compiled.log", []), ("vllm-0.32.0-h200-healthy-eager.log", ["--enforce-eager"])],
)
def test_what_is_not_the_caches_on_an_h200(log, words):
    """Of 42 GiB that vLLM had, a pair of 0.01 GiB left 0.5 and 1.2 for all else."""
    given = ["m", "--max-model-len", "1024", "--gpu-memory-utilization", "0.3", *SPECULATING, *words]
    found = planned(given, TARGET, LLAMA, H200)
    text = (LOGS / log).read_text()
    cache = float(re.search(r"Available KV cache memory: ([\d.]+) GiB", text)[1])
    assert found.cache / GIB == pytest.approx(cache, abs=0.2)
    assert found.tokens == pytest.approx(reported(log)[0], rel=0.01)


@pytest.mark.parametrize(
    ("log", "words"),
    [("vllm-0.32.0-h200-healthy-compiled.log", []), ("vllm-0.32.0-h200-healthy-eager.log", ["--enforce-eager"])],
)
def test_what_an_engine_measured_is_its_own_cache(log, words):
    given = ["m", "--max-model-len", "1024", "--gpu-memory-utilization", "0.3", *SPECULATING, *words]
    lines = (LOGS / log).read_text().splitlines()
    found = measured(planned(given, TARGET, LLAMA, H200), lines, configs.LAYERS)
    cache = next(
        float(match[1]) for line in lines if (match := re.search(r"Available KV cache memory: ([\d.]+)", line))
    )
    assert found.cache / GIB == pytest.approx(cache, abs=0.02)
    assert found.outside[0].size / GIB == pytest.approx(139.8 - 139.29, abs=0.01)


ON_AN_H200 = ["--config", str(CONFIG), "-tp", "1"]
ON_TRITON = [*ON_AN_H200, "--attention-backend", "TRITON_MLA"]
# GiB of starts of the published pair with 16 experts and few layers on one H200 (139.8 GiB), as vLLM logged them:
# loaded, kept beside the weights, a step's peak without graphs, graphs as estimated, left for the KV cache; the second
# number is of how many ranks one has the heads and widths (tests/gpu/rank_of_eight.py). With FP8 the start ended before
# all of it was logged.
STARTS = {
    "published widths": (
        ON_AN_H200, 7, 1, {"loaded": 13.55, "beside": 2.45, "peak": 3.39, "graphs": 11.16, "cache": 99.46}
    ),
    "published widths, FP8": ([*ON_TRITON, "--kv-cache-dtype", "fp8"], 7, 1, {"loaded": 13.55, "cache": 109.57}),
    "a rank of eight": (
        ON_TRITON, 7, 8, {"loaded": 8.77, "beside": 2.45, "peak": 3.40, "graphs": 0.79, "cache": 114.60}
    ),
    "a deeper rank": (
        ON_TRITON, 21, 8, {"loaded": 10.26, "beside": 2.47, "peak": 3.40, "graphs": 0.96, "cache": 112.93}
    ),
}  # fmt: skip
OF_RANK = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "moe_intermediate_size")


@pytest.fixture
def started(kimi, mla_drafter):
    """The plan of one of STARTS."""

    def of(name):
        words, layers, ranks, _ = STARTS[name]
        kimi.change(num_hidden_layers=layers, n_routed_experts=16)
        for model in (kimi, mla_drafter):
            given = read_target(kimi.directory).text if model is kimi else read_drafter(model.directory).whole
            model.change(**{field: given[field] // ranks for field in OF_RANK if given.get(field)})
        # Whose embedding is the target's, vLLM lets it have that one; so it was with the scripted weights.
        pair = read_target(kimi.directory), read_drafter(mla_drafter.directory)
        return planned(words, *pair, H200, own={"lm_head.weight": None})

    return of


def in_gib(plan):
    """Return the figures of a plan that a start's log has."""
    step = {term.name: term.size / GIB for term in plan.step}
    return {
        "loaded": sum(term.size for term in plan.weights) / GIB,
        "beside": sum(size for name, size in step.items() if name not in {"activations", "CUDA graphs"}),
        "peak": step["activations"],
        "graphs": step["CUDA graphs"],
        "cache": plan.cache / GIB,
    }


@pytest.mark.parametrize("name", STARTS)
def test_real_widths_on_an_h200_within_a_tenth(started, name):
    reported = STARTS[name][3]
    found = in_gib(started(name))
    assert {figure: found[figure] for figure in reported} == pytest.approx(reported, rel=0.1)


def test_what_is_taken_outside_of_the_share_was_seen(started):
    """With FP8 on TRITON_MLA, 64 heads: what was in use when the KV cache found no room, most of it for decoding."""
    found = started("published widths, FP8")
    log = (MEASURED / "as-on-sm-120.log").read_text()
    seen = float(re.search(r"this process has ([\d.]+) GiB memory in use", log)[1])
    passing = {"activations", "CUDA graphs"}
    kept = sum(term.size for term in (*found.inside, *found.outside) if term.name not in passing)
    assert kept / GIB == pytest.approx(seen, rel=0.05)
    (told,) = will_fit(found)
    assert (told.verdict, "it runs out of memory after the load" in told.text) == (FAILS, True)


def as_logged(figures):
    """Return the lines of vLLM's log that have such figures of a start."""
    beside, peak = figures["loaded"] + figures["beside"], figures["peak"] + figures["graphs"]
    return [
        f"INFO [model_runner.py:424] Model loading took {figures['loaded']} GiB memory and 5.774228 seconds",
        f"INFO [gpu_worker.py:971] CUDA graph pool memory: 0.5 GiB (actual), {figures['graphs']} GiB (estimated), diff",
        (
            "INFO [gpu_worker.py:1034] Free memory on device (139.29/139.8 GiB) on startup. Actual usage is "
            f"{beside} GiB for consumed memory (weights + non-torch), {peak} GiB for peak activation, and"
        ),
    ]


def test_what_seven_layers_measured_is_so_of_21(started):
    found = measured(started("a deeper rank"), as_logged(STARTS["a rank of eight"][3]), 7)
    reported = STARTS["a deeper rank"][3]
    assert in_gib(found)["graphs"] == pytest.approx(reported["graphs"], rel=0.02)
    assert in_gib(found)["cache"] == pytest.approx(reported["cache"], abs=0.2)


def test_graphs_of_few_layers_are_nearly_those_of_all(kimi, mla_drafter):
    """FLASH_ATTN_MLA's 11.16 GiB with 64 heads are buffers, of which further layers take no more."""
    pair = read_target(kimi.directory), read_drafter(mla_drafter.directory)
    lines = (MEASURED / "real-pair.log").read_text().splitlines()
    graphs = in_gib(measured(planned(ON_AN_H200, *pair, H200), lines, 7))["graphs"]
    assert graphs == pytest.approx(11.16 + 0.63, abs=0.05)


def test_what_was_measured_of_few_layers_is_that_of_all(shipped):
    """As a rank at TP8 may say it of a copy with seven layers, with half the graphs that are assumed."""
    plan = shipped()
    lines = [
        "(Worker_TP0 pid=1) INFO [model_runner.py:424] Model loading took 3.41 GiB memory and 3.771934 seconds",
        *(
            f"(Worker_TP{rank} pid=1) INFO [gpu_worker.py:1034] Free memory on device (93.{rank}0/94.97 GiB) on "
            f"startup. Desired GPU memory utilization is (0.93, 88.32 GiB). Actual usage is 5.{rank} GiB for consumed "
            "memory (weights + non-torch), 1.71 GiB for peak activation, and 0.4 GiB for CUDAGraph memory. Replace"
            for rank in (3, 4)
        ),
        "INFO [gpu_worker.py:971] CUDA graph pool memory: 0.2 GiB (actual), 0.41 GiB (estimated), difference: 0.21 GiB",
    ]
    found = measured(plan, lines, 7)
    sizes = {term.name: round(term.size / GIB, 2) for term in (*found.step, *found.outside)}
    assert sizes["beside weights"] == 1.99  # 5.4 less what was loaded
    assert sizes["activations"] == 1.3  # 1.71 less the graphs
    assert sizes["CUDA graphs"] == pytest.approx(0.41 + 0.63, abs=0.02)
    assert found.weights == plan.weights
    assert found.tokens > plan.tokens
    (told,) = will_fit(found)
    assert any("measured with 7 layers" in line for line in told.details)


def test_a_start_that_measured_nothing(shipped):
    assert measured(shipped(), (LOGS / "vllm-0.32.0-cpu-healthy-eager.log").read_text().splitlines(), 7) is None


# Kimi-K2.6, which has K2.5's tensors, on eight RTX PRO 6000 with TP8 and FP8 (github.com/local-inference-lab/rtx6kpro,
# models/kimi-k26-v2.md to -v8.md, and kimi-k25.md for the last). The drafter is festr2/kimi-k2.6-eagle3-mla-fp8, and
# their vLLM left CUDA graphs out of its share, by a setting or as its V2 runner did in 0.25.1 (https://github.com/vllm-project/vllm/issues/49224).
# So does enforce-eager here, and with it the compiling, which a start with a filled cache has not.
PUBLISHED = ["m", "--tensor-parallel-size", "8", "--kv-cache-dtype", "fp8", "--max-num-batched-tokens", "8192",
             "--max-model-len", "262144", "--max-num-seqs", "128", "--enforce-eager"]  # fmt: skip


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        (418_016, ["--gpu-memory-utilization", "0.94", *SPECULATING]),
        (442_256, ["--gpu-memory-utilization", "0.94", *SPECULATING]),
        (342_672, ["--gpu-memory-utilization", "0.90", *SPECULATING]),
        (1_311_936, ["--gpu-memory-utilization", "0.90", *SPECULATING, "-dcp", "4"]),
        (478_992, ["--gpu-memory-utilization", "0.94"]),
        (491_200, ["--gpu-memory-utilization", "0.94"]),
        (3_929_600, ["--gpu-memory-utilization", "0.94", "-dcp", "8"]),
        (449_600, ["--gpu-memory-utilization", "0.93", "--max-num-batched-tokens", "4096"]),
    ],
)
def test_published_figures_within_a_tenth(kimi, mla_drafter, tokens, words):
    drafter = read_drafter(mla_drafter.directory) if SPECULATING[0] in words else None
    found = planned([*PUBLISHED, *words], read_target(kimi.directory), drafter, own={}, fp8=True)
    assert found.tokens == pytest.approx(tokens, rel=0.1)


@pytest.fixture
def shipped(kimi, mla_drafter):
    """The plan of the shipped configuration with these arguments after it."""

    def of(*words, hardware=RTX_PRO_6000):
        pair = read_target(kimi.directory), read_drafter(mla_drafter.directory)
        return planned(["--config", str(CONFIG), *words], *pair, hardware)

    return of


def test_what_is_shipped_fits(shipped):
    (found,) = will_fit(shipped())
    assert found.verdict is Verdict.PASSED, found


def test_the_comments_of_what_is_shipped_are_the_plan(shipped):
    """Each figure of the comments, GiB with a decimal, is the plan's, and each term of half a GiB is told."""
    comments = "".join(line for line in CONFIG.read_text().splitlines() if line.startswith("#"))
    found = shipped()
    for size in (found.share, found.cache, *(term.size for term in found.inside + found.outside)):
        assert size < GIB / 4 or f"{size / GIB:.1f}" in comments, f"{size / GIB:.2f}"
    for number in (found.tokens, found.token):
        assert f"{number:,}" in comments, number


@pytest.mark.parametrize(
    ("words", "verdict", "text", "remedy"),
    [
        (["--max-model-len", "262144"], FAILS, "one request of 262,144 tokens takes 17.4 GiB of KV cache, and",
         "set max-model-len to 152576"),
        (["--max-model-len", "163840"], FAILS, "tokens takes 10.9 GiB", "or gpu-memory-utilization to 0.94"),
        (["--max-model-len", "150000"], WARNS, "1.02 requests of 150,000 at once", "set max-model-len to 139264"),
        (["--max-model-len", "auto"], PASSES, "so max-model-len auto is 153,", ""),
        (["--max-num-seqs", "1024"], FAILS, "takes 15.9 beside them, where a GPU has 6.6", "set max-num-seqs to "),
        (["--gpu-memory-utilization", "0.99"], FAILS, "takes 1.9 beside them, where a GPU has 0.9",
         "set gpu-memory-utilization to 0.96"),
        (["--gpu-memory-utilization", "0.96"], PASSES, "1.9 GiB to spare", ""),
        (["--gpu-memory-utilization", "0.97"], WARNS, "which long prompts may take",
         "set gpu-memory-utilization to 0.96"),
        (["--gpu-memory-utilization", "0.75"], FAILS, "nothing is left for the KV cache",
         "set gpu-memory-utilization to 0.9"),
        (["-tp", "4"], FAILS, "nothing is left for the KV cache",
         "set tensor-parallel-size to 8: 8 of the 8 GPUs hold it"),
        (["--kv-cache-memory-bytes", "1000"], FAILS, "one request of 98,304 tokens takes 6.5 GiB",
         "give the KV cache 6.5 GiB or more"),
        (["-tp", "1", "--max-num-seqs", "200000"], FAILS, "nothing is left for the KV cache",
         "set max-num-seqs, max-num-batched-tokens or max-model-len to much less"),
        (["-tp", "2", "-dp", "2"], FAILS, "nothing is left for the KV cache",
         "set tensor-parallel-size to 8 and data-parallel-size to 1: 8 of the 8 GPUs hold it"),
        (["-tp", "2", "-pp", "2"], FAILS, "nothing is left for the KV cache", "set tensor-parallel-size to 4: 8 of"),
        (["--max-num-seqs", "200000"], FAILS, "nothing is left for the KV cache", "set max-num-seqs to "),
        (["-tp", "1"], FAILS, "nothing is left for the KV cache", "set tensor-parallel-size to 8"),
        (["--max-num-batched-tokens", "262144"], FAILS, "GiB a GPU are missing for one request",
         "set max-num-batched-tokens to "),
        (["--kv-cache-dtype", "fp8"], PASSES, "306,", ""),
        (["-tp", "4", "-pp", "2"], PASSES, "requests of 98,304 at once", ""),
    ],
)  # fmt: skip
def test_a_plan_is_judged(shipped, words, verdict, text, remedy):
    told = list(will_fit(shipped(*words)))
    assert [each.verdict for each in told if text in each.text] == [verdict], told
    assert any(remedy in each.remedy for each in told if text in each.text), told
    assert [bool(each.details) for each in told] == [True, *(False for _ in told[1:])]


def test_a_cache_without_room_is_no_negative_figure(shipped):
    (told,) = will_fit(shipped("-tp", "4"))
    assert not any("-" in line.partition(" GiB ")[0] or "KV cache" in line for line in told.details)
    assert re.fullmatch(r"missing +\S+ GiB  a GPU, for one request of 98,304 tokens in 88.3 GiB", told.details[-1])


def test_what_is_needed_for_a_model_is_more_than_there_is(shipped):
    (told,) = will_fit(shipped("-tp", "4", hardware=dataclasses.replace(RTX_PRO_6000, count=4)))
    assert told.remedy == "take about 8 such GPUs, where there are 4, or larger ones"


def test_two_faults_have_one_table(shipped):
    told = list(will_fit(shipped("--max-model-len", "262144", "--max-num-seqs", "1024")))
    assert [bool(each.details) for each in told] == [True, False]


@pytest.mark.parametrize("share", ["90", "0", "-1", "1e308"])
def test_what_is_no_share_has_no_plan(shipped, share):
    assert list(will_fit(shipped("--gpu-memory-utilization", share))) == []


def test_ranks_that_share_a_cache_are_in_its_product(shipped):
    found = shipped("-dcp", "8")
    (line,) = (line for line in found.details if line.startswith("KV cache"))
    assert line.endswith(f"{found.tokens:,} tokens of 71,424 bytes, / 8 ranks")


@pytest.mark.parametrize(
    "words", [["--max-model-len", "262144"], ["--max-num-seqs", "1024"], ["--max-num-batched-tokens", "262144"]]
)
def test_what_a_remedy_proposes_fits(shipped, words):
    for found in will_fit(shipped(*words)):
        option, value = re.search(r"set ([a-z-]+) to (\d+)", found.remedy).groups()
        better = shipped(*words, f"--{option}", value)
        assert not any(each.text.startswith(found.text[:12]) for each in will_fit(better) if each.verdict is FAILS)


def test_the_real_pair_is_not_for_a_laptop(shipped):
    (found,) = will_fit(shipped("-tp", "1", hardware=CPU))
    assert (found.verdict, "are for GPUs: name their chip" in found.text) == (SKIPS, True)


def test_a_cpu_has_the_machines_memory_for_all_ranks():
    words = ["m", "-tp", "2", "--max-model-len", "4096"]
    found = planned(words, TARGET, hardware=CPU, environment={"VLLM_CPU_KVCACHE_SPACE": "13"})
    (told,) = will_fit(found)
    assert (told.verdict, told.remedy) == (FAILS, "set VLLM_CPU_KVCACHE_SPACE to 11")
    assert told.text == "2 ranks would take 26.0 GiB of the machine's 24.0"
    found = planned(words, TARGET, hardware=CPU, environment={"VLLM_CPU_KVCACHE_SPACE": "11"})
    assert [each.verdict for each in will_fit(found)] == [PASSES]


def test_only_triton_mla_has_a_decode_workspace(shipped):
    h200 = dataclasses.replace(H200, count=8)
    sizes = [
        next(term.size for term in shipped(*words, "--max-num-seqs", "1024", hardware=hardware).outside
             if term.name == "decode workspace")
        for words, hardware in (([], RTX_PRO_6000), ([], h200), (["--attention-backend", "TRITON_MLA"], h200))
    ]  # fmt: skip
    assert sizes[1] == 0 < sizes[0] == sizes[2]


@pytest.mark.parametrize(
    ("layers", "stages", "counts"), [(61, 1, [61]), (61, 2, [31, 30]), (61, 4, [15, 15, 16, 15]), (7, 2, [4, 3])]
)
def test_layers_of_stages_are_vllms(layers, stages, counts):
    """vllm/distributed/utils.py, get_pp_indices."""
    assert layers_of_stages(layers, stages) == counts


def test_what_ranks_do_not_split(kimi):
    """In GiB of Kimi-K2.5 at TP8; a split tower still has its projector whole."""
    target = read_target(kimi.directory)
    split, whole = (
        {term.name: round(term.size / GIB, 2) for term in planned(["m", "-tp", "8", *words], target).inside}
        for words in ([], ["--mm-encoder-tp-mode", "data"])
    )
    assert (split["routed experts"], split["other weights"], split["vision"], whole["vision"]) == (
        66.45, 4.51, 0.21, 0.88
    )  # fmt: skip
    assert "vision" not in {term.name for term in planned(["m", "-tp", "8", "--language-model-only"], target).inside}


@pytest.mark.parametrize("words", [[], ["--enable-expert-parallel"]])
def test_experts_are_split_over_replicas_too(shipped, words):
    """vllm/model_executor/layers/fused_moe/config.py: TP x DP, cut or whole; other weights over TP alone."""
    found = shipped("-tp", "4", "-dp", "2", *words)
    sizes = {term.name: round(term.size / GIB, 2) for term in found.weights}
    assert sizes["routed experts"] == 66.45
    assert sum(sizes.values()) == pytest.approx(77, abs=7)
    assert found.weights[0].formula == "bytes of the tensors, / 8 (TP 4 x DP 2)"
    workspace = next(term for term in found.step if term.name == "experts' workspace")
    assert workspace.formula.startswith("16,384 tokens x 8 experts")


def test_more_stages_than_layers():
    assert layers_of_stages(3, 100_000_000_000) == [1, 1, 1]
    assert planned(["m", "-pp", "100000000000"], TARGET).token > 0
