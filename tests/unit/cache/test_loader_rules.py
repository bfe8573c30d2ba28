"""Which loader is chosen: one row a rule."""

import io
import json
import re
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from aerie import cli
from aerie.cache import loader
from aerie.cache.loader import Facts, NotInstalledError, choose, explain, find_facts

GB, GIB = 10**9, 2**30
KIMI = Facts(
    weights=601 * GB,
    largest_file=10 * GB,
    memory=512 * GIB,
    filesystem="xfs",
    gpus=8,
    gpu_memory=int(94.97 * GIB),
    ranks=8,
    installed=frozenset({"fastsafetensors"}),
)


@pytest.mark.parametrize(
    ("facts", "chosen", "why"),
    [
        (
            KIMI,
            "fastsafetensors",
            r"more than 80% of the memory \(550 GB\).*each of 8 GPUs reads whole files",
        ),
        (replace(KIMI, memory=699 * GIB), "fastsafetensors", "too much for the page cache"),
        (
            replace(KIMI, memory=700 * GIB),
            "default",
            r"no more than 80% of the memory \(752 GB\)",
        ),
        (replace(KIMI, gpus=0, gpu_memory=0), "default", "without GPUs only vLLM's own loader works"),
        (replace(KIMI, installed=frozenset()), "default", "this image has no other loader"),
        (replace(KIMI, stages=2), "default", "with pipeline stages"),
        (replace(KIMI, gpu_memory=80 * GIB), "default", "a GPU has 8.0 GiB, and fastsafetensors holds 2 files of 9.3"),
        (replace(KIMI, largest_file=20 * GB), "default", "fastsafetensors holds 2 files of 18.6 GiB"),
        (replace(KIMI, gpus=0, filesystem="nfs4"), "default", "reads ahead on nfs4 by itself"),
        (replace(KIMI, gpus=0, filesystem="ceph"), "default", "reads from ceph, and the supervisor reads ahead"),
        (replace(KIMI, gpus=0, rotates=True), "default", "from a rotating disk"),
    ],
)
def test_a_rule(facts, chosen, why):
    choice = choose(facts)
    assert choice.loader == chosen
    assert re.search(why, choice.reason)
    assert choice.keys == ({} if chosen == "default" else {"load-format": chosen})
    assert "\n" not in choice.reason


def test_what_is_asked_for_is_taken_as_far_as_it_is_there():
    assert choose(replace(KIMI, stages=4), "fastsafetensors").keys == {"load-format": "fastsafetensors"}
    assert choose(KIMI, "default").keys == {}
    with pytest.raises(NotInstalledError, match="does not have the loader runai_streamer; it has fastsafetensors"):
        choose(KIMI, "runai_streamer")


@pytest.fixture
def model(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model/model.safetensors").write_bytes(b"x" * 1000)
    return tmp_path / "model"


def test_the_facts_of_this_machine(model):
    facts = find_facts({"tensor-parallel-size": "2", "pipeline-parallel-size": 2}, [model])
    assert (facts.weights, facts.largest_file, facts.ranks, facts.stages) == (1000, 1000, 4, 2)
    assert facts.memory > GIB
    assert facts.filesystem


def test_the_file_system_is_that_of_the_innermost_mount(tmp_path):
    mounts = tmp_path / "mounts"
    mounts.write_text(f"/dev/a / ext4 rw 0 0\nserver:/x {tmp_path} nfs4 rw 0 0\n/dev/b {tmp_path}x xfs rw 0 0\n")
    assert loader._filesystem(tmp_path, mounts) == "nfs4"
    assert loader._filesystem(tmp_path.parent, mounts) == "ext4"


def test_the_command(model, tmp_path, capsys):
    config = tmp_path / "serve.yaml"
    config.write_text(yaml.safe_dump({"model": str(model)}))
    assert cli.main(["model", "loader", "--config", str(config), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["loader"], said["keys"]) == ("default", {})
    config.write_text(yaml.safe_dump({"model": str(model), "load-format": "dummy"}))
    assert cli.main(["model", "loader", "--config", str(config)]) == 0
    assert capsys.readouterr().out == 'dummy: the engine\'s arguments say so\n  load-format: "dummy"\n'
    config.write_text(yaml.safe_dump({"model": str(model)}))
    assert cli.main(["model", "loader", "--config", str(config), "--loader", "instanttensor"]) in {0, 1}
    assert cli.main(["model", "loader", "--config", str(tmp_path / "none.yaml")]) == 1
    assert "none.yaml does not exist" in capsys.readouterr().err


def test_a_configuration_that_cannot_be_used_is_named_as_it_was_given(model, tmp_path, capsys, monkeypatch):
    config = tmp_path / "serve.yaml"
    config.write_text("load-format: auto\n")
    assert cli.main(["model", "loader", "--config", str(config)]) == 1
    assert f"aerie model loader: {config} names no model" in capsys.readouterr().err
    for text, says in (("{}", "standard input names no model"), ("model: [", "standard input")):
        monkeypatch.setattr("sys.stdin", io.StringIO(text))
        assert cli.main(["model", "loader", "--config", "-"]) == 1
        told = capsys.readouterr().err
        assert says in told
        assert tempfile.gettempdir() not in told


def test_what_is_asked_for_and_what_the_arguments_name_must_be_the_same(model, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(loader, "find_facts", lambda *_: KIMI)
    config = tmp_path / "serve.yaml"
    command = ["model", "loader", "--config", str(config), "--loader"]
    config.write_text(yaml.safe_dump({"model": str(model), "load-format": "fastsafetensors"}))
    assert cli.main([*command, "fastsafetensors"]) == 0
    assert cli.main([*command, "auto"]) == 0
    capsys.readouterr()
    assert cli.main([*command, "default"]) == 1
    error = capsys.readouterr().err
    assert 'default was asked for, and the configuration has load-format: "fastsafetensors": take one' in error
    config.write_text(yaml.safe_dump({"model": str(model), "safetensors-load-strategy": "eager"}))
    assert cli.main([*command, "fastsafetensors"]) == 1
    assert 'the configuration has safetensors-load-strategy: "eager"' in capsys.readouterr().err


def test_an_engine_that_loads_otherwise_than_the_rules_say_is_told(model, monkeypatch):
    monkeypatch.setattr(loader, "find_facts", lambda *_: KIMI)
    words = [str(model)]
    assert explain(words, [model]).startswith("default: no other one was chosen; the rules say fastsafetensors: the")
    assert explain([*words, "--load-format", "fastsafetensors"], [model]).startswith("fastsafetensors: the weights")
    assert "the engine's arguments say so" in explain([*words, "--load-format", "dummy"], [Path(model)])
