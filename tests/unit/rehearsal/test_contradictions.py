"""Settings that contradict each other, the pair or the hardware."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from series import patch_files

from aerie.checkpoint.config import read_drafter, read_target
from aerie.engine_arguments import ConfigurationError, read_arguments
from aerie.rehearsal.findings import Verdict
from aerie.rehearsal.static.arguments import Setup, contradictions
from aerie.rehearsal.static.hardware import H200, RTX_PRO_6000
from aerie.rehearsal.static.settings import settings_from, whole_number

REPOSITORY = Path(__file__).parents[3]
CPU = dataclasses.replace(RTX_PRO_6000, chip=None, count=1)
PATCHES = frozenset(path.stem for path in (REPOSITORY / "patches/0.32.0").glob("*.patch"))
SHIPPED = ["--config", str(REPOSITORY / "config/kimi-k2.5.yaml")]


@pytest.fixture
def found(kimi, mla_drafter):
    """What the rules say of the shipped configuration with these arguments after it, but for what passes."""

    def check(*arguments, hardware=RTX_PRO_6000, patches=PATCHES, drafter=mla_drafter, environment=None):
        settings = settings_from(read_arguments([*SHIPPED, *arguments]), hardware, environment or {})
        pair = read_target(kimi.directory), read_drafter(drafter.directory)
        findings = contradictions(Setup(settings, *pair, hardware, patches))
        return [finding for finding in findings if finding.verdict is not Verdict.PASSED]

    return check


def test_the_series_is_the_one_that_the_rules_name():
    named = {"eagle3-over-pp", "dcp-graphs-of-verification", "decode-fp8-kv-fits-sm120"}
    assert named <= {Path(name).stem for name in patch_files(REPOSITORY / "patches/0.32.0")}


def test_what_is_shipped_contradicts_nothing(found):
    assert found() == []


def test_what_is_shipped_is_told_as_what_was_looked_at(kimi, mla_drafter):
    settings = settings_from(read_arguments(SHIPPED), RTX_PRO_6000, {})
    pair = read_target(kimi.directory), read_drafter(mla_drafter.directory)
    told = contradictions(Setup(settings, *pair, RTX_PRO_6000, PATCHES))
    assert {finding.check: finding.text for finding in told} == {
        "parallelism": "TP 8 x PP 1 x DP 1 on 8 GPUs",
        "pipeline stages": "one",
        "decode context parallelism": "none",
        "CUDA graphs": "graphs to 512 rows, a full batch has 512",
        "batches": "128 sequences and 8,192 tokens a step, 98,304 a request",
        "KV cache type": "bfloat16",
        "speculation": "eagle3, 3 tokens a step",
        "pictures": "the model reads them",
        "parsers": "of tools: kimi_k2",
        "timeouts": "API servers: 1",
    }


def speculation(**options):
    given = {"method": "eagle3", "model": "/d", "num_speculative_tokens": 3, **options}
    return ["--speculative-config", json.dumps({name: value for name, value in given.items() if value is not None})]


FAILS, WARNS = Verdict.FAILED, Verdict.WARNED


@pytest.mark.parametrize(
    ("arguments", "verdict", "text", "remedy"),
    [
        (["-tp", "6"], FAILS, "tensor-parallel-size 6 does not divide the target's 64 heads", "one of 1, 2, 4, 8"),
        (["-tp", "16"], FAILS, "16 GPUs are asked for, and there are 8", "lower tensor-"),
        (["-pp", "2"], FAILS, "16 GPUs are asked for", "lower tensor-"),
        (["-dcp", "3"], FAILS, "-parallel-size 3 does not divide tensor-parallel-size 8", "one that does"),
        (["-tp", "4", "-pp", "2", "--no-async-scheduling"], FAILS, "hangs at the first request", "async-scheduling"),
        (["-dcp", "8", "--gpu-memory-utilization", "0.94"], WARNS, "out of memory under load", "utilization to 0.90"),
        (["-dcp", "8", "-cc.cudagraph_mode", "FULL_AND_PIECEWISE"], WARNS, "takes piecewise ones", "PIECEWISE"),
        (["--max-num-seqs", "256"], WARNS, "has 1024 rows (max-num-seqs 256 x 4), and graphs are captured up to 512",
         "set max-num-seqs to 128, or max-cudagraph-capture-size to 1024"),
        (["--cudagraph-capture-sizes", "1", "2", "256"], WARNS, "captured up to 256", "max-num-seqs to 64"),
        (["--max-cudagraph-capture-size", "64"], WARNS, "captured up to 64", "max-num-seqs to 16"),
        (["--max-cudagraph-capture-size", "2"], WARNS, "captured up to 2", "set max-cudagraph-capture-size to 512"),
        (["--max-num-batched-tokens", "100"], FAILS, "max-num-batched-tokens 100 is below max-num-seqs 128", "8192"),
        (["--max-num-batched-tokens", "256"], WARNS, "below the 512 rows of a full batch", "to 8192"),
        (["--no-enable-chunked-prefill"], FAILS, "one of max-model-len 98304 exceeds a step of 8192", "to 98304"),
        (["--max-model-len", "300k"], FAILS, "max-model-len 300000 is above the 262144 positions", "to 262144 or less"),
        (["--gpu-memory-utilization", "90"], FAILS, "gpu-memory-utilization 90.0 is no share", "0.90"),
        (["--kv-cache-dtype", "fp8_e5m2"], FAILS, "fp8_e5m2 is none that MLA has kernels for", "bfloat16"),
        (speculation(method=None), FAILS, "the method is none, so vLLM guesses it", "method: eagle3"),
        (speculation(method="eagle"), FAILS, "the method is eagle", "method: eagle3"),
        (speculation(num_speculative_tokens=None), FAILS, "num_speculative_tokens is not set", "_tokens: 3"),
        (["-sc", '{"method": "eagle3", "num_speculative_tokens": null}'], FAILS, "tokens is not set", "_tokens: 3"),
        (speculation(num_speculative_tokens=0), FAILS, "num_speculative_tokens is 0", "num_speculative_tokens: 3"),
        (speculation(num_speculative_tokens=None, num_speculativ_tokens=3), FAILS,
         "num_speculative_tokens is not set, and num_speculativ_tokens is", "num_speculative_tokens: 3"),
        (speculation(draft_tensor_parallel_size=2), FAILS, "draft_tensor_parallel_size 2 is neither 1 nor", "take it"),
        (speculation(draft_tensor_parallel_size=1), WARNS, "draft_tensor_parallel_size 1 changes nothing", "take it"),
        (["--language-model-only"], WARNS, "so mm-encoder-tp-mode means nothing", "take mm-encoder-tp-mode out"),
        (["--no-enable-auto-tool-choice"], WARNS, "without enable-auto-tool-choice", "enable-auto-tool-choice: true"),
    ],
)  # fmt: skip
def test_a_contradiction_is_told_with_the_better_value(found, arguments, verdict, text, remedy):
    told = found(*arguments)
    assert [finding.verdict for finding in told if text in finding.text] == [verdict], told
    assert any(remedy in finding.remedy for finding in told if text in finding.text), told


def test_one_key_of_speculation_drops_the_rest_as_in_vllm(found):
    told = found("--speculative-config.num_speculative_tokens", "2")
    assert ["the method is none" in finding.text for finding in told] == [True]


@pytest.mark.parametrize(
    ("arguments", "patch", "text"),
    [
        (["-tp", "4", "-pp", "2"], "eagle3-over-pp", "does not hand auxiliary states from one pipeline stage"),
        (["-dcp", "8", "--gpu-memory-utilization", "0.90"], "dcp-graphs-of-verification",
         "the capture after the load asserts so"),
        (["--kv-cache-dtype", "fp8"], "decode-fp8-kv-fits-sm120", "needs more shared memory than sm_120 has"),
    ],
)  # fmt: skip
def test_a_missing_patch_is_told_where_it_is_needed(found, arguments, patch, text):
    assert found(*arguments) == []
    told = found(*arguments, patches=PATCHES - {patch})
    assert [finding.verdict for finding in told if text in finding.text] == [Verdict.FAILED]
    assert any(patch in finding.remedy or "PIECEWISE" in finding.remedy for finding in told)


def test_a_llama_drafter_has_needs_of_its_own(found, published):
    llama = published("lightseekorg--kimi-k2.5-eagle3")
    assert found(drafter=llama) == []
    (told,) = found("-dcp", "8", "--gpu-memory-utilization", "0.90", drafter=llama)
    assert (told.verdict, "attends with other heads' keys" in told.text) == (Verdict.FAILED, True)
    (told,) = found("--kv-cache-dtype", "fp8", drafter=llama)
    assert (told.verdict, "kv_cache_dtype" in told.remedy) == (Verdict.WARNED, True)
    assert found("--kv-cache-dtype", "fp8", *speculation(kv_cache_dtype="bfloat16"), drafter=llama) == []


def test_a_checkpoint_that_selects_fp8_by_itself(found, kimi):
    quantization = read_target(kimi.directory).text["quantization_config"]
    kimi.change(quantization_config=quantization | {"kv_cache_scheme": {"type": "float", "num_bits": 8}})
    assert found() == []
    assert "selects an FP8 cache by itself" in found("--kv-cache-dtype", "auto")[0].text


def test_no_speculation_at_all(found, tmp_path):
    assert "every token takes a step of its own" in found("--speculative-config", "{}")[0].text


def test_what_the_engine_on_a_cpu_is_told_differently_is_no_contradiction(found):
    assert found(hardware=CPU) == []


def test_an_fp8_cache_on_a_chip_whose_flash_attention_has_it(found, published):
    llama = published("lightseekorg--kimi-k2.5-eagle3")
    assert found("--kv-cache-dtype", "fp8", drafter=llama, hardware=H200) == []


def narrow(kimi, width, group=32):
    quantization = dict(read_target(kimi.directory).text["quantization_config"])
    weights = quantization["config_groups"]["group_0"]["weights"] | {"group_size": group}
    kimi.change(
        moe_intermediate_size=width,
        quantization_config=quantization | {"config_groups": {"group_0": {"weights": weights}}} if group else None,
    )


@pytest.mark.parametrize(
    ("width", "group", "arguments", "texts"),
    [
        (1408, 32, [], ["an expert's 1408 columns over 8 ranks cut groups of 32 that share a scale"]),
        (1408, 16, [], []),
        (2048, 128, [], []),
        (2048, 512, [], ["an expert's 2048 columns over 8 ranks cut groups of 512"]),
        (1408, None, [], []),
        (1404, None, [], ["an expert's 1404 columns do not divide over 8 ranks"]),
        (1408, 32, ["--enable-expert-parallel"], []),
        (1024, 128, ["-tp", "4", "-dp", "4"], ["16 GPUs are asked", "1024 columns over 16 ranks cut groups of 128"]),
    ],
)
def test_experts_that_are_cut(found, kimi, width, group, arguments, texts):
    narrow(kimi, width, group)
    told = [finding for finding in found(*arguments) if finding.check == "parallelism"]
    assert [text in finding.text for text, finding in zip(texts, told, strict=True)] == [True] * len(texts)


@pytest.mark.parametrize(
    ("text", "number"), [("8192", 8192), ("8k", 8000), ("8K", 8192), ("1.5k", 1500), ("2m", 2_000_000), ("-1", -1)]
)
def test_numbers_as_vllm_reads_them(text, number):
    assert whole_number(text) == number


@pytest.mark.parametrize("text", ["", "eight", "1.5K", "8 192", "8kb"])
def test_what_is_no_number(text):
    with pytest.raises(ValueError, match=r"."):
        whole_number(text)
    with pytest.raises(ConfigurationError, match=f"--max-num-seqs '{text}' is no whole number"):
        settings_from({"max-num-seqs": text}, RTX_PRO_6000)


def test_vllms_own_defaults():
    """vllm/engine/arg_utils.py: 8192 and 1024 from 70 GiB on; for a CPU 2048 and 128 a rank."""
    settings = settings_from({"model": "m"}, RTX_PRO_6000)
    assert (settings.step_tokens, settings.sequences, settings.utilization) == (8192, 1024, 0.92)
    assert (settings.eager, settings.longest, settings.speculation) == (False, None, None)
    settings = settings_from({"model": "m", "tensor-parallel-size": "2"}, CPU)
    assert (settings.step_tokens, settings.sequences) == (4096, 256)
    assert settings_from({"max-num-batched-tokens": "512"}, RTX_PRO_6000).sequences == 512
    assert settings_from({"max-model-len": "auto"}, RTX_PRO_6000).longest == -1


SHORT = {"VLLM_ENGINE_READY_TIMEOUT_S": "600"}


def test_a_load_that_is_cut_off(found):
    (finding,) = found("--api-server-count", "2", environment=SHORT)
    assert finding.verdict is FAILS
    assert finding.text.startswith("2 API servers give the engine 600 s to load, by VLLM_ENGINE_READY_TIMEOUT_S")


def test_one_api_server_waits_without_a_limit(found):
    assert found(environment=SHORT) == []
    assert found("--api-server-count", "2") == []


def test_a_limit_that_is_no_number(found):
    with pytest.raises(ConfigurationError, match="VLLM_ENGINE_READY_TIMEOUT_S 'long' is no whole number"):
        found(environment={"VLLM_ENGINE_READY_TIMEOUT_S": "long"})
