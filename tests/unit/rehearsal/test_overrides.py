"""What the rehearsal's engine is told over the operator's own arguments."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from aerie.checkpoint.shrink import Profile
from aerie.engine_arguments import read_arguments
from aerie.rehearsal.overrides import Override, engine_words, overrides
from aerie.rehearsal.static.hardware import GIB, RTX_PRO_6000, Hardware
from aerie.rehearsal.static.settings import settings_from

CPU = Hardware("CPU", None, 24 * GIB, 0, 1)
CONFIG = Path(__file__).parents[3] / "config/kimi-k2.5.yaml"


def changed(profile, *words, beside=None, hardware=RTX_PRO_6000, longest=98304):
    settings = settings_from(read_arguments(words), hardware)
    found = overrides(settings, Path("/w/drafter"), 41234, longest, profile, beside)
    return {each.argument: (each.given, each.here) for each in found}


def test_on_gpus_only_the_place_changes():
    settings = read_arguments(["--config", str(CONFIG)])
    found = changed(Profile.GPU, "--config", str(CONFIG))
    assert found == {
        "host": (None, "127.0.0.1"),
        "port": ("8000", 41234) if settings.get("port") else (None, 41234),
        "speculative-config": (
            settings["speculative-config"],
            settings["speculative-config"] | {"model": "/w/drafter"},
        ),
    }


def test_a_cpu_has_one_rank_and_less_of_everything():
    found = changed(Profile.CPU, "--config", str(CONFIG))
    assert found["tensor-parallel-size"] == (8, 1)
    assert found["kv-cache-dtype"] == ("bfloat16", "auto")
    assert found["enforce-eager"] == (None, True)
    assert found["max-model-len"] == ("98304", 2048)
    assert found["max-num-batched-tokens"] == ("8192", 2048)
    assert found["max-num-seqs"] == ("128", 16)
    assert "pipeline-parallel-size" not in found


def test_a_cpu_keeps_what_it_can_do():
    words = ["--max-model-len", "1024", "--max-num-batched-tokens", "1024", "--max-num-seqs", "4", "--enforce-eager"]
    assert changed(Profile.CPU, *words, hardware=CPU, longest=1024).keys() == {"host", "port"}


def test_beside_a_service_it_takes_less_than_is_to_be_free():
    found = changed(Profile.GPU, "--config", str(CONFIG), beside=RTX_PRO_6000)
    given, share = found["gpu-memory-utilization"]
    assert given == 0.93
    assert 6 * GIB < share * RTX_PRO_6000.memory < 8 * GIB
    assert found["max-num-seqs"] == (128, 4)
    assert found["max-model-len"] == (98304, 8192)


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (["--moe-backend", "marlin"], "moe-backend"),
        (["--quantization", "compressed-tensors"], "quantization"),
        (["-q", "compressed-tensors"], "quantization"),
        (["--load-format", "fastsafetensors"], "load-format"),
        (["--distributed-executor-backend", "ray"], "distributed-executor-backend"),
        (["-n", "2", "-r", "1"], "nnodes"),
        (["-n", "2", "-r", "1"], "node-rank"),
        (["--prefill-context-parallel-size", "2"], "prefill-context-parallel-size"),
        (["--dcp-kv-cache-interleave-size", "64"], "dcp-kv-cache-interleave-size"),
        (["--enable-expert-parallel"], "enable-expert-parallel"),
        (["--max-num-active-seqs", "64"], "max-num-active-seqs"),
    ],
)
def test_what_a_cpu_cannot_take_is_left_out(words, option):
    assert changed(Profile.CPU, "--config", str(CONFIG), *words)[option][1] is None
    assert changed(Profile.GPU, "--config", str(CONFIG), *words).keys() == {"host", "port", "speculative-config"}


@pytest.mark.parametrize("words", [["--attention-backend", "TRITON_MLA"], ["--load-format", "no-such"]])
def test_names_that_vllm_looks_at_on_a_cpu_too_stay(words):
    assert changed(Profile.CPU, "--config", str(CONFIG), *words) == changed(Profile.CPU, "--config", str(CONFIG))


def test_a_drafter_on_a_cpu_is_on_that_rank_alone():
    given = {"method": "eagle3", "model": "/d", "draft_tensor_parallel_size": 8, "kv_cache_dtype": "fp8"}
    words = ["m", "--speculative-config", json.dumps(given)]
    assert changed(Profile.CPU, *words)["speculative-config"] == (given, {"method": "eagle3", "model": "/w/drafter"})
    assert changed(Profile.GPU, *words)["speculative-config"][1] == given | {"model": "/w/drafter"}


def test_the_shrunken_pair_is_one_part_on_gpus_too():
    words = ["m", "--load-format", "sharded_state", "--model-loader-extra-config", "{}"]
    found = changed(Profile.GPU, *words)
    assert found["load-format"] == ("sharded_state", None)
    assert found["model-loader-extra-config"] == ({}, None)
    assert "model-loader-extra-config" not in changed(Profile.GPU, "m", "--load-format", "sharded_state")


def test_beside_a_service_no_size_is_asked_for():
    sizes = {"cudagraph_capture_sizes": [1, 512], "cudagraph_mode": "FULL"}
    found = changed(
        Profile.GPU, "m", "--kv-cache-memory-bytes", "20G", "--num-gpu-blocks-override", "9000",
        "--max-num-active-seqs", "64", "--cudagraph-capture-sizes", "1", "512", "-cc", json.dumps(sizes),
        beside=RTX_PRO_6000,
    )  # fmt: skip
    for option in (
        "kv-cache-memory-bytes", "num-gpu-blocks-override", "cudagraph-capture-sizes", "max-num-active-seqs",
    ):  # fmt: skip
        assert found[option][1] is None
    assert found["compilation-config"] == (sizes, {"cudagraph_mode": "FULL"})


FILE = """
model: /data/models/Kimi-K2.5
port: 8000
tensor_parallel_size: 8
spec-tokens: 3
speculative-config.method: eagle3
attention-back: TRITON_MLA
no-enforce-eager: true
served-model-name: [kimi, k2]
"""
CHANGED = [
    Override("port", 8000, 41234, ""),
    Override("enforce-eager", None, here=True, why=""),
    Override("attention-backend", "TRITON_MLA", None, ""),
    Override("speculative-config", {}, {"model": "/w/drafter"}, ""),
]


@pytest.mark.parametrize("model", [[], ["/data/models/Kimi-K2.5"], ["--model", "/data/models/Kimi-K2.5"]])
@pytest.mark.parametrize("spelling", [["-sc.model", "/real"], ["--spec-model", "/real"], ["--speculative-conf={}"]])
def test_words(tmp_path, model, spelling):
    file = tmp_path / "of-the-operator.yml"
    file.write_text(FILE)
    words = engine_words(
        [*model, "--config", str(file), *spelling, "-tp", "4", "--port=9000"], Path("/w/target"), CHANGED, tmp_path
    )
    assert words == [
        *("/w/target", "--config", str(tmp_path / "serve.yaml"), "-tp", "4"),
        *("--port", "41234", "--enforce-eager", "--speculative-config", '{"model": "/w/drafter"}'),
    ]
    assert yaml.safe_load((tmp_path / "serve.yaml").read_text()) == {
        "tensor_parallel_size": 8, "served-model-name": ["kimi", "k2"],
    }  # fmt: skip
    assert file.read_text() == FILE
    assert read_arguments(words)["speculative-config"] == {"model": "/w/drafter"}


def test_words_without_a_file(tmp_path):
    assert engine_words(["m", "-tp", "8"], Path("/t"), [], tmp_path) == ["/t", "-tp", "8"]
    assert not any(tmp_path.iterdir())
