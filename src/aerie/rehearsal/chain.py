"""What the shrunken model is to say, as a chain of tokens of the operator's own tokenizer. Pure.

Each token may occur once, for the last token alone decides the next. So words are taken as far as none of their tokens
was used, and the tool call is one without arguments to a function with a short name.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

Encode = Callable[[str], list[int]]
"""The tokens of a text, none of them special."""
Special = Callable[[str], int | None]
"""The token of a special name, None where the tokenizer has none."""

_THOUGHT = ("Ready", " steady", " go", "o", "k")
_ANSWER = ("Every", " part", " of", " the", " start", " did", " its", " work", "b", "h", "j")
_LEAST_WORDS = 2
_FUNCTIONS = ("up", "go", "f", "lookup", "x")
END = "<|im_end|>"


@dataclass(frozen=True)
class Chain:
    """Tokens in the order in which they are said, from the beginning of an answer to its end."""

    tokens: tuple[int, ...]
    function: str | None
    """The function that a tool is called by at the end, None where the tokenizer has no tokens for it."""


def chain_of(encode: Encode, special: Special) -> Chain:
    """Return a chain of a thought, an answer and a tool call, as much of it as the tokenizer has special tokens for.

    Raises ValueError where not even an answer can be said.
    """
    said: list[int] = []
    for opening, words in ((("<|im_middle|>", "<think>"), _THOUGHT), (("</think>",), _ANSWER)):
        said += _known(special, opening)
        chosen = _fresh(encode, words, said)
        if len(chosen) < _LEAST_WORDS:
            raise ValueError(f"the tokenizer has no {_LEAST_WORDS} words of {words} whose tokens differ")
        said += [token for word in chosen for token in word]
    for function in _FUNCTIONS:
        if call := _call(encode, special, function, said):
            return Chain((*said, *call, *_known(special, (END,))), function)
    return Chain((*said, *_known(special, (END,))), None)


def _known(special: Special, names: Iterable[str]) -> list[int]:
    return [token for name in names if (token := special(name)) is not None]


def _fresh(encode: Encode, words: Iterable[str], said: list[int]) -> list[list[int]]:
    chosen: list[list[int]] = []
    used = set(said)
    for word in words:
        tokens = encode(word)
        if tokens and len(set(tokens)) == len(tokens) and used.isdisjoint(tokens):
            chosen.append(tokens)
            used.update(tokens)
    return chosen


def _call(encode: Encode, special: Special, function: str, said: list[int]) -> list[int] | None:
    """Return the tokens of a call, in Kimi's form; None where one is missing or was used."""
    parts = (
        special("<|tool_calls_section_begin|>"), special("<|tool_call_begin|>"), encode(f"functions.{function}:0"),
        special("<|tool_call_argument_begin|>"), encode("{}"),
        special("<|tool_call_end|>"), special("<|tool_calls_section_end|>"),
    )  # fmt: skip
    call: list[int] = []
    for part in parts:
        if part is None:
            return None
        call += part if isinstance(part, list) else [part]
    return call if len(set(call)) == len(call) and set(call).isdisjoint(said) else None
