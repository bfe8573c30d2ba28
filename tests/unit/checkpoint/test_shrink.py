"""What a shrunken model keeps of the real one, and what it says of the rest."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path

import pytest
from sparse_checkpoint import MODELS

from aerie.checkpoint.config import ConfigError, Drafter, Target, read_drafter, read_target
from aerie.checkpoint.layout import target_layout
from aerie.checkpoint.shrink import Profile, move_layers, shrink_drafter, shrink_target
from aerie.checkpoint.tiny import configs
from aerie.rehearsal.findings import Verdict
from aerie.rehearsal.static.fit import drafter_fits

KIMI = read_target(MODELS / "moonshotai--Kimi-K2.5")
DRAFTERS = sorted(path.name for path in MODELS.iterdir() if "eagle3" in path.name.lower())


def of(changes):
    return {change.field: (change.real, change.here) for change in changes}


def test_with_gpus_depth_and_experts_alone_are_less():
    """So every rank computes with the shapes that it really has."""
    shrunken = shrink_target(KIMI, Profile.GPU)
    assert of(shrunken.changes) == {"num_hidden_layers": (61, 7), "n_routed_experts": (384, 16)}
    expected = copy.deepcopy(dict(KIMI.whole))
    expected["text_config"] |= {"num_hidden_layers": 7, "n_routed_experts": 16}
    assert shrunken.config == expected


def test_with_gpus_it_takes_eleven_gigabytes_in_all():
    shrunken = Target(KIMI.directory, shrink_target(KIMI, Profile.GPU).config)
    assert 10.5e9 < sum(expected.size for expected in target_layout(shrunken).values()) < 11e9


def test_without_one_widths_are_less_too_and_each_is_told():
    shrunken = shrink_target(KIMI, Profile.CPU)
    assert of(shrunken.changes) == {
        "num_hidden_layers": (61, 7),
        "n_routed_experts": (384, 16),
        "hidden_size": (7168, 512),
        "num_attention_heads": (64, 4),
        "num_key_value_heads": (64, 4),
        "intermediate_size": (18432, 512),
        "moe_intermediate_size": (2048, 128),
        "quantization_config": ("as published", "not quantised"),
        "vision_config.vt_hidden_size": (1152, 144),
        "vision_config.vt_num_attention_heads": (16, 2),
        "vision_config.vt_num_hidden_layers": (27, 2),
        "vision_config.vt_intermediate_size": (4304, 288),
    }
    text, real = shrunken.config["text_config"], KIMI.whole["text_config"]
    changed = {change.field for change in shrunken.changes}
    assert {name: value for name, value in text.items() if name not in changed} == {
        name: value for name, value in real.items() if name not in changed
    }


def test_what_selects_kernels_stays_on_a_cpu():
    shrunken = Target(KIMI.directory, shrink_target(KIMI, Profile.CPU).config)
    assert dataclasses.replace(shrunken.attention, heads=64) == KIMI.attention
    assert shrunken.vocabulary == KIMI.vocabulary
    assert shrunken.vision.width / shrunken.vision.heads == KIMI.vision.width / KIMI.vision.heads


@pytest.mark.parametrize(("stages", "layers"), [(1, 7), (2, 8), (4, 16), (20, 61)])
def test_each_pipeline_stage_has_four_layers(stages, layers):
    assert shrink_target(KIMI, Profile.GPU, stages).config["text_config"]["num_hidden_layers"] == layers


def test_the_real_configuration_stays_as_it_is():
    before = json.dumps(KIMI.whole)
    shrink_target(KIMI, Profile.CPU)
    assert json.dumps(KIMI.whole) == before


@pytest.mark.parametrize("profile", Profile)
def test_nothing_grows(profile):
    target = Target(Path("tiny"), configs.TARGET)
    shrunken = shrink_target(target, profile)
    assert shrunken.changes == ()
    for config in (configs.MLA_DRAFTER, configs.LLAMA_DRAFTER):
        assert shrink_drafter(Drafter(Path("tiny"), config), target, target, profile).changes == ()


@pytest.mark.parametrize("profile", Profile)
@pytest.mark.parametrize("name", DRAFTERS)
def test_a_drafter_fits_the_shrunken_target_if_it_fits_the_real_one(tmp_path, name, profile):
    real = read_drafter(MODELS / name)
    target = Target(KIMI.directory, shrink_target(KIMI, profile).config)
    config = shrink_drafter(real, KIMI, target, profile).config
    (tmp_path / "config.json").write_text(json.dumps(config))
    drafter = read_drafter(tmp_path)
    found = [
        each.text
        for each in drafter_fits(target, drafter, {}, 4096, {"eagle3-aux-layer-ids"})
        if each.verdict is Verdict.FAILED
    ]
    assert found == []
    assert drafter.is_mla == real.is_mla
    assert drafter.draft_vocabulary == real.draft_vocabulary
    assert drafter.aux_states == real.aux_states
    if not drafter.is_mla:
        assert drafter.head_size == real.head_size


def test_a_drafters_changes_say_that_they_are_its():
    drafter = read_drafter(MODELS / "AQ-MedAI--Kimi-K25-eagle3")
    target = Target(KIMI.directory, shrink_target(KIMI, Profile.CPU).config)
    assert of(shrink_drafter(drafter, KIMI, target, Profile.CPU).changes) == {
        "drafter.eagle_aux_hidden_state_layer_ids": ([2, 30, 58], [2, 3, 4]),
        "drafter.hidden_size": (7168, 512),
        "drafter.num_attention_heads": (64, 4),
        "drafter.num_key_value_heads": (64, 4),
        "drafter.intermediate_size": (18432, 512),
    }


@pytest.mark.parametrize(
    ("ids", "fewer", "moved"),
    [
        ([2, 30, 58], 7, [2, 3, 4]),  # vLLM's default stays the default
        ([2, 30, 58], 16, [2, 8, 13]),
        ([1, 29, 57], 7, [1, 3, 6]),
        ([0, 61], 7, [0, 7]),  # the embedding's output, and the last layer's
        ([58, 59, 60], 7, [4, 5, 6]),
        ([0, 1, 2], 7, [0, 1, 2]),
        ([4, 5, 30, 60], 7, [1, 2, 3, 6]),
        ([30], 7, [3]),
    ],
)
def test_layers_move_in_proportion_and_stay_apart(ids, fewer, moved):
    assert move_layers(ids, 61, fewer) == moved


@pytest.mark.parametrize("ids", [range(9), range(8), range(1, 8), [*range(2, 9)], [*range(54, 62), 61]])
def test_more_layers_than_there_is_room_for(ids):
    with pytest.raises(ValueError, match=f"{len(ids)} auxiliary layers do not fit into 7 layers"):
        move_layers(ids, 61, 7)


@pytest.mark.parametrize("ids", [range(7), [*range(7), 61], range(1, 7), range(55, 62)])
def test_as_many_as_there_is_room_for(ids):
    moved = move_layers(ids, 61, 7)
    assert moved == sorted(set(moved))
    assert 0 <= moved[0] <= moved[-1] <= 7


def test_a_drafter_of_too_many_layers_is_told_with_its_file(tmp_path):
    config = configs.MLA_DRAFTER | {"eagle_aux_hidden_state_layer_ids": [*range(9)]}
    target = Target(KIMI.directory, shrink_target(KIMI, Profile.GPU).config)
    with pytest.raises(ConfigError, match=f"{tmp_path / 'config.json'}: 9 auxiliary layers do not fit into 7 layers"):
        shrink_drafter(Drafter(tmp_path, config), KIMI, target, Profile.GPU)
