"""What real engines said (excerpts of their output in logs/), read into steps, fractions and errors."""

from itertools import groupby
from pathlib import Path

import pytest

from aerie.startup import Report, StartupReader

LOGS = Path(__file__).parent / "logs"

BEGIN = ["reading the configuration", "starting the engine core", "joining the ranks"]
LOAD = ["loading target", "loading target 0%", "loading target 100%"]
LOAD_DRAFTER = ["loading drafter", "loading drafter 0%", "loading drafter 100%"]
END = ["finishing the engine core", "starting the API server", "waiting for /health"]
STORY = {
    "vllm-0.17.1-healthy-then-engine-dead": BEGIN + LOAD + LOAD_DRAFTER + ["sizing the KV cache", "warming up"] + END,
    "vllm-0.17.1-layer1-whitelist": BEGIN[:1],
    "vllm-0.17.1-layer2-image-token-index": BEGIN + LOAD + LOAD_DRAFTER,
    "vllm-0.17.1-layer3-forward-unpatched": BEGIN + LOAD + LOAD_DRAFTER + ["sizing the KV cache", "warming up"],
    "vllm-0.17.1-layer3-supports-eagle3": BEGIN + LOAD + LOAD_DRAFTER,
    "vllm-0.32.0-cpu-healthy-eager": BEGIN + LOAD + ["sizing the KV cache"] + END,
    "vllm-0.32.0-cpu-no-common-block-size": BEGIN + LOAD + LOAD_DRAFTER + ["sizing the KV cache"],
    "vllm-0.32.0-h200-healthy-eager": BEGIN + LOAD + LOAD_DRAFTER + ["profiling", "sizing the KV cache"] + END,
    "vllm-0.32.0-h200-healthy-compiled": [
        *BEGIN,
        *LOAD,
        *LOAD_DRAFTER,
        "profiling",
        "compiling target",
        "compiling drafter",
        "capturing graphs to measure memory",
        "sizing the KV cache",
        "warming up",
        "capturing graphs",
        *END,
    ],
}
CAUSE = {
    "vllm-0.17.1-healthy-then-engine-dead": "AttributeError: module 'triton' has no attribute 'next_power_of_2'",
    "vllm-0.17.1-layer1-whitelist": "Value error, eagle3 is only supported for",
    "vllm-0.17.1-layer2-image-token-index": "AttributeError: 'KimiK25Config' object has no attribute 'image_token_i",
    "vllm-0.17.1-layer3-forward-unpatched": "ValueError: too many values to unpack (expected 2)",
    "vllm-0.17.1-layer3-supports-eagle3": "RuntimeError: Model does not support EAGLE3 interface",
    "vllm-0.32.0-cpu-healthy-eager": None,
    "vllm-0.32.0-cpu-no-common-block-size": "ValueError: No common block size for 16",
    "vllm-0.32.0-h200-healthy-eager": None,
    "vllm-0.32.0-h200-healthy-compiled": None,
}


def read(*pieces: bytes) -> list[Report]:
    reader = StartupReader()
    return [reader.feed(piece) for piece in pieces]


def excerpt(name: str) -> bytes:
    return (LOGS / f"{name}.log").read_bytes()


def words(report: Report) -> str:
    return report.step if report.fraction is None else f"{report.step} {report.fraction:.0%}"


def test_every_excerpt_has_its_expectations():
    assert {path.stem for path in LOGS.iterdir()} == set(STORY) == set(CAUSE)


@pytest.mark.parametrize("name", STORY)
def test_a_start_is_told_step_by_step(name):
    reports = read(*excerpt(name).splitlines(keepends=True))
    assert [step for step, _ in groupby(map(words, reports))] == STORY[name]


@pytest.mark.parametrize("name", CAUSE)
def test_the_error_is_the_cause_and_not_what_followed_from_it(name):
    error = read(excerpt(name))[-1].error
    assert error == CAUSE[name] if CAUSE[name] is None else error.startswith(CAUSE[name])


@pytest.mark.parametrize("size", [1, 7, 4096])
def test_pieces_of_any_size_tell_the_same(size):
    log = excerpt("vllm-0.32.0-cpu-no-common-block-size")
    pieces = [log[start : start + size] for start in range(0, len(log), size)]
    assert read(*pieces)[-1] == read(log)[-1]


def test_a_bar_in_the_middle_gives_a_fraction_and_never_falls():
    bar = b"\rLoading safetensors checkpoint shards:  %b%% Completed | %b/64 [00:40<01:20,  1.25s/it]\n"
    halves = read(
        b"(Worker_TP0 pid=9) INFO 11-29 13:34:58 [x.py:1] Loading model from scratch...\n",
        bar % (b"50", b"32"),
        bar % (b"25", b"16"),
    )
    assert [report.fraction for report in halves] == [None, 0.5, 0.5]


@pytest.mark.parametrize("name", ["Multi-thread loading shards", "Loading safetensors using InstantTensor loader"])
def test_other_loaders_draw_the_same_bar(name):
    assert read(f"{name}:  33% Completed | 2/6 [00:01<00:02, 2it/s]\n".encode())[-1].fraction == pytest.approx(1 / 3)


def test_a_rank_that_lags_does_not_push_the_start_forward():
    said = [
        b"(Worker_TP0 pid=1) INFO 11-29 14:00:00 [monitor.py:40] [backbone] Starting torch.compile\n",
        b"(Worker_TP0 pid=1) INFO 11-29 14:00:20 [speculator.py:110] Capturing model for speculator...\n",
        b"(Worker_TP5 pid=6) INFO 11-29 14:00:21 [monitor.py:40] [backbone] Starting torch.compile\n",
    ]
    assert read(*said)[-1].step == "capturing graphs to measure memory"


def test_a_prompt_without_a_newline_hides_nothing():
    prompt = b"Do you wish to run the custom code? [y/N] (APIServer pid=1) INFO 11-29 13:37:29 [entry.py:140] "
    assert read(prompt + b"Starting vLLM server on http://127.0.0.1:8000\n")[-1].step == "starting the API server"


def test_an_endless_line_is_not_kept_in_memory():
    reader = StartupReader()
    for _ in range(64):
        reader.feed(b"x" * 4096)
    assert len(reader._rest) <= 64 * 1024


@pytest.mark.parametrize(
    "line",
    [
        "(EngineCore pid=7) WARNING 11-29 14:06:10 [x.py:1] AssertionError: Expected one .so file, found 0",
        "(APIServer pid=1) INFO 11-29 14:06:10 [x.py:1] retrying after ValueError: nothing",
        "    raise ValueError(",
        "ERROR 11-29 14:06:10 [core.py:1] Traceback (most recent call last):",
    ],
)
def test_what_is_no_error_is_not_taken_for_one(line):
    assert read(line.encode() + b"\n")[-1].error is None


def test_usage_errors_of_argparse_are_errors():
    assert read(b"vllm: error: unrecognized arguments: --no-such\n")[-1].error.endswith("arguments: --no-such")


def test_a_consequence_is_told_where_nothing_else_was_said():
    line = b"RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}\n"
    assert read(line)[-1].error.startswith("RuntimeError: Engine core")
