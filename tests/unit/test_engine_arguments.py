"""`vllm serve`'s arguments as vLLM's own parser would pair them."""

from __future__ import annotations

import pytest

from aerie.engine_arguments import ConfigurationError, is_one_of, read_arguments, spelled, without

FILE = """
model: /data/models/Kimi-K2.5
tensor_parallel_size: 8
enable-auto-tool-choice: true
async-scheduling: false
speculative-config:
  method: eagle3
  model: /data/models/drafter
  num_speculative_tokens: 3
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "serve.yaml"
    path.write_text(FILE)
    return str(path)


def test_the_command_line_wins_over_the_file(file):
    assert read_arguments(["--config", file, "-tp", "4", "--max_model_len=8k", "--no-enable-auto-tool-choice"]) == {
        "config": file,
        "model": "/data/models/Kimi-K2.5",
        "tensor-parallel-size": "4",
        "enable-auto-tool-choice": False,
        "async-scheduling": False,
        "max-model-len": "8k",
        "speculative-config": {"method": "eagle3", "model": "/data/models/drafter", "num_speculative_tokens": 3},
    }


@pytest.mark.parametrize(
    ("arguments", "option", "value"),
    [
        (["-pp", "2"], "pipeline-parallel-size", "2"),
        (["-dcp=4"], "decode-context-parallel-size", "4"),
        (["--enforce-eager"], "enforce-eager", None),
        (["--enforce-eager", "--no-enforce-eager"], "enforce-eager", False),
        (["--served-model-name", "a", "b"], "served-model-name", ["a", "b"]),
        (["-cc.cudagraph_mode", "PIECEWISE"], "compilation-config", {"cudagraph_mode": "PIECEWISE"}),
        (["-cc.cudagraph_capture_sizes=[1,2]"], "compilation-config", {"cudagraph_capture_sizes": [1, 2]}),
        (["-cc.pass_config.fuse_norm", "true", "-cc.pass_config.x", "y"], "compilation-config",
         {"pass_config": {"fuse_norm": True, "x": "y"}}),
        (["--speculative-config", "no json"], "speculative-config", "no json"),
    ],
)  # fmt: skip
def test_spellings(arguments, option, value):
    assert read_arguments(["m", *arguments]) == {"model": "m", option: value}


# What vLLM 0.32.0's FlexibleArgumentParser makes of them.
@pytest.mark.parametrize(
    ("arguments", "speculation"),
    [
        (["--speculative-config.num_speculative_tokens", "5"], {"num_speculative_tokens": 5}),
        (["-sc", '{"method": "eagle3"}', "--speculative-config.model", "/b"], {"model": "/b"}),
        (["--speculative-config.model", "/b", "-sc", '{"method": "eagle3"}'], {"model": "/b"}),
        (["--speculative-config.model", "/b", "-sc.method", "x"], {"method": "x"}),
        (["-sc.model", "/b", "-sc.method", "x"], {"model": "/b", "method": "x"}),
    ],
)
def test_what_is_given_key_by_key_takes_the_place_of_all_the_rest(file, arguments, speculation):
    assert read_arguments(["--config", file, *arguments])["speculative-config"] == speculation


def test_a_file_in_one_word_is_refused_since_vllm_would_start_without_it(file):
    with pytest.raises(ConfigurationError, match=f"does not look at it in one word, give --config {file} as two"):
        read_arguments([f"--config={file}"])


def test_a_line_without_a_value_is_refused_since_vllm_reads_the_word_none(tmp_path):
    path = tmp_path / "serve.yaml"
    path.write_text("model: m\nquantization:\n")
    with pytest.raises(ConfigurationError, match="quantization has no value, which vLLM reads as the word None"):
        read_arguments(["--config", str(path)])


def test_an_option_may_be_shortened():
    settings = read_arguments(["m", "--max-model", "8"])
    assert spelled("max-model-len", settings) == "max-model"
    assert spelled("max-num-seqs", settings) is None
    assert spelled("model", settings) == "model"


def test_of_several_beginnings_of_an_option_the_last_counts(file):
    settings = read_arguments(["--config", file, "--tensor-parallel", "4"])
    assert settings[spelled("tensor-parallel-size", settings)] == "4"
    settings = read_arguments(["m", "--max-model-len", "9", "--max-model", "8", "--max-model-len", "7"])
    assert settings[spelled("max-model-len", settings)] == "7"


# Also what vLLM 0.32.0's FlexibleArgumentParser makes of them.
@pytest.mark.parametrize(
    ("text", "words", "expected"),
    [
        ("""speculative-config: '{"method": "eagle3", "model": "/d"}'""", [],
         {"speculative-config": {"method": "eagle3", "model": "/d"}}),
        ("""compilation_config: '{"cudagraph_mode": "NONE"}'""", [],
         {"compilation-config": {"cudagraph_mode": "NONE"}}),
        ("speculative-config.model: /d", ["--speculative_config.method", "eagle3"],
         {"speculative-config": {"model": "/d", "method": "eagle3"}}),
        ("speculative-config.model: /d", ["-sc.method", "eagle3"], {"speculative-config": {"method": "eagle3"}}),
        ("speculative-config.model: /d", ["-sc", '{"method": "eagle3"}'], {"speculative-config": {"model": "/d"}}),
        ("no-enforce-eager: true", [], {"enforce-eager": False}),
        ("device-memory-utilization: 0.5", [], {"gpu-memory-utilization": 0.5}),
        ("seed: 1", ["-n2", "-qawq", "-r=1"],
         {"seed": 1, "nnodes": "2", "quantization": "awq", "node-rank": "1"}),
    ],
)  # fmt: skip
def test_a_file_is_read_like_words(tmp_path, text, words, expected):
    path = tmp_path / "serve.yaml"
    path.write_text(f"model: m\n{text}\n")
    assert read_arguments(["--config", str(path), *words]) == {"config": str(path), "model": "m", **expected}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("compilation-config: &a {x: *a}", "compilation-config cannot be written as JSON"),
        ("stop: &a [*a]", "stop cannot be written as JSON"),
        ("compilation-config: {2020-01-01: 3}", "compilation-config cannot be written as JSON"),
        ("speculative-config: {model: 2020-01-01}", "speculative-config cannot be written as JSON"),
        ('tokenizer: "a\\0b"', "tokenizer holds a NUL character"),
        ('speculative-config: {model: "a\\0b"}', "speculative-config holds a NUL character"),
        (f"x: {'[' * 5000}{']' * 5000}", "nested too deeply"),
    ],
)
def test_what_vllm_cannot_pass_on_is_told(tmp_path, text, message):
    path = tmp_path / "serve.yaml"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=message):
        read_arguments(["--config", str(path)])


def test_json_that_is_nested_without_end_stays_text():
    assert read_arguments(["m", "-cc", "[" * 100_000])["compilation-config"] == "[" * 100_000


def test_dates_and_numbers_as_names_are_left_to_vllm(tmp_path):
    path = tmp_path / "serve.yaml"
    path.write_text("served-model-name: [2025-01-01, 3]")
    assert len(read_arguments(["--config", str(path)])["served-model-name"]) == 2


def test_a_file_that_vllm_would_not_take_for_one(tmp_path):
    path = tmp_path / "serve.conf"
    path.write_text("model: m")
    with pytest.raises(ConfigurationError, match=r"ends in \.yaml or \.yml"):
        read_arguments(["--config", str(path)])


@pytest.mark.parametrize(
    "spelling",
    [
        ["--speculative-config", '{"model": "/d"}'],
        ['--speculative_config={"model": "/d"}'],
        ["--speculative-conf", "{}"],
        ["-sc", "{}"],
        ["-sc={}"],
        ["-sc.model", "/d", "--speculative-config.method=eagle3", "--speculative_config.num_speculative_tokens", "3"],
        ["--spec-model", "/d", "--spec_method=eagle3", "--spec-tokens", "3"],
        ["-q", "awq", "-qawq", "-q=awq", "--quantization", "awq"],
        ["--enforce-eager", "--no-enforce-eager", "--no-enforce-e"],
        ["--served-model-name", "a", "b"],
        ["--device-memory-utilization", "0.9"],
        ["--model", "/m"],
    ],
)
def test_words_without_some_options(spelling):
    options = [
        "model", "speculative-config", "spec-model", "spec-method", "spec-tokens", "quantization", "enforce-eager",
        "served-model-name", "gpu-memory-utilization",
    ]  # fmt: skip
    words = ["/m", "-tp", "8", *spelling, "--seed", "-1", "--trust-remote-code"]
    assert without(words, options) == ["-tp", "8", "--seed", "-1", "--trust-remote-code"]
    assert without(words, ["host"]) == words


def test_keys_of_a_file_are_spelled_as_freely():
    for key in ("speculative_config", "speculative-config.model", "no-speculative-config", "speculative-conf"):
        assert is_one_of(key, ["speculative-config"])
    assert not is_one_of("sc", ["speculative-config"])
    assert not is_one_of("quantization-config", ["quantization"])
    assert not is_one_of("quantization", ["quantization-config"])


def test_a_name_that_is_whole_is_no_beginning_of_another():
    assert spelled("model-loader-extra-config", {"model": "m"}) is None
    assert without(["m", "-q", "awq"], ["quantization-config"]) == ["m", "-q", "awq"]
