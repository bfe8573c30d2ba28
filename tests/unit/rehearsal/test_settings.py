"""The engine's settings as vLLM takes them."""

import json

import pytest

from aerie.engine_arguments import ConfigurationError, read_arguments
from aerie.rehearsal.static.hardware import GIB, H200, RTX_PRO_6000, Hardware
from aerie.rehearsal.static.settings import settings_from

CPU = Hardware("CPU", None, 24 * GIB, 0, 1)


def settings(*words, drafted=0, hardware=H200, environment=None):
    given = {"method": "eagle3", "model": "/d", "num_speculative_tokens": drafted}
    speculating = ["--speculative-config", json.dumps(given)] if drafted else []
    return settings_from(read_arguments(["m", *speculating, *words]), hardware, environment or {})


@pytest.mark.parametrize(
    ("words", "drafted", "captured", "decoding"),
    [
        # As two starts on an H200 and one on two of them showed: their bars end with these numbers.
        ([], 3, 51, 49),
        (["--max-num-seqs", "5"], 3, 9, 4),
        (["--max-num-seqs", "5"], 0, 5, 4),
        (["--max-num-seqs", "5", "-cc.cudagraph_mode", "PIECEWISE"], 3, 9, 0),
        (["--max-num-seqs", "5", "-cc.cudagraph_mode", "NONE"], 3, 0, 0),
        (["--enforce-eager"], 3, 0, 0),
        (["--cudagraph-capture-sizes", "1", "8", "20", "32"], 3, 4, 4),
        (["--max-num-seqs", "5", "--cudagraph-capture-sizes", "1", "8", "20", "32"], 3, 4, 3),
        (["--max-cudagraph-capture-size", "16"], 0, 5, 5),
        (["--max-num-seqs", "5", "--max-num-batched-tokens", "16"], 3, 5, 3),
    ],
)
def test_graphs_are_those_that_vllm_captures(words, drafted, captured, decoding):
    found = settings(*words, drafted=drafted)
    assert (len(found.graph_sizes), len(found.decode_graph_sizes)) == (captured, decoding), found.graph_sizes


def test_a_cpu_captures_none():
    assert settings(drafted=3, hardware=CPU).graph_sizes == ()


def test_a_cache_of_a_given_size():
    assert settings().cache is None
    assert settings("--kv-cache-memory-bytes", "2G").cache == 2 * GIB
    assert settings("--kv-cache-memory", "1073741824").cache == GIB
    for hardware, cache in ((CPU, 3 * GIB), (RTX_PRO_6000, None)):
        assert settings(hardware=hardware, environment={"VLLM_CPU_KVCACHE_SPACE": "3"}).cache == cache
    with pytest.raises(ConfigurationError, match=r"VLLM_CPU_KVCACHE_SPACE '0\.5' is no whole number"):
        settings(hardware=CPU, environment={"VLLM_CPU_KVCACHE_SPACE": "0.5"})


def test_max_model_len_that_vllm_finds():
    for words in (["--max-model-len", "auto"], ["--max-model-len", "-1"]):
        assert settings(*words).fits_itself
    assert not settings("--max-model-len", "8k").fits_itself
    assert settings("--max-model-len", "8k").longest == 8000


def test_rows_of_a_step():
    assert (settings(drafted=3).rows, settings().rows) == (4096, 1024)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--max-num-seqs", "0"], "--max-num-seqs 0 cannot be: give 1 to 1048576"),
        (["--max-num-seqs", "-1"], "--max-num-seqs -1 cannot be"),
        (["--max-num-seqs", "1000000000000"], "--max-num-seqs 1000000000000 cannot be"),
        (["--max-num-batched-tokens", "0"], "--max-num-batched-tokens 0 cannot be"),
        (["--max-model-len", "0"], "--max-model-len 0 cannot be: give 1 or more, or auto"),
        (["--max-model-len", "-5"], "--max-model-len -5 cannot be"),
        (["--max-cudagraph-capture-size", "100000000000"], "--max-cudagraph-capture-size 100000000000 cannot be"),
        (["-cc.max_cudagraph_capture_size", "100000000000"], "--max-cudagraph-capture-size 100000000000 cannot be"),
        (["--cudagraph-capture-sizes", "1", "0"], "--cudagraph-capture-sizes 0 cannot be"),
        (["--gpu-memory-utilization", "1e999"], "--gpu-memory-utilization '1e999' is no number"),
        (["--gpu-memory-utilization", "nan"], "--gpu-memory-utilization 'nan' is no number"),
        (["--max-model-len", "9" * 5000], "is no whole number"),
        (["--tensor-parallel-size"], "--tensor-parallel-size has no value"),
        (["-tp", "--max-num-seqs", "8"], "--tensor-parallel-size has no value"),
        (["--max-num-seqs"], "--max-num-seqs has no value"),
        (["--max-model-len"], "--max-model-len has no value"),
        (["--gpu-memory-utilization"], "--gpu-memory-utilization has no value"),
        (["--kv-cache-memory-bytes"], "--kv-cache-memory-bytes has no value"),
        (["--spec-tokens"], "--spec-tokens has no value"),
        (["--spec-model", "/x", "-sc", '{"model": "/y"}'], "--spec-model and model of speculative-config: give one"),
    ],
)
def test_numbers_that_cannot_be(words, message):
    with pytest.raises(ConfigurationError, match=message):
        settings(*words)


def test_fewer_than_no_drafted_tokens():
    found = settings("-sc", '{"method": "eagle3", "num_speculative_tokens": -1}', "--max-num-seqs", "128")
    assert (found.drafted, found.rows, found.decode_graph_sizes[-1]) == (0, 128, 128)


def test_speculation_by_the_short_way():
    found = settings("--spec-model", "/x", "--spec-tokens", "2", "-sc.method", "eagle3").speculation
    assert (found.method, found.model, found.tokens) == ("eagle3", "/x", 2)


@pytest.mark.parametrize("option", ["-tp", "-pp", "-dcp", "-dp"])
def test_no_ranks_at_all(option):
    with pytest.raises(ConfigurationError, match="-parallel-size 0 is no number of ranks: give 1 or more"):
        settings(option, "0")
