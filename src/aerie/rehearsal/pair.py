"""The shrunken pair on disk: links to the operator's files, beside smaller configurations and scripted weights."""

from __future__ import annotations

import contextlib
import json
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from aerie.checkpoint.config import CONFIG, ConfigError, read_drafter, read_target
from aerie.checkpoint.layout import drafter_layout, drafter_name, target_layout
from aerie.checkpoint.script import Script
from aerie.checkpoint.shrink import Change, Profile, shrink_drafter, shrink_target
from aerie.checkpoint.tiny.tokenizer import write_tiktoken_form
from aerie.checkpoint.tokenizer import VOCABULARIES
from aerie.rehearsal.chain import Chain, chain_of
from aerie.rehearsal.stand_in import stand_in_for

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

    from aerie.checkpoint.config import Drafter, Target

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")


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
    tokenizer: Path | None = None,
    *,
    trusted: bool = False,
) -> Pair:
    """Write the pair below `folder`, which is empty or missing; nothing is written to the directories of the real one.

    `present` are the names of the drafter's tensors, None where its weights are not there; `tokenizer` is the directory
    of a tokenizer that is not with the target, whose own code is run only where it is `trusted`. Raises TokenizerError
    where the tokenizer cannot be loaded or is of another model, or where there is none and config.json does not tell
    enough for one, OSError where a file cannot be read or written.
    """
    from aerie.checkpoint import scripted  # noqa: PLC0415 - torch takes seconds to import

    smaller = shrink_target(target, profile, stages)
    place = folder / "target"
    place.mkdir(parents=True)
    _write_json(place / CONFIG, smaller.config)
    shrunken = read_target(place)
    own = tokenizer is not None or any((target.directory / name).is_file() for name in VOCABULARIES)
    if not own:
        try:
            stand_in = stand_in_for(target)
        except ConfigError as error:
            raise TokenizerError(str(error)) from None
        write_tiktoken_form(place, stand_in.vocabulary, stand_in.special_id)
    _link_files(target.directory, place)
    chain = _chain(tokenizer or place, trusted=trusted or not own)
    try:
        script = Script(shrunken.vocabulary, chain.tokens)
    except ValueError as error:
        raise TokenizerError(f"the tokenizer in {target.directory} is not this model's: {error}") from None
    scripted.write_target(place, shrunken, target_layout(shrunken), script)
    if drafter is None:
        return Pair(place, None, script, chain, smaller.changes, own, None)
    smaller_drafter = shrink_drafter(drafter, target, shrunken, profile)
    beside = folder / "drafter"
    beside.mkdir()
    _write_json(beside / CONFIG, smaller_drafter.config)
    _link_files(drafter.directory, beside)
    names = None if present is None else dict.fromkeys(drafter_name(name) for name in present)
    layout = drafter_layout(read_drafter(beside), names)
    scripted.write_drafter(beside, read_drafter(beside), shrunken, layout, script)
    accepted = (1.0,) if "lm_head.weight" in layout else None
    return Pair(place, beside, script, chain, smaller.changes + smaller_drafter.changes, own, accepted)


def _link_files(source: Path, place: Path) -> None:
    """Link to all but weights, and what is in `place` already: tokenizer, templates, processors, code."""
    for path in source.resolve().iterdir():
        link = place / path.name
        if not path.name.endswith(_WEIGHTS) and not link.exists():
            link.symlink_to(path)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _chain(place: Path, *, trusted: bool) -> Chain:
    from transformers import AutoTokenizer, logging  # noqa: PLC0415 - takes seconds to import

    logging.set_verbosity_error()  # it warns of a config.json that is vLLM's to read
    try:
        with contextlib.redirect_stdout(sys.stderr):  # stdout may be the report's
            tokenizer = AutoTokenizer.from_pretrained(place, trust_remote_code=trusted, local_files_only=True)
    except Exception as error:  # whatever the checkpoint's own code raises
        why = str(error).partition("\n")[0]
        raise TokenizerError(f"the tokenizer in {place} cannot be loaded: {type(error).__name__}: {why}") from error

    def special(name: str) -> int | None:
        token = tokenizer.convert_tokens_to_ids(name)
        return None if token is None or token == tokenizer.unk_token_id else int(token)

    try:
        return chain_of(lambda text: list(tokenizer.encode(text, add_special_tokens=False)), special)
    except ValueError as error:
        raise TokenizerError(f"the tokenizer in {place} cannot say an answer: {error}") from None
