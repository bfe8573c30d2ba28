"""Whole logs of real engines: the healthy ones have no failure, each of the others its own."""

from pathlib import Path

import pytest

from aerie.diagnosis import Collector
from aerie.startup.lines import LineReader, parse

LOGS = Path(__file__).parents[2] / "fixtures/logs"
PROVOKED_LOGS = Path(__file__).with_name("logs")
# Log: signature, process, place of the root cause, beginning of its text.
FAILED = {
    "vllm-0.17.1-healthy-then-engine-dead": (
        None,
        "EngineCore_DP0",
        "vllm/v1/spec_decode/eagle.py:884 in prepare_next_token_ids_padded",
        "AttributeError: module 'triton' has no attribute 'next_power_of_2'",
    ),
    "vllm-0.17.1-layer1-whitelist": (
        "eagle3-target-not-listed",
        "APIServer",
        "vllm/engine/arg_utils.py:1443 in create_speculative_config",
        "pydantic_core._pydantic_core.ValidationError: 1 validation error for SpeculativeConfig\n  Value error, eagle3",
    ),
    "vllm-0.17.1-layer2-image-token-index": (
        "image-token-index-missing",
        "EngineCore_DP0",
        "vllm/v1/spec_decode/eagle.py:1306 in load_model",
        "AttributeError: 'KimiK25Config' object has no attribute 'image_token_index'",
    ),
    "vllm-0.17.1-layer3-supports-eagle3": (
        "supports-eagle3-missing",
        "EngineCore_DP0",
        "vllm/v1/worker/cpu_model_runner.py:75 in load_model",
        "RuntimeError: Model does not support EAGLE3 interface",
    ),
    "vllm-0.17.1-layer3-forward-unpatched": (
        "forward-without-aux-states",
        "EngineCore_DP0",
        "vllm/v1/worker/gpu_model_runner.py:5011 in _dummy_run",
        "ValueError: too many values to unpack (expected 2)",
    ),
    "vllm-0.32.0-cpu-no-common-block-size": (
        "no-common-block-size",
        "Worker",
        "vllm/v1/worker/utils.py:554 in select_common_block_size",
        "ValueError: No common block size for 16",
    ),
}


HEALTHY = sorted(path.stem for path in LOGS.glob("*-healthy-*.log") if path.stem not in FAILED)


def log(name):
    return (LOGS / f"{name}.log").read_text(encoding="utf-8")


def collected(text):
    collector = Collector()
    collector.feed(parse(text))
    return collector


def test_every_log_has_its_expectation():
    assert {path.stem for path in LOGS.glob("*.log")} == {*HEALTHY, *FAILED}


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_engine_has_not_failed_at_any_time(name):
    collector = Collector()
    for line in parse(log(name)):
        collector.feed([line])
        assert not collector.dying
    assert collector.diagnose() is None


@pytest.mark.parametrize("name", FAILED)
def test_each_failure_has_its_root_cause(name):
    collector = collected(log(name))
    diagnosis = collector.diagnose("vllm serve ended with exit code 1")
    assert collector.dying
    signature, process, place, text = FAILED[name]
    assert (diagnosis.signature, diagnosis.known) == (signature, signature is not None)
    assert (diagnosis.root.process, diagnosis.root.place) == (process, place)
    assert diagnosis.root.text.startswith(text)


@pytest.mark.parametrize("name", FAILED)
def test_the_root_cause_is_the_same_however_the_log_was_carried(name):
    for prefix in ("vllm-1  | ", "2026-11-29T13:00:00.123456789Z ", "\x1b[36mvllm-1  |\x1b[0m "):
        carried = "".join(f"{prefix}{line}\n" for line in log(name).split("\n"))
        assert collected(carried).diagnose().root.text.startswith(FAILED[name][3])


# Provoked on vLLM 0.32.0, on a CPU unless the name says otherwise; without most of what was no error.
PROVOKED = {
    "batched-tokens-too-few": None,  # served, and was stopped
    "sigterm-loading": None,
    "gpu-out-of-memory-profiling": "torch.OutOfMemoryError: CUDA out of memory.",
    "kill-engine-core-serving": "vllm.v1.engine.exceptions.EngineDeadError: ",
    "kill-worker-loading": "Exception: WorkerProc initialization failed due to an exception in a background process.",
    "oom-kill-2560m": "Worker proc VllmWorker-0 died unexpectedly (exit code: -9)",
    "segv-worker-serving": "!!!!!!! Segfault encountered !!!!!!!",
    "unreachable-hub": "httpcore2.ConnectError: [Errno 111] Connection refused",
}


def test_every_provoked_log_has_its_expectation():
    assert {path.stem for path in PROVOKED_LOGS.iterdir()} == set(PROVOKED)


@pytest.mark.parametrize("name", PROVOKED)
def test_each_provoked_failure_has_its_root_cause(name):
    collector = collected((PROVOKED_LOGS / f"{name}.log").read_text(encoding="utf-8"))
    diagnosis = collector.diagnose()
    assert collector.dying is (PROVOKED[name] is not None)
    if PROVOKED[name]:
        assert diagnosis.root.text.startswith(PROVOKED[name])
        assert diagnosis.known is not name.startswith("kill-"), "who was killed without a word says nothing"
    else:
        assert diagnosis is None


def test_pieces_of_any_size_tell_the_same():
    text = log("vllm-0.32.0-cpu-no-common-block-size").encode()
    for size in (1, 100, 4096):
        reader, collector = LineReader(), Collector()
        for start in range(0, len(text), size):
            collector.feed(reader.feed(text[start : start + size]))
        collector.feed(reader.end())
        assert collector.diagnose() == collected(text.decode()).diagnose()


@pytest.mark.parametrize("name", FAILED)
def test_the_text_is_plain_and_no_wider_than_a_hundred_columns(name):
    text = collected(log(name)).diagnose().text()
    assert max(map(len, text.splitlines())) <= 100
    assert text.replace("\n", "").isprintable()
    assert "What to do" in text
