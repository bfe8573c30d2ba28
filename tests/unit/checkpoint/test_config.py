"""A config.json of any form is read, or refused in words; nothing that is read can fail later."""

from __future__ import annotations

import json
import os

import pytest
from hypothesis import HealthCheck, given, settings
from odd_json import mutations, nested, replaced
from sparse_checkpoint import MODELS

from aerie.checkpoint.config import CONFIG, ConfigError, read_drafter, read_target
from aerie.checkpoint.layout import drafter_layout, target_layout
from aerie.checkpoint.shrink import Profile, shrink_drafter, shrink_target
from aerie.rehearsal.static.fit import drafter_fits

KIMI, K2 = "moonshotai--Kimi-K2.5", "moonshotai--Kimi-K2-Instruct"
MLA, LLAMA = "lightseekorg--kimi-k2.5-eagle3-mla", "AQ-MedAI--Kimi-K25-eagle3"
# What the published ones leave out.
OPTIONAL = {
    "num_aux_hidden_states": 3,
    "target_hidden_size": 7168,
    "fc_norm": True,
    "eagle_aux_hidden_state_layer_ids": [2, 30, 58],
}


def published(name):
    return json.loads((MODELS / name / CONFIG).read_text())


def write(directory, config):
    directory.mkdir(exist_ok=True)
    (directory / CONFIG).write_text(config if isinstance(config, str) else json.dumps(config))
    return directory


