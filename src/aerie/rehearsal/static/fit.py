"""Does this drafter fit this target, by their config files and headers. Pure.

The rules are those of EAGLE-3's loaders in vLLM 0.32.0 (deepseek_eagle3.py, llama_eagle3.py, config/speculative.py,
v1/worker/gpu/spec_decode/eagle), most of which say nothing, or say it after the load.
"""

import math
import re
from collections.abc import Container, Iterator, Mapping
from pathlib import Path

from aerie.checkpoint.config import Drafter, Target, default_aux_layers
from aerie.checkpoint.files import Tensor
from aerie.rehearsal.findings import Finding, failed, passed, skipped, warned

_GENERATION = re.compile(
    r"kimi[-_]?k[-_]?(\d)"
    # Of K2-0905 and K2-8bit what follows is no second number.
    r"(?:\.?(\d)(?!\d)|[-_p](\d)(?![0-9a-z]))?(?!\d)",
    re.IGNORECASE,
)
_DEEPSEEK_POSITIONS = 4096
"""What transformers' DeepseekV3Config takes where max_position_embeddings is missing."""
_YARN = ("yarn", "deepseek_yarn")
_MOST_POSITIONS = 2**40
"""Far beyond any model's; larger numbers, and infinity, are a mistake."""
_READS_NESTED = "eagle3-aux-layer-ids"
"""The patch without which the V2 runner takes its default, and says nothing."""


def drafter_fits(
    target: Target, drafter: Drafter, tensors: Mapping[str, Tensor], longest: int, patches: Container[str]
) -> Iterator[Finding]:
    """Yield for each respect whether they fit.

    `tensors` are the drafter's by the names of `drafter_layout`, {} where there are no weights; `longest` is the
    longest request in tokens, and `patches` are those in this vLLM.
    """
    yield _generation(target, drafter)
    yield _hidden_sizes(target, drafter, tensors)
    yield _aux_layers(target, drafter, patches)
    yield _vocabulary(target, drafter, tensors)
    yield _positions(drafter, longest)
    yield _dtype(target, drafter)


def generation(directory: Path, other: Path) -> str | None:
    """Return a Kimi's generation, such as K2.5, by its directory's name or those above it; None where none says so.

    A directory that `other` lies in, too, is named for the house and not for one of them.
    """
    shared = {*directory.parents} & {*other.parents}
    for path in (directory, *directory.parents):
        if path in shared:
            break
        if found := _GENERATION.search(path.name):
            minor = found[2] or found[3]
            return f"K{found[1]}" + (f".{minor}" if minor else "")
    return None


def _generation(target: Target, drafter: Drafter) -> Finding:
    check = "drafter generation"
    ours, its = generation(target.directory, drafter.directory), generation(drafter.directory, target.directory)
    if target.is_multimodal and ours == "K2":
        return skipped(check, f"{target.directory} has a vision tower, which no K2 has: names tell nothing here")
    if target.is_multimodal and ours is None and its == "K2":
        ours = "K2.5 or later"
    if ours is None or its is None:
        unnamed = target.directory if ours is None else drafter.directory
        return skipped(check, f"{unnamed.name} does not name its generation, and no config.json does")
    if ours != its:
        return failed(
            check,
            f"the drafter is for Kimi-{its} and the target is a Kimi-{ours}, by the names of their directories",
            "take the drafter that was trained on this target: another one is accepted rarely, and slows serving down",
            "https://github.com/vllm-project/recipes/pull/428",
        )
    return passed(check, f"both are of Kimi-{ours}")


def _hidden_sizes(target: Target, drafter: Drafter, tensors: Mapping[str, Tensor]) -> Finding:
    check = "drafter hidden size"
    remedy = "take the drafter that was trained on this target"
    states = drafter.aux_states * target.hidden_size
    if drafter.target_hidden_size != target.hidden_size:
        return failed(
            check,
            f"the drafter reads states of {drafter.target_hidden_size} elements, and the target's have "
            f"{target.hidden_size}",
            remedy,
        )
    if "embed_tokens.weight" not in tensors and tensors and drafter.hidden_size != target.hidden_size:
        return failed(
            check,
            f"the drafter has no embedding of its own and {drafter.hidden_size} elements, the target's embedding has "
            f"{target.hidden_size}",
            remedy,
        )
    if (fc := tensors.get("fc.weight")) and fc.shape[1:] != (states,):
        return failed(
            check,
            f"fc.weight reads {fc.shape[-1]} elements, and {drafter.aux_states} auxiliary states of "
            f"{target.hidden_size} have {states}",
            f"{remedy}, or write as many layer ids into its config.json as its fc has states",
        )
    return passed(check, f"fc reads {drafter.aux_states} states of {target.hidden_size} elements")


