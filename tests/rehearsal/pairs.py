"""The pair that faults are planted in: the published configurations, and all of their tensors in files of holes."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sparse_checkpoint import MODELS, published_shard, write_sparse

from aerie.checkpoint.config import read_drafter, read_target
from aerie.checkpoint.layout import drafter_layout, target_layout
from aerie.checkpoint.tiny.tokenizer import write_tiktoken_form
from aerie.rehearsal.stand_in import stand_in_for

if TYPE_CHECKING:
    from pathlib import Path

TARGET, MLA, LLAMA = "Kimi-K2.5", "kimi-k2.5-eagle3-mla", "kimi-k2.5-eagle3"
PUBLISHED = {
    TARGET: "moonshotai--Kimi-K2.5", MLA: "lightseekorg--kimi-k2.5-eagle3-mla", LLAMA: "lightseekorg--kimi-k2.5-eagle3"
}  # fmt: skip


@dataclass
class Pair:
    """A target and its drafter, to be changed."""

    target: Path
    drafter: Path

    def seen(self, root: Path, place: str) -> list[str]:
        """Return the options that name it, for a container that sees `root` at `place`."""
        target, drafter = (f"{place}/{path.relative_to(root)}" for path in (self.target, self.drafter))
        return ["--target", target, "--drafter", drafter]


def write_published(folder: Path) -> Pair:
    """Write the published configurations, under the names that config/kimi-k2.5.yaml has for them."""
    for name, published in PUBLISHED.items():
        shutil.copytree(MODELS / published, folder / name)
    return Pair(folder / TARGET, folder / MLA)


def write_whole(folder: Path) -> Pair:
    """Write the pair with all of its tensors, and with a tokenizer of the target's size."""
    pair = write_published(folder)
    target = read_target(pair.target)
    write_sparse(pair.target, target_layout(target), published_shard)
    write_sparse(pair.drafter, drafter_layout(read_drafter(pair.drafter), None))
    tokenizer = stand_in_for(target)
    write_tiktoken_form(pair.target, tokenizer.vocabulary, tokenizer.special_id)
    return pair


def copy(pair: Pair, folder: Path) -> Pair:
    """Return another one of the same files, which is to be changed by `rewrite` alone: they are links."""
    for place in (pair.target, pair.drafter):
        shutil.copytree(place, folder / place.name, copy_function=os.link)
    return Pair(folder / pair.target.name, folder / pair.drafter.name)


def rewrite(path: Path, content: bytes | str) -> None:
    """Give a file other content, in place of the link to it."""
    path.unlink(missing_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)


def change(directory: Path, **fields: Any) -> None:
    """Set fields of a config.json."""
    path = directory / "config.json"
    rewrite(path, json.dumps(json.loads(path.read_text()) | fields))


def cut(path: Path, left_out: int) -> None:
    """Leave a shard's last bytes out."""
    size, header = path.stat().st_size, _header(path)
    rewrite(path, header)
    os.truncate(path, size - left_out)


def reshape(path: Path, tensor: str) -> None:
    """Swap a tensor's two sides in a shard's header, which leaves its size."""
    size, header = path.stat().st_size, _header(path)
    described = json.loads(header[8:])
    described[tensor]["shape"].reverse()
    content = json.dumps(described).encode()
    rewrite(path, len(content).to_bytes(8, "little") + content)
    os.truncate(path, size - len(header) + 8 + len(content))


def _header(path: Path) -> bytes:
    with path.open("rb") as file:
        length = file.read(8)
        return length + file.read(int.from_bytes(length, "little"))