def refusal(read, directory):
    with pytest.raises(ConfigError) as refused:
        read(directory)
    return str(refused.value)


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("text_config", "hidden_size"), "7", "text_config.hidden_size is '7', expected a whole number of 1 to "),
        (("text_config", "hidden_size"), -1, "text_config.hidden_size is -1, expected "),
        (("text_config", "hidden_size"), True, "text_config.hidden_size is True, expected "),
        (("text_config", "hidden_size"), ..., "text_config.hidden_size is missing, expected "),
        (("text_config", "hidden_size"), 10**30, "text_config.hidden_size is 1000"),
        (("text_config", "hidden_size"), "x" * 10_000, "xxx..., expected "),
        (("text_config", "max_position_embeddings"), ..., "max_position_embeddings is missing"),
        (("text_config", "num_attention_heads"), 0, "num_attention_heads is 0, expected a whole number of 1 to "),
        (("text_config", "kv_lora_rank"), 0, "kv_lora_rank is 0"),
        (("text_config", "q_lora_rank"), ..., "q_lora_rank is missing"),
        (("text_config", "n_routed_experts"), 10**7, "n_routed_experts is 10000000, expected a whole number of 1 to "),
        (("text_config", "n_routed_experts"), 0, "n_routed_experts is 0"),
        (("text_config", "num_hidden_layers"), 10**7, "num_hidden_layers is 10000000"),
        (("text_config", "num_experts_per_tok"), 385, "num_experts_per_tok is 385, expected a whole number of 1 to 38"),
        (("text_config", "n_shared_experts"), "7", "n_shared_experts is '7', expected a whole number of 0 to "),
        (("text_config", "n_shared_experts"), ..., "n_shared_experts is missing"),
        (("text_config", "first_k_dense_replace"), None, "first_k_dense_replace is null"),
        (("text_config", "first_k_dense_replace"), ..., "first_k_dense_replace is missing"),
        (("text_config", "dtype"), 16, "text_config.dtype is 16, expected text"),
        *(
            (("text_config", "routed_scaling_factor"), value, f"routed_scaling_factor is {value!r}, expected a number ")
            for value in ("2", True, 0, -1.0, float("nan"), float("inf"), 10**60)
        ),
        (("text_config", "vocab_size"), 10**7, "vocab_size is 10000000"),
        (("text_config",), "x", "text_config is 'x', expected an object"),
        (("text_config",), [], "text_config is [], expected an object"),
        (("text_config",), 5, "text_config is 5, expected an object"),
        (("vision_config",), "x", "vision_config is 'x', expected an object"),
        (("vision_config", "merge_kernel_size"), 3, "vision_config.merge_kernel_size is 3, expected two whole numbers"),
        (("vision_config", "merge_kernel_size"), [2], "vision_config.merge_kernel_size is [2], expected two"),
        (("vision_config", "merge_kernel_size"), [2, "2"], "vision_config.merge_kernel_size is [2, '2'], expected two"),
        (("vision_config", "vt_num_attention_heads"), 0, "vision_config.vt_num_attention_heads is 0"),
        (("architectures",), "KimiK25ForConditionalGeneration", "architectures is 'KimiK25ForConditionalGeneration', "),
        (("architectures",), ["Llama"], "architectures is ['Llama'], expected a list of one of "),
        (("architectures",), [["Llama"]], "architectures is [['Llama']], expected a list of one of "),
    ],
)  # fmt: skip
def test_a_targets_field_is_named_with_what_it_is_and_should_be(tmp_path, path, value, said):
    directory = write(tmp_path, replaced(published(KIMI), path, value))
    message = refusal(read_target, directory)
    assert message.startswith(f"{directory / CONFIG}: ")
    assert said in message
    assert len(message) < 500


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("config_groups", [], "config_groups is [], expected an object"),
        ("config_groups", {"g": []}, "config_groups.g is [], expected an object"),
        ("config_groups", {"g": {"weights": 4}}, "config_groups.g.weights is 4, expected an object"),
        ("config_groups", {"g": {"weights": {"num_bits": "4"}}}, "config_groups.g.weights.num_bits is '4', expected "),
        ("ignore", "lm_head", "ignore is 'lm_head', expected a list of names and, after re:, of patterns"),
        ("ignore", [1], "ignore is [1], expected "),
        ("ignore", ["re:("], "ignore is ['re:('], expected "),
        ("ignore", ["re:a{99999999999999}"], "ignore is ['re:a{99999999999999}'], expected "),
        ("kv_cache_scheme", "x", "kv_cache_scheme is 'x', expected an object"),
        ("quant_method", 5, "quant_method is 5, expected text"),
    ],
)
def test_so_is_a_field_of_the_quantisation(tmp_path, field, value, said):
    config = replaced(published(KIMI), ("text_config", "quantization_config", field), value)
    message = refusal(read_target, write(tmp_path, config))
    assert f": text_config.quantization_config.{said}" in message
    config["quantization_config"] = config["text_config"].pop("quantization_config")
    assert f": quantization_config.{said}" in refusal(read_target, write(tmp_path, config))


@pytest.mark.parametrize(
    ("name", "field", "value", "said"),
    [
        *(
            (name, field, value, f"{field} is {said}, expected a whole number of 1 to ")
            for name in (MLA, LLAMA)
            for field in ("hidden_size", "vocab_size", "num_attention_heads", "intermediate_size", "num_hidden_layers")
            for value, said in ((..., "missing"), ("7", "'7'"), (-1, "-1"), (0, "0"))
        ),
        (MLA, "kv_lora_rank", ..., "kv_lora_rank is missing"),
        (MLA, "draft_vocab_size", 0, "draft_vocab_size is 0"),
        (MLA, "target_hidden_size", "7", "target_hidden_size is '7'"),
        (MLA, "num_aux_hidden_states", 10**7, "num_aux_hidden_states is 10000000"),
        (MLA, "eagle_config", "x", "eagle_config is 'x', expected an object"),
        (MLA, "eagle_config", {"layer_ids": 5}, "eagle_config.layer_ids is 5, expected a list of whole numbers"),
        (LLAMA, "head_dim", -1, "head_dim is -1"),
        *(
            (MLA, "eagle_aux_hidden_state_layer_ids", value, "eagle_aux_hidden_state_layer_ids is ")
            for value in ("2,3", 5, [2, "30"], [2, True], [2.0], [[2]], [-1, 30], [10**30], [2] * 1000)
        ),
    ],
)
def test_a_drafters_field_alike(tmp_path, name, field, value, said):
    config = published(name)
    config.pop(field, None)
    if value is not ...:
        config[field] = value
    assert f"{CONFIG}: {said}" in refusal(read_drafter, write(tmp_path, config))


