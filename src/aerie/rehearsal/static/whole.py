"""Is a checkpoint whole: its files against its index, and its tensors against what its config.json asks for. Pure.

vLLM does not notice most of it: tensors that are missing from a quantised target or from any EAGLE-3 drafter stay as
they were allocated, and so does the rest of an expert that is smaller than it should be
(vllm/model_executor/model_loader/default_loader.py, layers/fused_moe/routed_experts.py, 0.32.0).
"""

import re
from collections.abc import Iterator, Mapping

from aerie.checkpoint.files import Tensor, Weights, some
from aerie.checkpoint.layout import Layout
from aerie.rehearsal.findings import Finding, failed, passed, warned

_LEFT_OUT = re.compile(
    r"rotary(?:_pos)?_emb\.(?:inv_freq|cos_cached|sin_cached)|\.indexer\."
    r"|\.(?:[qkv]_(?:scale|zero_point)|kv_scale|q\.scale|[kv]_cache\.scale)$"
    r"|^(?!.*\.mlp\.experts\.).*\.bias$"
    r"|t2d|mask_hidden"
)
"""Tensors beyond the layout that loaders leave out (models/utils.py, deepseek_v2.py, deepseek_eagle3.py,
llama_eagle3.py, quantization/base_config.py)."""
_OF_SOME_QUANTISATIONS = re.compile(r"\.weight_(?:zero_point|g_idx)$")
_LAYER = re.compile(r"(?:^|\.)layers\.(\d{1,9})\.")
_FLOATS = frozenset({"BF16", "F16", "F32"})
_GB = 1e9


def weights_are_whole(role: str, weights: Weights, layout: Layout, names: Mapping[str, str]) -> Iterator[Finding]:
    """Yield what is wrong with a checkpoint's weights, or that nothing is.

    `role` is target or drafter; `names` gives for each tensor of the files what `layout` calls it.
    """
    check = f"{role} files"
    problems = 0
    for fault in weights.faults:
        yield (failed if fault.fatal else warned)(check, fault.text, fault.remedy)
        problems += fault.fatal
    # What is missing because a file is missing or broken was told with the file.
    if not problems:
        for finding in _against_layout(role, {names[name]: tensor for name, tensor in weights.tensors.items()}, layout):
            yield finding
            problems += 1
    if not problems:
        files = len({tensor.file for tensor in weights.tensors.values()})
        told = f"{files} file{'s' if files > 1 else ''}, {len(weights.tensors):,} tensors, {weights.size / _GB:,.1f} GB"
        yield passed(check, f"{told}, as config.json asks for")


def _against_layout(role: str, tensors: Mapping[str, Tensor], layout: Layout) -> Iterator[Finding]:
    check = f"{role} tensors"
    if missing := layout.keys() - tensors.keys():
        yield failed(
            check,
            f"{len(missing):,} of the {len(layout):,} tensors that config.json asks for are not in the files: "
            f"{some(missing)}",
            "config.json and weights are of two models or revisions: fetch both from the same one",
        )
    shapes = {name for name in layout.keys() & tensors.keys() if tensors[name].shape != layout[name].shape}
    if shapes:
        first = min(shapes)
        yield failed(
            check,
            f"{first} in {tensors[first].file} has the shape {list(tensors[first].shape)}, and config.json asks for "
            f"{list(layout[first].shape)}{_more(shapes)}",
            "config.json and weights are of two models or revisions: fetch both from the same one",
        )
    dtypes = {name for name in layout.keys() & tensors.keys() if tensors[name].dtype != layout[name].dtype} - shapes
    if dtypes:
        first = min(dtypes)
        found, expected = tensors[first].dtype, layout[first].dtype
        report = warned if {found, expected} <= _FLOATS else failed
        yield report(
            check,
            f"{first} in {tensors[first].file} is {found}, and {expected} was expected{_more(dtypes)}",
            "vLLM converts floating-point numbers as it loads them; for anything else fetch the file again",
        )
    others = {name for name in tensors.keys() - layout.keys() if not _LEFT_OUT.search(name)}
    doubtful = {name for name in others if _OF_SOME_QUANTISATIONS.search(name)} | _beyond_the_last_layer(others, layout)
    if doubtful:
        yield warned(
            check,
            f"config.json knows nothing of {some(doubtful)}",
            "vLLM reads or leaves out such tensors by quantization_config and num_nextn_predict_layers, and otherwise "
            "ends its load there: see whether config.json is this checkpoint's",
        )
    if others := others - doubtful:
        yield failed(
            check,
            f"config.json knows nothing of {some(others)}: vLLM ends its load there",
            "config.json and weights are of two models or revisions: fetch both from the same one",
        )


def _beyond_the_last_layer(names: set[str], layout: Layout) -> set[str]:
    """Return those of layers for multi-token prediction, whose number no layout has."""
    last = max((int(found[1]) for name in layout if (found := _LAYER.search(name))), default=None)
    if last is None:  # of a drafter with its midlayer alone
        return set()
    return {name for name in names if (found := _LAYER.search(name)) and int(found[1]) > last}


def _more(names: set[str]) -> str:
    return f", and {len(names) - 1:,} more such tensors" if len(names) > 1 else ""
