"""The decode kernel's shapes, and what is said of the bytes that a compiler counts; the contracts compile for real."""

from __future__ import annotations

import dataclasses
import stat
import sys
from pathlib import Path

import pytest

from aerie.checkpoint.config import read_drafter, read_target
from aerie.engine_arguments import read_arguments
from aerie.rehearsal import kernels
from aerie.rehearsal.findings import Verdict
from aerie.rehearsal.kernels import SM_90, SM_120, DecodeShape, compile_decode, judge, shape_of, splits
from aerie.rehearsal.static.arguments import Setup
from aerie.rehearsal.static.hardware import RTX_PRO_6000
from aerie.rehearsal.static.settings import settings_from

SHIPPED = ["--config", str(Path(__file__).parents[3] / "config/kimi-k2.5.yaml")]


@pytest.fixture
def setup(kimi, mla_drafter):
    def of(*arguments, hardware=RTX_PRO_6000):
        settings = settings_from(read_arguments([*SHIPPED, *arguments]), hardware)
        return Setup(settings, read_target(kimi.directory), read_drafter(mla_drafter.directory), hardware, frozenset())

    return of


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    """In the place of the Python that would compile: a program that prints this and ends so."""

    def says(output="", complaint="", status=0):
        program = tmp_path / "python"
        program.write_text(
            f"#!{sys.executable}\nimport sys\nopen({str(tmp_path / 'asked')!r}, 'w').write(repr(sys.argv[1:]))\n"
            f"print({output!r})\nprint({complaint!r}, file=sys.stderr)\nsys.exit({status})\n"
        )
        program.chmod(stat.S_IRWXU)
        monkeypatch.setattr(kernels.sys, "executable", str(program))
        return tmp_path / "asked"

    return says


def test_the_shape_is_that_of_the_real_model_over_its_longest_request(setup):
    assert shape_of(setup()) == DecodeShape(
        heads=8, longest=98304, page=16, splits=256, latent=512, rope=64, has_fp8_cache=False
    )
    assert shape_of(setup("-tp", "4", "-dcp", "2")).heads == 32
    assert shape_of(setup("--kv-cache-dtype", "fp8")).has_fp8_cache
    assert shape_of(setup("--max-model-len", "262144")).splits == 376  # two for each multiprocessor, not 512


@pytest.mark.parametrize(("longest", "parts"), [(1, 1), (1023, 1), (1024, 2), (1600, 4), (131072, 256), (10**6, 376)])
def test_contexts_are_split_as_the_engine_splits_them(longest, parts):
    assert splits(longest, 188) == parts


FP8 = DecodeShape(heads=8, longest=131072, page=16, splits=256, latent=512, rope=64, has_fp8_cache=True)
NEEDED = {"_fwd_grouped_kernel_stage1": 102_400, "_fwd_kernel_stage2": 0}


def test_a_kernel_that_needs_a_kilobyte_too_much_is_told_with_both_figures_and_the_way_out():
    finding = judge(FP8, SM_120, NEEDED)
    assert finding.verdict is Verdict.FAILED
    assert "_fwd_grouped_kernel_stage1 needs 102,400 bytes" in finding.text
    assert "a block of sm_120 has 101,376" in finding.text
    assert "kv-cache-dtype to bfloat16" in finding.remedy
    assert "decode-fp8-kv-fits-sm120" in finding.remedy


def test_a_larger_chip_has_room_for_it():
    assert judge(FP8, SM_90, NEEDED).verdict is Verdict.PASSED


def test_a_bfloat16_cache_that_does_not_fit_is_not_told_to_become_one():
    finding = judge(dataclasses.replace(FP8, has_fp8_cache=False), SM_120, NEEDED)
    assert (finding.verdict, "bfloat16" in finding.remedy) == (Verdict.FAILED, False)


def test_it_is_compiled_by_a_process_of_its_own(setup, compiler):
    asked = compiler('a line of a library\n{"_fwd_grouped_kernel_stage1": 63488, "_fwd_kernel_stage2": 0}')
    finding = compile_decode(setup())
    assert finding.verdict is Verdict.PASSED
    assert "63,488 bytes" in finding.text
    assert "'aerie.rehearsal.decode_kernel', 'sm_120'" in asked.read_text()


def test_a_compiler_s_error_is_a_failure_with_its_last_line(setup, compiler):
    compiler(complaint="Traceback\ntriton.compiler.errors.CompilationError: at 1:1", status=1)
    finding = compile_decode(setup())
    assert finding.verdict is Verdict.FAILED
    assert finding.text.endswith("triton.compiler.errors.CompilationError: at 1:1")


def test_what_cannot_be_compiled_here_is_skipped_and_says_why(setup, compiler):
    compiler(complaint="Traceback\nModuleNotFoundError: No module named 'triton'", status=1)
    finding = compile_decode(setup())
    assert (finding.verdict, "No module named 'triton'" in finding.text) == (Verdict.SKIPPED, True)
    for chip in (None, "sm_70"):
        finding = compile_decode(setup(hardware=dataclasses.replace(RTX_PRO_6000, chip=chip)))
        assert finding.verdict is Verdict.SKIPPED


def test_where_decoding_takes_other_kernels_there_is_nothing_to_compile(setup, compiler):
    asked = compiler('{"_fwd_grouped_kernel_stage1": 63488}')
    h200 = dataclasses.replace(RTX_PRO_6000, chip="sm_90")
    finding = compile_decode(setup(hardware=h200))
    assert (finding.verdict, "takes FLASH_ATTN_MLA on sm_90" in finding.text) == (Verdict.SKIPPED, True)
    assert not asked.exists()
    assert compile_decode(setup("--attention-backend", "TRITON_MLA", hardware=h200)).verdict is Verdict.PASSED
