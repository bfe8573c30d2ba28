"""Writes a checkpoint of Kimi-K2.5's architecture of a wanted size, as fast as the disk takes it.

Its weights are a block of random numbers over and over, so nothing sensible is said with it; loaders cannot tell. The
vocabulary and the vision tower are the tiny pair's. Needs NumPy and the tokenizers library.
"""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path
from typing import NamedTuple

import numpy as np

from aerie.checkpoint.config import read_target
from aerie.checkpoint.layout import Expected, target_layout
from aerie.checkpoint.tiny import configs, tokenizer

_SHARD = 2_000_000_000
_BLOCK = 64 * 2**20  # bytes
_STEP = 1_048_583 * 2  # bytes from where one tensor begins in the block to where the next does
_PUBLISHED = Path(__file__).resolve().parents[2] / "models/moonshotai--Kimi-K2.5/config.json"


class Widths(NamedTuple):
    """What decides how large a tensor is."""

    hidden: int
    heads: int
    query_rank: int
    expert: int
    dense: int
    layers: int = 7


REAL = Widths(hidden=7168, heads=64, query_rank=1536, expert=2048, dense=18432)
"""Kimi-K2.5's: an expert's matrix has 29 MB in BF16, and 7 MB in INT4."""
NARROW = Widths(hidden=2048, heads=16, query_rank=1536, expert=1024, dense=4096, layers=31)
"""An expert's matrix has 4 MB in BF16. So many layers, since a CPU repacks one after the other, beside the rest."""
TINY = Widths(hidden=512, heads=4, query_rank=256, expert=256, dense=1024)
"""For a trial."""


def write(directory: Path, size: int, widths: Widths, *, int4: bool = False) -> int:
    """Write a checkpoint of about so many bytes and return how many it has; one that is there already is kept.

    Raises OSError where it cannot be written.
    """
    finished = directory / "finished.json"
    wanted = {"size": size, "widths": widths._asdict(), "int4": int4, "shard": _SHARD}
    if finished.is_file():
        there = json.loads(finished.read_text())
        if there["wanted"] == wanted:
            return int(there["bytes"])
    directory.mkdir(parents=True, exist_ok=True)
    for old in directory.iterdir():
        old.unlink()
    total, tensors = write_weights(directory, size, widths, int4=int4)
    tokenizer.write_json(directory / "generation_config.json", configs.GENERATION)
    tokenizer.write_json(directory / "preprocessor_config.json", configs.PREPROCESSOR)
    tokenizer.write_fast_form(directory)
    finished.write_text(json.dumps({"wanted": wanted, "bytes": total, "tensors": tensors}))
    return total


def write_weights(directory: Path, size: int, widths: Widths, *, int4: bool = False) -> tuple[int, int]:
    """Write config.json, the shards and their index, and return how many bytes and tensors there are."""
    layout = _layout(directory, size, widths, int4=int4)
    shards = _shards(layout)
    block = _random_block()
    weight_map: dict[str, str] = {}
    for number, tensors in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):06}.safetensors"
        weight_map |= dict.fromkeys(tensors, file)
        _write_shard(directory / file, tensors, layout, block, number)
    total = sum(expected.size for expected in layout.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return total, len(layout)


def _layout(directory: Path, size: int, widths: Widths, *, int4: bool) -> dict[str, Expected]:
    """Write config.json, with as many experts as come nearest to the size, and return the tensors."""
    config = copy.deepcopy(configs.TARGET)
    text = config["text_config"]
    text |= {
        "hidden_size": widths.hidden,
        "num_attention_heads": widths.heads,
        "num_key_value_heads": widths.heads,
        "q_lora_rank": widths.query_rank,
        "moe_intermediate_size": widths.expert,
        "intermediate_size": widths.dense,
        "num_hidden_layers": widths.layers,
    }
    config["vision_config"]["text_hidden_size"] = widths.hidden
    if int4:
        published = json.loads(_PUBLISHED.read_text())
        text["quantization_config"] = published["text_config"]["quantization_config"]

    def with_experts(count: int) -> dict[str, Expected]:
        text["n_routed_experts"] = count
        tokenizer.write_json(directory / "config.json", config)
        return target_layout(read_target(directory))

    sizes = [sum(expected.size for expected in with_experts(count).values()) for count in (8, 16)]
    each = (sizes[1] - sizes[0]) / 8
    # An even number, for two ranks.
    return with_experts(min(384, max(8, 2 * round((size - sizes[0]) / each / 2) + 8)))


def _shards(layout: dict[str, Expected]) -> list[dict[str, Expected]]:
    shards: list[dict[str, Expected]] = [{}]
    held = 0
    for name, expected in layout.items():
        if shards[-1] and held + expected.size > _SHARD:
            shards.append({})
            held = 0
        shards[-1][name] = expected
        held += expected.size
    return shards


def _random_block() -> np.ndarray:
    """Return BF16's bytes of small normal numbers, twice over, so that it can be read from anywhere in it."""
    numbers = np.random.default_rng(0).standard_normal(_BLOCK // 2, dtype=np.float32) * np.float32(0.02)
    block = (numbers.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    return np.concatenate([block, block])


def _write_shard(
    path: Path, tensors: dict[str, Expected], layout: dict[str, Expected], block: np.ndarray, seed: int
) -> None:
    described, end = {}, 0
    for name, expected in tensors.items():
        begin, end = end, end + expected.size
        described[name] = {"dtype": expected.dtype, "shape": list(expected.shape), "data_offsets": [begin, end]}
    header = json.dumps({"__metadata__": {"format": "pt"}, **described}).encode()
    header += b" " * (-len(header) % 8)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for number, (name, expected) in enumerate(tensors.items()):
            for piece in _pieces(name, expected, layout, block, (seed * 7919 + number) * _STEP):
                file.write(piece)
        file.flush()
        os.fsync(file.fileno())


def _pieces(name: str, expected: Expected, layout: dict[str, Expected], block: np.ndarray, at: int):
    """Yield a tensor's bytes; the packed weights that a shape is of may be in another shard."""
    if name.endswith("weight_shape"):
        rows, words = layout[name.replace("weight_shape", "weight_packed")].shape
        yield np.array([rows, words * 8], dtype=np.int32).tobytes()
        return
    if name.endswith((".bias", "e_score_correction_bias")):
        yield bytes(expected.size)
        return
    left = expected.size
    while left:
        begin = at % _BLOCK
        taken = min(left, _BLOCK)
        yield memoryview(block[begin : begin + taken])
        left -= taken
        at += taken
