"""What real logs say of the engine's choices, and whether the real model would get the same."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from aerie.checkpoint.config import read_drafter, read_target
from aerie.engine_arguments import read_arguments
from aerie.rehearsal.backends import (
    ATTENTION,
    DRAFTER,
    EXPERTS,
    GRAPHS,
    PREFILL,
    RUNNER,
    SAMPLER,
    chosen,
    compare,
    expected,
)
from aerie.rehearsal.findings import Verdict
from aerie.rehearsal.static.arguments import Setup
from aerie.rehearsal.static.hardware import RTX_PRO_6000
from aerie.rehearsal.static.settings import settings_from
from aerie.startup.lines import parse

REPOSITORY = Path(__file__).parents[3]
SHIPPED = ["--config", str(REPOSITORY / "config/kimi-k2.5.yaml")]
CPU = dataclasses.replace(RTX_PRO_6000, name="CPU", chip=None, count=1)
H200 = dataclasses.replace(RTX_PRO_6000, name="H200", chip="sm_90", count=1)
NO_FLASHINFER = {"VLLM_USE_FLASHINFER_SAMPLER": "0"}


def log(name):
    return parse((REPOSITORY / f"tests/fixtures/logs/vllm-0.32.0-{name}.log").read_text())


def said(*lines):
    return parse("\n".join(lines))


def speculation(**options):
    given = {"method": "eagle3", "model": "/d", "num_speculative_tokens": 3}
    return ["--speculative-config", json.dumps(given | options)]


@pytest.fixture
def setup(kimi, mla_drafter, published):
    def of(*arguments, hardware=RTX_PRO_6000, drafter=None):
        settings = settings_from(read_arguments([*SHIPPED, *arguments]), hardware)
        directory = (published(drafter) if drafter else mla_drafter).directory
        return Setup(settings, read_target(kimi.directory), read_drafter(directory), hardware, frozenset())

    return of


LLAMA = "lightseekorg--kimi-k2.5-eagle3"


def names(setup, environment=None):
    return {part: choice.name for part, choice in expected(setup, environment or {}).items()}


ON_AN_H200 = {
    RUNNER: "V2", ATTENTION: "FLASH_ATTN_MLA", PREFILL: "FLASH_ATTN", EXPERTS: "TRITON Unquantized",
    SAMPLER: "PyTorch", DRAFTER: "FLASH_ATTN", GRAPHS: "FULL, PIECEWISE",
}  # fmt: skip
ON_A_CPU = {RUNNER: "V1", ATTENTION: "CPU_MLA", PREFILL: "CPU_SDPA_MLA", EXPERTS: "CPU Unquantized"}


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("h200-healthy-compiled", ON_AN_H200),
        ("h200-healthy-eager", ON_AN_H200 | {GRAPHS: "none"}),
        ("h200x2-healthy-tp2", ON_AN_H200 | {ATTENTION: "TRITON_MLA", GRAPHS: "PIECEWISE"}),
        ("cpu-healthy-compiled", ON_A_CPU),
        ("cpu-healthy-tp2", ON_A_CPU),
    ],
)
def test_a_log_s_choices(name, found):
    assert chosen(log(name)) == found


def test_a_drafter_with_the_target_s_attention_says_so_once_more_or_never():
    found = chosen(log("h200x2-healthy-pp2"))
    # The last stage has the drafter, and both stages said it once before.
    assert (found[ATTENTION], found.get(DRAFTER)) == ("TRITON_MLA", None)


def test_what_a_rank_says_of_its_target_while_another_has_come_to_the_drafter_is_no_drafter_s():
    found = chosen(said(
        "(Worker_TP1 pid=1) INFO 11-29 20:05:39 [cuda.py:446] Using AttentionBackendEnum.TRITON_MLA backend.",
        "(Worker_TP1 pid=1) INFO 11-29 20:05:40 [eagle3_utils.py:27] Using Eagle3 auxiliary layers from config: (2, 3)",
        "(Worker_TP0 pid=2) INFO 11-29 20:05:41 [cuda.py:446] Using AttentionBackendEnum.TRITON_MLA backend.",
        "(Worker_TP1 pid=1) INFO 11-29 20:05:42 [cuda.py:446] Using AttentionBackendEnum.FLASH_ATTN backend.",
    ))  # fmt: skip
    assert found == {ATTENTION: "TRITON_MLA", DRAFTER: "FLASH_ATTN"}


def test_quantised_experts_and_flashinfer_s_sampler_are_read():
    found = chosen(said(
        "(EngineCore pid=7) INFO 11-29 14:06:10 [int_wna16.py:287] Using 'MARLIN' WNA16 MoE backend.",
        "(EngineCore pid=7) INFO 11-29 14:06:10 [sampler.py:124] Using FlashInfer for top-p & top-k sampling.",
    ))  # fmt: skip
    assert found == {EXPERTS: "MARLIN WNA16", SAMPLER: "FlashInfer"}


SHIPPED_ON_SM_120 = {
    ATTENTION: "TRITON_MLA", DRAFTER: "TRITON_MLA", PREFILL: "FLASH_ATTN", EXPERTS: "MARLIN WNA16",
    SAMPLER: "FlashInfer", RUNNER: "V2", GRAPHS: "FULL, PIECEWISE",
}  # fmt: skip


def test_what_the_shipped_configuration_gets_on_the_host_it_is_for(setup):
    assert names(setup()) == SHIPPED_ON_SM_120
    assert names(setup(), NO_FLASHINFER) == SHIPPED_ON_SM_120 | {SAMPLER: "PyTorch"}


@pytest.mark.parametrize(
    ("arguments", "part", "name"),
    [
        (["--attention-backend", "triton_mla"], ATTENTION, "TRITON_MLA"),
        (["-ac.backend", "FLASHMLA"], ATTENTION, "FLASHMLA"),
        (["--kv-cache-dtype", "fp8"], ATTENTION, "FLASHMLA"),
        (["--kv-cache-dtype", "fp8", *speculation(kv_cache_dtype="bfloat16")], DRAFTER, "FLASH_ATTN_MLA"),
        (["--attention-backend", "TRITON_MLA"], DRAFTER, "TRITON_MLA"),
        (speculation(attention_backend="triton_mla"), DRAFTER, "TRITON_MLA"),
        (["--moe-backend", "triton"], EXPERTS, "TRITON WNA16"),
        (["--enforce-eager"], GRAPHS, "none"),
        (["-cc.cudagraph_mode", "PIECEWISE"], GRAPHS, "PIECEWISE"),
        (["-cc.cudagraph_mode", "full_decode_only"], GRAPHS, "FULL"),
        (["-dcp", "2"], GRAPHS, "PIECEWISE"),
    ],
)
def test_settings_decide_on_an_h200(setup, arguments, part, name):
    assert names(setup(*arguments, hardware=H200))[part] == name


@pytest.mark.parametrize(("cache", "name"), [("bfloat16", "FLASH_ATTN"), ("fp8", "FLASHINFER")])
def test_a_llama_drafter_s_cache_decides_on_sm_120(setup, cache, name):
    assert names(setup("--kv-cache-dtype", cache, drafter=LLAMA))[DRAFTER] == name


def test_unquantised_experts(setup, kimi):
    kimi.change(quantization_config=None)
    assert names(setup(hardware=H200))[EXPERTS] == "TRITON Unquantized"
    assert names(setup())[EXPERTS] == "FlashInfer CUTLASS Unquantized"


def test_nothing_is_expected_of_a_cpu_or_of_a_chip_without_rules(setup):
    assert names(setup(hardware=CPU)) == {}
    of_b200 = names(setup(hardware=dataclasses.replace(H200, chip="sm_100")))
    assert not {ATTENTION, PREFILL, EXPERTS, DRAFTER} & of_b200.keys()


def verdicts(findings):
    return {finding.check: finding.verdict for finding in findings}


def test_the_same_choices_pass(setup, kimi):
    kimi.change(quantization_config=None)  # as the model of this log
    found = compare(setup(hardware=H200, drafter=LLAMA), H200, NO_FLASHINFER, log("h200-healthy-compiled"))
    assert set(verdicts(found).values()) == {Verdict.PASSED}


def test_another_choice_fails_and_says_which(setup, kimi):
    kimi.change(quantization_config=None)
    setup = setup("--attention-backend", "TRITON_MLA", hardware=H200, drafter=LLAMA)
    found = list(compare(setup, H200, NO_FLASHINFER, log("h200-healthy-compiled")))
    assert verdicts(found)[ATTENTION] is Verdict.FAILED
    told = next(finding for finding in found if finding.check == ATTENTION)
    assert told.text.startswith("the engine chose FLASH_ATTN_MLA, and the real model gets TRITON_MLA")


def test_what_the_settings_alone_decide_is_a_warning(setup, kimi):
    kimi.change(quantization_config=None)
    found = compare(setup(hardware=H200, drafter=LLAMA), H200, {}, log("h200-healthy-eager"))
    told = {finding.check: finding.text for finding in found if finding.verdict is Verdict.WARNED}
    assert told == {
        GRAPHS: "the engine chose none, where FULL, PIECEWISE was expected of these settings",
        SAMPLER: "the engine chose PyTorch, where FlashInfer was expected of these settings",
    }


def test_experts_that_lost_their_quantisation_fail(setup):
    found = compare(setup(hardware=H200, drafter=LLAMA), H200, NO_FLASHINFER, log("h200-healthy-compiled"))
    assert {check for check, verdict in verdicts(found).items() if verdict is Verdict.FAILED} == {EXPERTS}


def test_a_drafter_that_says_nothing_has_the_target_s_backend(setup, kimi):
    kimi.change(quantization_config=None)
    found = verdicts(compare(setup("--attention-backend", "TRITON_MLA"), H200, {}, log("h200x2-healthy-pp2")))
    assert found[DRAFTER] is Verdict.PASSED
    assert found[SAMPLER] is Verdict.SKIPPED  # the last rank's line is not in that log


def test_a_cpu_proves_none_and_says_what_the_real_model_gets(setup):
    (finding,) = compare(setup(), CPU, {}, log("cpu-healthy-compiled"))
    assert finding.verdict is Verdict.SKIPPED
    assert "attention backend CPU_MLA" in finding.text
    assert "on sm_120 the real model gets attention backend TRITON_MLA" in finding.text
    assert "MARLIN WNA16" in finding.text
    (finding,) = compare(setup(hardware=CPU), CPU, {}, log("cpu-healthy-compiled"))
    assert "for a chip that --chip names" in finding.text


def test_another_chip_than_the_planned_one_is_told(setup, kimi):
    kimi.change(quantization_config=None)
    *rest, last = compare(setup(drafter=LLAMA), H200, NO_FLASHINFER, log("h200-healthy-compiled"))
    assert {finding.verdict for finding in rest} == {Verdict.PASSED}
    assert (last.verdict, last.check) == (Verdict.SKIPPED, "backends")
    assert "this machine is sm_90; on sm_120 the real model gets attention backend TRITON_MLA" in last.text
