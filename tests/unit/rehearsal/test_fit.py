"""Whether a drafter fits a target."""

from __future__ import annotations

from pathlib import Path

import pytest

from aerie.checkpoint.config import read_drafter, read_target
from aerie.checkpoint.files import Tensor
from aerie.checkpoint.layout import drafter_layout
from aerie.rehearsal.findings import Verdict
from aerie.rehearsal.static.fit import drafter_fits, generation

CONTEXT = 131_072


READS_NESTED = frozenset({"eagle3-aux-layer-ids"})


def findings(target, drafter, tensors=None, longest=CONTEXT, patches=READS_NESTED):
    target, drafter = read_target(target.directory), read_drafter(drafter.directory)
    if tensors is None:
        tensors = {
            name: Tensor(*each, "model.safetensors", each.size) for name, each in drafter_layout(drafter).items()
        }
    return {finding.check: finding for finding in drafter_fits(target, drafter, tensors, longest, patches)}


def verdicts(found):
    return {check: finding.verdict for check, finding in found.items() if finding.verdict is not Verdict.PASSED}


@pytest.mark.parametrize(
    "name", ["lightseekorg--kimi-k2.5-eagle3", "lightseekorg--kimi-k2.5-eagle3-mla", "AQ-MedAI--Kimi-K25-eagle3"]
)
def test_the_published_drafters_fit(kimi, published, name):
    assert verdicts(findings(kimi, published(name))) == {}


YARN = {"type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096}


@pytest.mark.parametrize("field", ["rope_scaling", "rope_parameters"])
def test_a_drafter_without_positions_reaches_as_far_as_its_yarn(kimi, mla_drafter, field):
    mla_drafter.change(rope_scaling=None)
    found = findings(kimi, mla_drafter.change(**{field: YARN}))["drafter positions"]
    assert (found.verdict, found.text) == (Verdict.PASSED, "262,144, by rope_scaling, for requests of 131,072 tokens")
    found = findings(kimi, mla_drafter.change(**{field: YARN | {"factor": 16}}))["drafter positions"]
    assert found.verdict is Verdict.WARNED
    assert "end at 65,536, by rope_scaling, and requests may have 131,072 tokens" in found.text
    assert found.remedy.startswith("measure acceptance on long requests")


@pytest.mark.parametrize(
    "scaling",
    [None, [4], {"type": "linear", "factor": 64}, YARN | {"factor": None}, YARN | {"factor": 1e999},
     YARN | {"original_max_position_embeddings": "4096"}, YARN | {"factor": -2}, YARN | {"rope_type": {}}],
)  # fmt: skip
def test_a_drafter_without_positions_has_deepseeks(kimi, mla_drafter, scaling):
    found = findings(kimi, mla_drafter.change(rope_scaling=scaling))
    assert verdicts(found) == {"drafter positions": Verdict.WARNED}
    assert "end at 4,096, which vLLM assumes, as its config.json names none," in found["drafter positions"].text
    assert "max-model-len" not in found["drafter positions"].remedy
    assert verdicts(findings(kimi, mla_drafter, longest=4096)) == {}


def test_layers_that_are_counted_by_their_outputs_are_pointed_out(kimi, published):
    found = findings(kimi, published("nvidia--Kimi-K2.5-Thinking-Eagle3"))
    assert verdicts(found) == {"auxiliary layers": Verdict.WARNED}
    assert found["auxiliary layers"].text.startswith(
        "the inputs of layers 1, 29, 57, each one lower than vLLM's default"
    )


def test_nested_ids_that_this_vllm_does_not_look_for(kimi, mla_drafter):
    nested = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [4, 30, 58]}}
    assert findings(kimi, mla_drafter.change(**nested))["auxiliary layers"].verdict is Verdict.PASSED
    found = findings(kimi, mla_drafter, patches=())["auxiliary layers"]
    assert found.verdict is Verdict.FAILED
    assert found.text.endswith("does not look into eagle_config for 4, 30, 58, and gives the drafter 2, 30, 58")
    mla_drafter.change(eagle_aux_hidden_state_layer_ids=[4, 30, 58])
    assert findings(kimi, mla_drafter, patches=())["auxiliary layers"].verdict is Verdict.PASSED


@pytest.mark.parametrize(
    ("change", "check", "said"),
    [
        (
            {"target_hidden_size": 4096},
            "drafter hidden size",
            "reads states of 4096 elements, and the target's have 7168",
        ),
        ({"vocab_size": 129280}, "drafter vocabulary", "the drafter reads 129,280 ids, the target has 163,840"),
        ({"draft_vocab_size": 200000}, "drafter vocabulary", "the drafter drafts 200,000 ids of 163,840"),
    ],
)
def test_a_drafter_for_another_target(kimi, mla_drafter, change, check, said):
    finding = findings(kimi, mla_drafter.change(**change))[check]
    assert finding.verdict is Verdict.FAILED
    assert said in finding.text
    assert finding.remedy


def test_fc_of_another_width(kimi, mla_drafter):
    """Made for a target of 4096 elements, whatever its config.json says."""
    fc = {"fc.weight": Tensor("BF16", (7168, 3 * 4096), "model.safetensors", 0), "embed_tokens.weight": None}
    finding = findings(kimi, mla_drafter, fc)["drafter hidden size"]
    assert finding.verdict is Verdict.FAILED
    assert finding.text == "fc.weight reads 12288 elements, and 3 auxiliary states of 7168 have 21504"


def test_an_embedding_that_cannot_be_shared(kimi, mla_drafter):
    mla_drafter.change(hidden_size=4096, target_hidden_size=7168)
    finding = findings(kimi, mla_drafter, {"norm.weight": None})["drafter hidden size"]
    assert finding.verdict is Verdict.FAILED
    assert "no embedding of its own and 4096 elements, the target's embedding has 7168" in finding.text