def test_an_attention_that_is_not_latent_has_no_ranks():
    assert "kv_lora_rank" not in published(LLAMA)
    assert read_drafter(MODELS / LLAMA).heads == 64


def test_null_is_nothing_where_vllm_takes_it_so(tmp_path):
    config = replaced(published(KIMI), ("text_config", "q_lora_rank"), None)
    assert read_target(write(tmp_path, config)).attention.q_lora_rank is None
    drafter = published(LLAMA) | dict.fromkeys(["head_dim", "num_key_value_heads", "draft_vocab_size", "eagle_config"])
    read = read_drafter(write(tmp_path, drafter))
    assert (read.head_size, read.kv_heads, read.draft_vocabulary, read.aux_layers) == (112, 64, 163840, None)


def test_a_tower_without_fields_has_those_of_its_class(tmp_path):
    whole = read_target(MODELS / KIMI)
    for given_value in (..., None, {}):
        bare = read_target(write(tmp_path, replaced(published(KIMI), ("vision_config",), given_value)))
        assert bare.vision == whole.vision
        for profile in Profile:
            smaller = read_target(write(tmp_path, shrink_target(bare, profile).config))
            assert smaller.vision.layers == (2 if profile is Profile.CPU else 27)


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "5", "null", '"x"', "[" * 100_000, '{"a":' * 100_000, '{"a":' + "9" * 6000 + "}", "\ufeff{}"],
)
@pytest.mark.parametrize("read", [read_target, read_drafter])
def test_a_file_that_is_no_object(tmp_path, read, content):
    assert str(tmp_path / CONFIG) in refusal(read, write(tmp_path, content))


@pytest.mark.parametrize("depth", [100, 300, 900])
def test_a_file_too_deep_to_be_copied(tmp_path, depth):
    message = refusal(read_target, write(tmp_path, published(KIMI) | {"more": nested(depth)}))
    assert "deep" in message


def test_a_pipe_is_no_file(tmp_path):
    """Whoever opens it waits for a writer."""
    os.mkfifo(tmp_path / CONFIG)
    assert "cannot be read" in refusal(read_target, tmp_path)


def small(config):
    """Of a target, so that its layout takes milliseconds."""
    part = config.get("text_config", config)
    part |= {"num_hidden_layers": 3, "n_routed_experts": 8}
    return config


TARGETS = [small(published(name)) for name in (KIMI, K2)]
REAL = read_target(MODELS / K2)
DRAFTERS = [published(name) | more for name in (MLA, LLAMA) for more in ({}, OPTIONAL)]


def tried(function, *arguments):
    """Return its result, None where it refuses in words that can be printed."""
    try:
        return function(*arguments)
    except ConfigError as error:
        words = str(error)
    assert words.isprintable()
    return None


@settings(
    max_examples=250, deadline=2000, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(target=mutations(TARGETS), drafter=mutations(DRAFTERS))
@pytest.mark.filterwarnings("ignore:Possible nested set:FutureWarning")
def test_nothing_but_a_config_error_comes_of_any_file(tmp_path, target, drafter):
    target = tried(read_target, write(tmp_path / "target", target))
    drafter = tried(read_drafter, write(tmp_path / "drafter", drafter))
    if target:
        tried(target_layout, target)
    if drafter:
        tried(drafter_layout, drafter)
    target = target or REAL
    if drafter:
        assert all(finding.text.isprintable() for finding in drafter_fits(target, drafter, {}, 4096, ()))
    for profile in Profile:
        smaller = tried(read_target, write(tmp_path / "smaller", shrink_target(target, profile).config))
        if smaller and drafter:
            tried(shrink_drafter, drafter, target, smaller, profile)
