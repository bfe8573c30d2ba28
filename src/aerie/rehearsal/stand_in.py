"""A tokenizer for a target whose own is not there, with the ids that its config.json names. Pure.

It fills the vocabulary, since vLLM shows nothing for an id at or above the tokenizer's length
(vllm/tokenizers/detokenizer_utils.py, 0.32.0), and special tokens are the last ones.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from aerie.checkpoint.config import ConfigError, Target
from aerie.checkpoint.tiny.script import SPECIALS
from aerie.rehearsal.chain import ANSWER, CALL_ARGUMENTS, CALLS, THOUGHT

_WORDS = tuple(
    dict.fromkeys((*THOUGHT, *ANSWER, *CALLS, CALL_ARGUMENTS, "user", "assistant", "system", "image", "tool_declare"))
)


@dataclass(frozen=True)
class StandIn:
    """Tokens by their ids, and special tokens, whose ids come after them."""

    vocabulary: tuple[bytes, ...]
    special_id: Mapping[str, int]


def stand_in_for(target: Target) -> StandIn:
    """Return a tokenizer with Kimi's special tokens: from config.json's first one on, but for the last two.

    A token that is neither a byte nor a word of what the model is to say is its own number after a space. Raises
    ConfigError where config.json's ids leave no room for that.
    """
    first, last = target.whole.get("bos_token_id"), target.whole.get("pad_token_id")
    known = [*(bytes([byte]) for byte in range(256)), *(word.encode() for word in _WORDS)]
    if not (
        isinstance(first, int)
        and isinstance(last, int)
        and len(known) <= first <= last - len(SPECIALS)
        and last < target.vocabulary
    ):
        raise ConfigError(
            f"{target.directory} has no tokenizer, and of config.json's bos_token_id {first} and pad_token_id {last} "
            f"none can be made: one of Kimi's has its first special token after {len(known)} others and more, and its "
            f"last within the {target.vocabulary:,} of its vocab_size"
        )
    named = {first + number: name for number, name in enumerate(SPECIALS[:-2])}
    named |= {last - 1: SPECIALS[-2], last: SPECIALS[-1]}
    numbers = (b" %d" % number for number in range(len(known), first))
    return StandIn(
        vocabulary=(*known, *numbers),
        special_id={named.get(number, f"<|reserved_token_{number}|>"): number for number in range(first, last + 1)},
    )
