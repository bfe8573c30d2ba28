"""The shrunken pair on disk: the operator's files, with smaller configurations and scripted weights."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from aerie.checkpoint.config import CONFIG, read_drafter, read_target
from aerie.checkpoint.layout import drafter_layout, drafter_name, target_layout
from aerie.checkpoint.script import Script
from aerie.checkpoint.shrink import Change, Profile, shrink_drafter, shrink_target
from aerie.checkpoint.tiny.tokenizer import write_tiktoken_form
from aerie.rehearsal.chain import Chain, chain_of
from aerie.rehearsal.stand_in import stand_in_for

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

    from aerie.checkpoint.config import Drafter, Target

_TOKENIZERS = ("tokenizer.json", "tiktoken.model", "tokenizer.model", "tokenizer_config.json")
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_INDEX = ".safetensors.index.json"
_LARGEST = 64 * 2**20
"""Bytes of a file that is copied; what is larger is no configuration, code or tokenizer."""


@dataclass(frozen=True)
class Pair:
    """Where the shrunken pair lies, and what is known of it."""

    target: Path
    drafter: Path | None
    script: Script
    chain: Chain
    changes: tuple[Change, ...]
    has_own_tokenizer: bool
    """False where the checkpoint had none, and a stand-in was written."""
    expected_acceptance: tuple[float, ...] | None
    """By position in a draft; None where the drafter has no head of its own, whose guesses nobody knows."""

    @property
    def thought(self) -> str:
        """What it thinks; an engine may put a space before and after what it shows of it."""
        return self.chain.thought

    @property
    def answer(self) -> str:
        """What it answers; an engine may put a space before and after it."""
        return self.chain.answer


class TokenizerError(Exception):
    """The checkpoint's tokenizer cannot be used; the message says why, in one line."""


def write_pair(
    folder: Path,
    target: Target,
    drafter: Drafter | None,
    present: Collection[str] | None,
    profile: Profile,
    stages: int,
) -> Pair:
    """Write the pair below `folder`, which is empty.

    `present` are the names of the drafter's tensors, None where its weights are not there. Raises TokenizerError where
    the target's tokenizer cannot be loaded or is of another model, ConfigError where it has none and config.json does
    not tell enough for one, OSError where a file cannot be read or written.
    """
    from aerie.checkpoint import scripted  # noqa: PLC0415 - torch takes seconds to import

    smaller = shrink_target(target, profile, stages)
    place = folder / "target"
    _copy_files(target.directory, place)
    _write_json(place / CONFIG, smaller.config)
    shrunken = read_target(place)
    own = any((place / name).is_file() for name in _TOKENIZERS)
    if not own:
        stand_in = stand_in_for(target)
        write_tiktoken_form(place, stand_in.vocabulary, stand_in.special_id)
    chain = _chain(place)
    try:
        script = Script(shrunken.vocabulary, chain.tokens)
    except ValueError as error:
        raise TokenizerError(f"the tokenizer in {target.directory} is not this model's: {error}") from None
    scripted.write_target(place, shrunken, target_layout(shrunken), script)
    if drafter is None:
        return Pair(place, None, script, chain, smaller.changes, own, None)
    smaller_drafter = shrink_drafter(drafter, target, shrunken, profile)
    beside = folder / "drafter"
    _copy_files(drafter.directory, beside)
    _write_json(beside / CONFIG, smaller_drafter.config)
    names = None if present is None else dict.fromkeys(drafter_name(name) for name in present)
    layout = drafter_layout(read_drafter(beside), names)
    scripted.write_drafter(beside, read_drafter(beside), shrunken, layout, script)
    accepted = (1.0,) if "lm_head.weight" in layout else None
    return Pair(place, beside, script, chain, smaller.changes + smaller_drafter.changes, own, accepted)


def _copy_files(source: Path, place: Path) -> None:
    """Copy all but weights: tokenizer, templates, processors, code."""
    place.mkdir(parents=True)
    for path in sorted(source.iterdir()):
        if path.is_file() and not path.name.endswith((*_WEIGHTS, _INDEX)) and path.stat().st_size <= _LARGEST:
            shutil.copyfile(path, place / path.name)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _chain(place: Path) -> Chain:
    from transformers import AutoTokenizer  # noqa: PLC0415 - takes seconds to import

    try:
        tokenizer = AutoTokenizer.from_pretrained(place, trust_remote_code=True, local_files_only=True)
    except Exception as error:  # whatever the checkpoint's own code raises
        raise TokenizerError(f"the tokenizer in {place} cannot be loaded: {type(error).__name__}: {error}") from error

    def special(name: str) -> int | None:
        token = tokenizer.convert_tokens_to_ids(name)
        return None if token is None or token == tokenizer.unk_token_id else int(token)

    try:
        return chain_of(lambda text: list(tokenizer.encode(text, add_special_tokens=False)), special)
    except ValueError as error:
        raise TokenizerError(f"the tokenizer in {place} cannot say an answer: {error}") from None
