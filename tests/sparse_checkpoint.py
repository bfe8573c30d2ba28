"""Checkpoints whose headers are real and whose weights are holes: 595 GB that take a few megabytes of disk."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from aerie.checkpoint.layout import Expected

MODELS = Path(__file__).parent / "models"
"""The configuration of published models, without weights."""


def write_sparse(
    directory: Path, layout: Mapping[str, Expected], shard_of: Callable[[str], int] = lambda _: 1, *, index: bool = True
) -> None:
    """Write these tensors into as many shards as `shard_of` numbers, from 1 on, and an index over them."""
    shards: dict[int, dict[str, Expected]] = defaultdict(dict)
    for name, expected in layout.items():
        shards[shard_of(name)][name] = expected
    weight_map = {}
    for number, tensors in sorted(shards.items()):
        file = f"model-{number:05}-of-{max(shards):06}.safetensors"
        weight_map |= dict.fromkeys(tensors, file)
        write_shard(directory / file, tensors)
    if index:
        total = sum(expected.size for expected in layout.values())
        content = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (directory / "model.safetensors.index.json").write_text(json.dumps(content))


def write_shard(path: Path, tensors: Mapping[str, Expected]) -> None:
    """Write one file with these tensors."""
    described, end = {}, 0
    for name, expected in tensors.items():
        begin, end = end, end + expected.size
        described[name] = {"dtype": expected.dtype, "shape": expected.shape, "data_offsets": [begin, end]}
    header = json.dumps(described).encode()
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + end)


def published_shard(name: str) -> int:
    """Return the shard that has a tensor of the published Kimi-K2.5 (64 shards; its index)."""
    if name.startswith("vision_tower"):
        return 64
    if name.startswith("mm_projector"):
        return 63
    _, _, rest = name.partition("layers.")
    return int(rest.partition(".")[0]) + 1 if rest else 62