@pytest.mark.parametrize(
    ("ids", "said"),
    [
        ([0, 30, 61], None),
        ([2, 30, 62], "layer 62 of 61: id i is the input of layer i, so ids are 0 to 61"),
        ([2, 30, 70], "layer 70 of 61"),
        ([2, 30, 30], "an id occurs twice in [2, 30, 30]"),
        ([58, 30, 2], "[58, 30, 2] is not in ascending order"),
        ([2, 30], None),
    ],
)
@pytest.mark.parametrize("nested", [False, True])
def test_layer_ids(kimi, mla_drafter, ids, said, nested):
    if nested:
        mla_drafter.change(eagle_config={"eagle_aux_hidden_state_layer_ids": ids})
    else:
        mla_drafter.change(eagle_aux_hidden_state_layer_ids=ids)
    finding = findings(kimi, mla_drafter)["auxiliary layers"]
    if said is None:
        assert finding.verdict is Verdict.PASSED
    else:
        assert finding.verdict is Verdict.FAILED
        assert said in finding.text
        assert str(mla_drafter.directory) in finding.remedy


def test_numbers_of_states_that_contradict_each_other(kimi, mla_drafter):
    found = findings(kimi, mla_drafter.change(num_aux_hidden_states=4))["auxiliary layers"]
    assert (found.verdict, found.text) == (Verdict.FAILED, "3 ids, and num_aux_hidden_states is 4")
    found = findings(kimi, mla_drafter.change(eagle_config=None))["auxiliary layers"]
    assert (found.verdict, found.text[:46]) == (Verdict.FAILED, "the drafter reads 4 states and names no layers")


def test_a_reduced_vocabulary_without_its_mapping(kimi, published):
    drafter = published("AQ-MedAI--Kimi-K25-eagle3")
    finding = findings(kimi, drafter, {"fc.weight": None})["drafter vocabulary"]
    assert finding.verdict is Verdict.FAILED
    assert "has no d2t" in finding.text


def test_another_dtype(kimi, mla_drafter):
    found = findings(kimi, mla_drafter.change(torch_dtype="float16"))["drafter dtype"]
    assert found.verdict is Verdict.WARNED
    assert "published in float16, and vLLM runs it in the target's bfloat16" in found.text


@pytest.mark.parametrize(
    ("path", "named"),
    [
        ("/data/models/Kimi-K2.5", "K2.5"),
        ("/data/models/kimi-k2.6-eagle3-mla", "K2.6"),
        ("/data/AQ-MedAI--Kimi-K25-eagle3", "K2.5"),
        ("/data/Kimi-K2-Instruct-0905", "K2"),
        ("/hub/models--moonshotai--Kimi-K2.7-Code/snapshots/0b0c6ac039089ad2c2418c91c039553381a302d9", "K2.7"),
        ("/data/Kimi-K2.5/target", "K2.5"),
        ("/data/kimi-k2-5", "K2.5"),
        ("/data/kimi_k2_5_eagle3", "K2.5"),
        ("/data/Kimi-K2p5", "K2.5"),
        ("/data/Kimi-K2-8bit", "K2"),
        ("/data/Kimi-K2-Instruct-2", "K2"),
        ("/data/Kimi-K25-eagle3", "K2.5"),
        ("/data/kimi_k2", "K2"),
        ("/data/llama", None),
        ("/data/kimi-linear", None),
    ],
)
def test_generations_are_read_from_names(tmp_path, path, named):
    assert generation(Path(path), Path("/elsewhere/drafter")) == named


# What stands in the names of a target with vision and of a drafter for K2.5.
@pytest.mark.parametrize(
    ("target", "drafter", "verdict"),
    [
        ("kimi-k2-5", "kimi-k2.5-eagle3-mla", Verdict.PASSED),
        ("Kimi-K2p5", "kimi-k2.5-eagle3", Verdict.PASSED),
        ("Kimi-K2.5", "Kimi-K2.5/eagle3", Verdict.PASSED),
        # A name that both share is the house's, and the vision tower tells more than a name.
        ("kimi-k2/Kimi-K2.5", "kimi-k2/eagle3", Verdict.SKIPPED),
        ("kimi-k2/target", "kimi-k2/eagle3", Verdict.SKIPPED),
        ("kimi-k2-serving/target", "Kimi-K2.5-eagle3", Verdict.SKIPPED),
        ("Kimi-K2", "Kimi-K2.5-eagle3", Verdict.SKIPPED),
        ("Kimi-K2", "Kimi-K2-eagle3", Verdict.SKIPPED),
        ("target", "Kimi-K2-eagle3", Verdict.FAILED),
        ("Kimi-K2.6", "Kimi-K2.5-eagle3", Verdict.FAILED),
    ],
)
def test_names_of_houses_count_for_nothing(published, target, drafter, verdict):
    pair = published("moonshotai--Kimi-K2.5", target), published("lightseekorg--kimi-k2.5-eagle3-mla", drafter)
    assert findings(*pair)["drafter generation"].verdict is verdict


def test_a_drafter_of_another_generation(published):
    target = published("moonshotai--Kimi-K2.5")
    drafter = published("lightseekorg--kimi-k2.5-eagle3-mla", called="kimi-k2.6-eagle3-mla")
    finding = findings(target, drafter)["drafter generation"]
    assert finding.verdict is Verdict.FAILED
    assert "for Kimi-K2.6 and the target is a Kimi-K2.5" in finding.text


def test_a_drafter_without_a_generation_is_told_as_not_looked_at(kimi, published):
    drafter = published("lightseekorg--kimi-k2.5-eagle3-mla", called="drafter")
    assert findings(kimi, drafter)["drafter generation"].verdict is Verdict.SKIPPED
