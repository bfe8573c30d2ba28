"""`vllm serve`'s arguments as vLLM's own parser would pair them."""

from __future__ import annotations

import pytest

from aerie.engine_arguments import ConfigurationError, read_arguments, spelled

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
