"""Which tensors a checkpoint must hold, against what is published of the real ones."""

from __future__ import annotations

import json

import pytest
from sparse_checkpoint import MODELS

from aerie.checkpoint.config import ConfigError, read_drafter, read_target
from aerie.checkpoint.layout import Expected, drafter_layout, drafter_name, target_layout


def size(layout):
    return sum(expected.size for expected in layout.values())


@pytest.fixture(scope="module")
def kimi():
    return target_layout(read_target(MODELS / "moonshotai--Kimi-K2.5"))


def test_kimi_k25_is_as_its_index_says(kimi):
    """Number and bytes of the published model.safetensors.index.json."""
    assert (len(kimi), size(kimi)) == (208_550, 595_148_192_736)


@pytest.mark.parametrize(
    ("name", "dtype", "shape"),
    [
        ("language_model.model.embed_tokens.weight", "BF16", (163840, 7168)),
        ("language_model.lm_head.weight", "BF16", (163840, 7168)),
        ("language_model.model.layers.0.mlp.down_proj.weight", "BF16", (7168, 18432)),
        ("language_model.model.layers.60.self_attn.kv_a_proj_with_mqa.weight", "BF16", (576, 7168)),
        ("language_model.model.layers.1.mlp.gate.e_score_correction_bias", "F32", (384,)),
        ("language_model.model.layers.1.mlp.shared_experts.up_proj.weight", "BF16", (2048, 7168)),
        ("language_model.model.layers.60.mlp.experts.383.gate_proj.weight_packed", "I32", (2048, 896)),
        ("language_model.model.layers.60.mlp.experts.383.gate_proj.weight_scale", "BF16", (2048, 224)),
        ("language_model.model.layers.60.mlp.experts.383.down_proj.weight_packed", "I32", (7168, 256)),
        ("language_model.model.layers.60.mlp.experts.383.down_proj.weight_shape", "I32", (2,)),
        ("vision_tower.encoder.blocks.26.mlp.fc0.weight", "BF16", (4304, 1152)),
        ("mm_projector.proj.2.weight", "BF16", (7168, 4608)),
    ],
)
def test_kimi_k25s_tensors(kimi, name, dtype, shape):
    assert kimi[name] == Expected(dtype, shape)


# Parameters as the cards round them, and as the training configurations give them.
@pytest.mark.parametrize(
    ("name", "tensors", "parameters"),
    [
        ("lightseekorg--kimi-k2.5-eagle3-mla", 17, 3_015_604_224),
        ("lightseekorg--kimi-k2.5-eagle3", 14, 3_178_262_528),
        ("nvidia--Kimi-K2.5-Thinking-Eagle3", 16, 1_841_199_104),
    ],
)
def test_drafters(name, tensors, parameters):
    drafter = read_drafter(MODELS / name)
    present = {"lm_head.weight"} | ({"embed_tokens.weight"} if name.startswith("lightseek") else set())
    layout = drafter_layout(drafter, dict.fromkeys(present))
    assert (len(layout), size(layout)) == (tensors, 2 * parameters)


def test_a_reduced_vocabulary_has_a_head_and_a_mapping_of_its_own():
    layout = drafter_layout(read_drafter(MODELS / "AQ-MedAI--Kimi-K25-eagle3"), {})
    assert layout["lm_head.weight"] == Expected("BF16", (32000, 7168))
    assert layout["d2t"] == Expected("I64", (32000,))
    assert "embed_tokens.weight" not in layout


def test_the_first_layer_has_two_names():
    assert drafter_name("layers.0.mlp.up_proj.weight") == "midlayer.mlp.up_proj.weight"
    assert drafter_name("midlayer.mlp.up_proj.weight") == "midlayer.mlp.up_proj.weight"
    assert drafter_name("layers.1.mlp.up_proj.weight") == "layers.1.mlp.up_proj.weight"


def test_another_quantisation_is_refused_by_name(tmp_path):
    config = json.loads((MODELS / "moonshotai--Kimi-K2.5" / "config.json").read_text())
    config["text_config"]["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"quantised by fp8 as None with 0 bits; known here are .* 4 bits in groups"):
        target_layout(read_target(tmp_path))
