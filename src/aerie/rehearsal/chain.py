"""What the shrunken model is to say, as a chain of tokens of the operator's own tokenizer. Pure.

Each token may occur once, for the last token alone decides the next. So words are taken as far as none of their tokens
was used, and the tool call is one without arguments to a function with a short name.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

Encode = Callable[[str], list[int]]
"""The tokens of a text, none of them special."""
Special = Callable[[str], int | None]
"""The token of a special name, None where the tokenizer has none."""

THOUGHT: Final = ("Ready", " steady", " go")
ANSWER: Final = ("Every", " part", " of", " the", " start", " did", " its", " work")
_LETTERS = tuple("bhjkqwxz")  # for a tokenizer of little more than bytes
_LEAST_WORDS = 2
_FUNCTIONS = ("up", "go", "f", "lookup", "x")
# As Kimi writes it, and as short as vLLM's parser takes it (vllm/parser/kimi_k2.py).
CALLS: Final = tuple(form % function for form in ("functions.%s:0", "%s:0") for function in _FUNCTIONS)
CALL_ARGUMENTS: Final = "{}"
_END = ("<|im_end|>", "[EOS]")


@dataclass(frozen=True)
class Chain:
    """Tokens in the order in which they are said, from the beginning of an answer to its end."""

    tokens: tuple[int, ...]
    thought: str
    answer: str
    function: str | None
    """The function that is called after the answer, None where the tokenizer has no tokens for it."""


def chain_of(encode: Encode, special: Special) -> Chain:
    """Return a chain of a thought, an answer and a tool call, as much of it as the tokenizer has special tokens for.

    Raises ValueError where not even an answer can be said.
    """
    said = _known(special, ("<|im_middle|>", "<think>"))
    thought, tokens = _text(encode, THOUGHT, said)
    said += [*tokens, *_known(special, ("</think>",))]
    answer, tokens = _text(encode, ANSWER, said)
    said += tokens
    function = None
    for call in CALLS:
        if called := _call(encode, special, call, said):
            function = call.removeprefix("functions.").partition(":")[0]
            said += called
            break
    return Chain((*said, *_known(special, _END)), thought, answer, function)


def _known(special: Special, names: Iterable[str]) -> list[int]:
    return [token for name in names if (token := special(name)) is not None]


def _text(encode: Encode, words: Sequence[str], said: Sequence[int]) -> tuple[str, list[int]]:
    for some in (words, _LETTERS):
        chosen = _fresh(encode, some, said)
        if len(chosen) >= _LEAST_WORDS:
            return "".join(chosen), [token for tokens in chosen.values() for token in tokens]
    raise ValueError(f"the tokenizer has no {_LEAST_WORDS} words of {(*words, *_LETTERS)} whose tokens differ")


def _fresh(encode: Encode, words: Iterable[str], said: Sequence[int]) -> dict[str, list[int]]:
    """Return words and their tokens, none of which occurs twice or was said."""
    chosen: dict[str, list[int]] = {}
    used = set(said)
    for word in words:
        tokens = encode(word)
        if tokens and len(set(tokens)) == len(tokens) and used.isdisjoint(tokens):
            chosen[word] = tokens
            used.update(tokens)
    return chosen


def _call(encode: Encode, special: Special, call: str, said: Sequence[int]) -> list[int] | None:
    """Return the tokens of a call, in Kimi's form; None where one is missing or was used."""
    parts = (
        special("<|tool_calls_section_begin|>"), special("<|tool_call_begin|>"), encode(call),
        special("<|tool_call_argument_begin|>"), encode(CALL_ARGUMENTS),
        special("<|tool_call_end|>"), special("<|tool_calls_section_end|>"),
    )  # fmt: skip
    tokens: list[int] = []
    for part in parts:
        if part is None:
            return None
        tokens += part if isinstance(part, list) else [part]
    return tokens if len(set(tokens)) == len(tokens) and set(tokens).isdisjoint(said) else None
