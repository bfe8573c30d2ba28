"""What the rehearsal's engine is told over the operator's own arguments."""

from __future__ import annotations

from pathlib import Path

import pytest

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


@pytest.mark.parametrize("model", [[], ["/data/models/Kimi-K2.5"]])
def test_words(model):
    words = engine_words(
        [*model, "--config", "serve.yaml", "--enforce-eager"],
        Path("/w/target"),
        [
            Override("port", None, 41234, ""),
            Override("enforce-eager", None, here=False, why=""),
            Override("speculative-config", {}, {"model": "/w/drafter"}, ""),
        ],
    )
    assert words == [
        *("/w/target", "--config", "serve.yaml", "--enforce-eager"),
        *("--port", "41234", "--no-enforce-eager", "--speculative-config", '{"model": "/w/drafter"}'),
    ]
    # The last one wins, for the supervisor and for vLLM alike.
    assert read_arguments(words[3:])["enforce-eager"] is False