def _aux_layers(target: Target, drafter: Drafter, patches: Container[str]) -> Finding:
    check = "auxiliary layers"
    ids, default = drafter.aux_layers, default_aux_layers(target.layers)
    where = f"eagle_aux_hidden_state_layer_ids of {drafter.directory / 'config.json'}"
    if ids is None:
        if drafter.aux_states != len(default):
            return failed(
                check,
                f"the drafter reads {drafter.aux_states} states and names no layers; vLLM would give it {default}",
                f"write the layers' ids as {where}",
            )
        return passed(check, f"the drafter names none, so the inputs of layers {_listed(default)}")
    if wrong := _wrong_ids(ids, target.layers, drafter.aux_states):
        text, remedy = wrong
        return failed(check, text, f"{remedy}: {where}")
    if ids != default and "eagle_aux_hidden_state_layer_ids" not in drafter.whole and _READS_NESTED not in patches:
        return failed(
            check,
            f"this vLLM does not look into eagle_config for {_listed(ids)}, and gives the drafter {_listed(default)}",
            f"use an image with the patch {_READS_NESTED}, or write them at the top level as {where}",
            "vllm/v1/worker/gpu/spec_decode/eagle",
        )
    if ids == tuple(each - 1 for each in default):
        return warned(
            check,
            f"the inputs of layers {_listed(ids)}, each one lower than vLLM's default: Model Optimizer counts outputs",
            f"if this drafter was exported by Model Optimizer from a Hugging Face model, add 1 to each of {where}",
            "https://github.com/sgl-project/sglang/pull/25454",
        )
    return passed(check, f"the inputs of layers {_listed(ids)}")


def _wrong_ids(ids: tuple[int, ...], layers: int, states: int) -> tuple[str, str] | None:
    """Return what is wrong with the ids, and what to do; None where nothing is."""
    numbers = list(ids)
    if outside := [each for each in numbers if each > layers]:
        return (
            f"layer {outside[0]} of {layers}: id i is the input of layer i, so ids are 0 to {layers}",
            "take the drafter that was trained on this target, or correct them",
        )
    if len(set(numbers)) != len(numbers):
        return f"an id occurs twice in {numbers}: fc would get too few states", "name each layer once"
    if numbers != sorted(numbers):
        return (
            f"{numbers} is not in ascending order, in which the target hands its states on",
            "sort them; if its fc was trained in the other order, its columns have to be sorted alike",
        )
    if states != len(numbers):
        return f"{len(numbers)} ids, and num_aux_hidden_states is {states}", "correct one of them"
    return None


def _vocabulary(target: Target, drafter: Drafter, tensors: Mapping[str, Tensor]) -> Finding:
    check = "drafter vocabulary"
    if drafter.vocabulary != target.vocabulary:
        return failed(
            check,
            f"the drafter reads {drafter.vocabulary:,} ids, the target has {target.vocabulary:,}",
            "take the drafter that was trained on this target",
        )
    if drafter.draft_vocabulary > target.vocabulary:
        return failed(
            check,
            f"the drafter drafts {drafter.draft_vocabulary:,} ids of {target.vocabulary:,}",
            "correct draft_vocab_size in its config.json",
        )
    if drafter.draft_vocabulary == target.vocabulary:
        return passed(check, f"all {target.vocabulary:,} ids")
    if tensors and "d2t" not in tensors:
        return failed(
            check,
            f"the drafter drafts {drafter.draft_vocabulary:,} of {target.vocabulary:,} ids and has no d2t, which says "
            "which; vLLM would take the first ones",
            "fetch the drafter again, from where d2t is in its weights",
        )
    return passed(check, f"{drafter.draft_vocabulary:,} of {target.vocabulary:,} ids, mapped by d2t")


def _positions(drafter: Drafter, longest: int) -> Finding:
    check = "drafter positions"
    positions, origin = drafter.positions, ""
    if positions is None and (positions := _scaled_positions(drafter)):
        origin = ", by rope_scaling"
    if positions is None and drafter.is_mla:
        positions, origin = _DEEPSEEK_POSITIONS, ", which vLLM assumes, as its config.json names none"
    if positions is None:
        return skipped(check, "the drafter's config.json names none, in max_position_embeddings or rope_scaling")
    if positions < longest:
        return warned(
            check,
            f"the drafter's positions end at {positions:,}{origin}, and requests may have {longest:,} tokens: it may "
            "be accepted less beyond them",
            "measure acceptance on long requests, or take a drafter that was trained on longer texts",
            "vllm/model_executor/layers/rotary_embedding",
        )
    return passed(check, f"{positions:,}{origin}, for requests of {longest:,} tokens")


def _scaled_positions(drafter: Drafter) -> int | None:
    """Return how far YaRN reaches (deepseek_scaling_rope.py), None where the config.json does not say."""
    given = drafter.whole.get("rope_scaling") or drafter.whole.get("rope_parameters")
    if not isinstance(given, dict) or given.get("rope_type", given.get("type")) not in _YARN:
        return None
    factors = [given.get("factor"), given.get("original_max_position_embeddings")]
    numbers = [each for each in factors if isinstance(each, int | float) and 0 < each < _MOST_POSITIONS]
    return int(math.prod(numbers)) if len(numbers) == len(factors) else None


def _dtype(target: Target, drafter: Drafter) -> Finding:
    check = "drafter dtype"
    ours, its = target.dtype, drafter.dtype
    if ours is None or its is None:
        return skipped(check, "a config.json does not say its dtype; vLLM takes the target's for both")
    if ours != its:
        return warned(
            check,
            f"the drafter was published in {its}, and vLLM runs it in the target's {ours}",
            "see whether it comes in the target's dtype, too",
        )
    return passed(check, ours)


def _listed(ids: tuple[int, ...]) -> str:
    return ", ".join(str(each) for each in ids)
