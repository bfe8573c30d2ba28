"""A checkpoint against its own config.json."""

from __future__ import annotations

import json

import pytest
from sparse_checkpoint import MODELS, published_shard, write_shard, write_sparse

from aerie.checkpoint.config import read_drafter, read_target
from aerie.checkpoint.files import read_weights
from aerie.checkpoint.layout import Expected, drafter_layout, drafter_name, target_layout
from aerie.rehearsal.findings import Verdict
from aerie.rehearsal.static.whole import weights_are_whole


class Checkpoint:
    def __init__(self, directory, layout):
        self.directory, self.layout = directory, layout

    def findings(self):
        weights = read_weights(self.directory)
        names = {name: drafter_name(name) for name in weights.tensors}
        return [
            (found.check, found.verdict, found.text)
            for found in weights_are_whole("drafter", weights, self.layout, names)
        ]


@pytest.fixture
def drafter(published):
    """The Llama drafter, its first layer named as the other drafters name theirs."""
    directory = published("AQ-MedAI--Kimi-K25-eagle3").directory
    layout = drafter_layout(read_drafter(directory), {})
    write_shard(
        directory / "model.safetensors", {name.replace("midlayer.", "layers.0."): each for name, each in layout.items()}
    )
    return Checkpoint(directory, layout)


def rewrite(drafter, **changes):
    """Write it anew with other tensors, None for none; `__` stands for a dot."""
    tensors = dict(drafter.layout)
    for name, expected in changes.items():
        tensors.pop(name.replace("__", "."), None)
        if expected is not None:
            tensors[name.replace("__", ".")] = expected
    write_shard(drafter.directory / "model.safetensors", tensors)
    return drafter.findings()


def test_a_whole_one(drafter):
    assert drafter.findings() == [
        ("drafter files", Verdict.PASSED, "1 file, 14 tensors, 2.4 GB, as config.json asks for")
    ]


def test_missing_tensors(drafter):
    assert rewrite(drafter, d2t=None, fc__weight=None) == [
        ("drafter tensors", Verdict.FAILED,
         "2 of the 14 tensors that config.json asks for are not in the files: d2t, fc.weight")
    ]  # fmt: skip


def test_a_wrong_shape_in_a_header(drafter):
    assert rewrite(drafter, fc__weight=Expected("BF16", (7168, 12288))) == [
        ("drafter tensors", Verdict.FAILED,
         "fc.weight in model.safetensors has the shape [7168, 12288], and config.json asks for [7168, 21504]")
    ]  # fmt: skip


@pytest.mark.parametrize(("dtype", "verdict"), [("F32", Verdict.WARNED), ("I32", Verdict.FAILED)])
def test_another_dtype(drafter, dtype, verdict):
    (found,) = rewrite(drafter, fc__weight=Expected(dtype, (7168, 21504)))
    assert found == ("drafter tensors", verdict, f"fc.weight in model.safetensors is {dtype}, and BF16 was expected")


def test_tensors_that_nobody_asks_for(drafter):
    (found,) = rewrite(drafter, t2d=Expected("BOOL", (163840,)), mystery__weight=Expected("BF16", (2, 2)))
    assert found == (
        "drafter tensors", Verdict.FAILED, "config.json knows nothing of mystery.weight: vLLM ends its load there",
    )  # fmt: skip


PREFIX = "language_model.model.layers"
SMALL = {"num_hidden_layers": 2, "n_routed_experts": 2, "num_experts_per_tok": 1, "num_nextn_predict_layers": 0}


@pytest.mark.parametrize(
    ("name", "verdict"),
    [
        # What deepseek_v2.py and its helpers leave out of a load.
        (f"{PREFIX}.0.self_attn.rotary_emb.inv_freq", Verdict.PASSED),
        (f"{PREFIX}.0.self_attn.rotary_emb.cos_cached", Verdict.PASSED),
        (f"{PREFIX}.0.self_attn.q_a_proj.bias", Verdict.PASSED),
        (f"{PREFIX}.1.mlp.shared_experts.up_proj.bias", Verdict.PASSED),
        (f"{PREFIX}.1.mlp.experts.1.up_proj.bias", Verdict.FAILED),
        (f"{PREFIX}.0.self_attn.k_scale", Verdict.PASSED),
        (f"{PREFIX}.0.self_attn.k_proj.k_scale", Verdict.PASSED),
        (f"{PREFIX}.0.self_attn.kv_scale", Verdict.PASSED),
        (f"{PREFIX}.0.self_attn.v_zero_point", Verdict.PASSED),
        (f"{PREFIX}.0.self_attn.indexer.wk.weight", Verdict.PASSED),
        # Layers for multi-token prediction are left out where config.json gives their number, and otherwise end it.
        (f"{PREFIX}.2.mlp.gate.weight", Verdict.WARNED),
        (f"{PREFIX}.1.mlp.experts.2.up_proj.weight_packed", Verdict.FAILED),
        (f"{PREFIX}.1.mlp.experts.1.up_proj.weight_zero_point", Verdict.WARNED),
        (f"{PREFIX}.1.mlp.experts.1.up_proj.weight_g_idx", Verdict.WARNED),
        (f"{PREFIX}.1.mlp.experts.1.up_proj.weight_shift", Verdict.FAILED),
        (f"{PREFIX}.0.self_attn.q_a_proj.weight_scale", Verdict.FAILED),
        (f"{PREFIX}.0.self_attn.q_scales", Verdict.FAILED),
        ("vision_tower.encoder.blocks.0.wqkv.scale", Verdict.FAILED),
        ("mm_projector.proj.1.weight", Verdict.FAILED),
        ("lm_head.weight", Verdict.FAILED),
    ],
)
def test_tensors_of_a_target_that_nobody_asks_for(published, name, verdict):
    model = published("moonshotai--Kimi-K2.5")
    layout = target_layout(read_target(model.change(**SMALL).directory))
    write_shard(model.directory / "model.safetensors", layout | {name: Expected("BF16", (2, 2))})
    weights = read_weights(model.directory)
    (found,) = weights_are_whole("target", weights, layout, {each: each for each in weights.tensors})
    assert found.verdict is verdict
    assert (name in found.text) == (verdict is not Verdict.PASSED)


def test_what_only_a_drafter_may_have(drafter):
    (found,) = rewrite(drafter, mask_hidden=Expected("BF16", (1, 7168)))
    assert found[1] is Verdict.PASSED
    (found,) = rewrite(drafter, **{"layers.1.hidden_norm.weight": Expected("BF16", (7168,))})
    assert found[1] is Verdict.FAILED


def test_what_a_broken_file_lacks_is_not_told_twice(drafter):
    path = drafter.directory / "model.safetensors"
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 1)
    (found,) = drafter.findings()
    assert found[:2] == ("drafter files", Verdict.FAILED)


@pytest.fixture(scope="module")
def kimi(tmp_path_factory):
    """All 595 GB of it, as far as headers go."""
    layout = target_layout(read_target(MODELS / "moonshotai--Kimi-K2.5"))
    directory = tmp_path_factory.mktemp("kimi")
    write_sparse(directory, layout, published_shard)
    return directory, layout


def test_the_whole_kimi(kimi):
    directory, layout = kimi
    weights = read_weights(directory)
    (found,) = weights_are_whole("target", weights, layout, {name: name for name in weights.tensors})
    assert found.text == "64 files, 208,550 tensors, 595.1 GB, as config.json asks for"
    assert (
        json.loads((directory / "model.safetensors.index.json").read_text())["metadata"]["total_size"] == weights.size
    )
