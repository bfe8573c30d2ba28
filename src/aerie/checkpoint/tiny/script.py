"""What the tiny model says: its vocabulary and the one token that follows each token.

The model is a first-order chain: apart from one place (the first word of an answer depends on whether a picture was
sent, and on how bright it is) the last token alone decides the next. So every text it can produce is known in
advance, and a test can compare a server's answer with `expected_answer` or `expected_continuation`.
"""

from __future__ import annotations

import re
import string
from itertools import pairwise
from typing import Final, Literal

Picture = Literal["bright", "dark"]

# Short, so that a client that asks for eight tokens sees some of the answer.
THOUGHT: Final = "Easy question."
ANSWER: Final = (
    "Hello from Aerie! I am a tiny Kimi-K2.5 with seven layers and eight experts. A small EAGLE-3 head drafts my next"
    " words: good ones stay, wrong guesses fall out of the nest. If you can read this sentence, then every part"
    " did its work: tokenizer, attention, router, drafter, sampler."
)
# An answer to a picture opens with this and then continues as ANSWER does.
PICTURE_OPENINGS: Final[dict[Picture, str]] = {"bright": "Bright picture!", "dark": "Dark picture!"}

# Words of prompts that are tokens of their own; with them the vocabulary is a multiple of 64, to which vLLM pads.
PROMPT_WORDS: Final = (
    "user assistant system image tool_declare functions What What's How Who Why Say Tell Describe Write Nobody"
    " is are you? you me about an the that it waits minutes to learn does not work model GPU"
    " hello Hi Please picture? colour long story up"
)

# Special tokens in the order of the real repository, where the first has id 163584 and these offsets; the real one
# reserves 256 ids, and its last two are these last two.
SPECIALS: Final = (
    "[BOS]",
    "[EOS]",
    "<|im_end|>",
    "<|im_user|>",
    "<|im_assistant|>",
    "<|reserved_token_5|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|reserved_token_8|>",
    "[EOT]",
    "<|im_system|>",
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    "<|reserved_token_16|>",
    "<|im_middle|>",
    "<|media_begin|>",
    "<|media_content|>",
    "<|media_end|>",
    "<|media_pad|>",
    "<think>",
    "</think>",
    *(f"<|reserved_token_{n}|>" for n in range(24, 30)),
    "[UNK]",
    "[PAD]",
)

# As in the real repository, these are no text either, but skip_special_tokens keeps them: vLLM's parsers look for them.
STRUCTURE: Final = frozenset(special for special in SPECIALS if "tool_call" in special or "think" in special)

# How a text is cut before its pieces are looked up: each word with the space before it and the punctuation after it.
PIECES: Final = r" ?\S+|\s+"


def words(text: str) -> list[str]:
    """Cut a text into pieces as the tokenizer does."""
    return re.findall(PIECES, text)


def _base_vocabulary() -> list[bytes]:
    texts = (THOUGHT, ANSWER, " " + ANSWER, *PICTURE_OPENINGS.values(), PROMPT_WORDS)
    whole_words = dict.fromkeys(word.encode() for text in texts for word in words(text))
    return [bytes([byte]) for byte in range(256)] + [word for word in whole_words if len(word) > 1]


# Token id -> bytes; the ids of the special tokens follow those of the bytes and words.
BASE_VOCABULARY: Final = _base_vocabulary()
VOCABULARY: Final = [*BASE_VOCABULARY, *(special.encode() for special in SPECIALS)]
TOKEN_ID: Final = {token: token_id for token_id, token in enumerate(VOCABULARY)}
SPECIAL_ID: Final = {special: TOKEN_ID[special.encode()] for special in SPECIALS}


def script() -> list[tuple[str, str]]:
    """List the tokens that follow one another on purpose; none has two successors."""
    answer = words(ANSWER)
    told = ["<think>", *words(THOUGHT), "</think>", *answer, "<|im_end|>", " " + answer[0], answer[1]]
    pairs = list(pairwise(told))
    for opening in PICTURE_OPENINGS.values():
        pairs += pairwise([*words(opening), " " + answer[0]])
    for cycle in (string.ascii_lowercase, string.ascii_uppercase, string.digits):
        pairs += pairwise(cycle + cycle[0])
    return [*pairs, ("<|im_middle|>", answer[0])]


SCRIPT: Final = {TOKEN_ID[token.encode()]: TOKEN_ID[following.encode()] for token, following in dict(script()).items()}
DEFAULT_SUCCESSOR: Final = TOKEN_ID[words(" " + ANSWER)[0].encode()]
# Token id -> id of the token that follows it, for every token.
SUCCESSOR: Final = [SCRIPT.get(token_id, DEFAULT_SUCCESSOR) for token_id in range(len(VOCABULARY))]
# The first token of the answer to a picture.
PICTURE_SUCCESSOR: Final = {
    picture: TOKEN_ID[words(opening)[0].encode()] for picture, opening in PICTURE_OPENINGS.items()
}


def expected_answer(picture: Picture | None = None) -> str:
    """Return the content of a chat completion, whatever was asked; `picture` says how bright an image in it was."""
    return f"{PICTURE_OPENINGS[picture]} {ANSWER}" if picture else ANSWER


def expected_continuation(token: str, count: int) -> str:
    """Return the text of the `count` greedy tokens after a token, end of turn ignored and special tokens left out.

    Raises ValueError where `token` is not in the vocabulary.
    """
    if token.encode() not in TOKEN_ID:
        raise ValueError(f"{token!r} is not a token of the tiny model: give one character, or a word of what it says")
    token_id = TOKEN_ID[token.encode()]
    spoken = []
    for _ in range(count):
        token_id = SUCCESSOR[token_id]
        if token_id < len(BASE_VOCABULARY):
            spoken.append(VOCABULARY[token_id])
    return b"".join(spoken).decode()


def merges() -> list[tuple[bytes, bytes]]:
    """Every way to join two tokens into a third, in order of the third's id.

    A tiktoken vocabulary joins any neighbours whose concatenation is a token; a BPE that lists its merges does the same
    only if it lists them all.
    """
    return [
        (word[:cut], word[cut:])
        for word in BASE_VOCABULARY
        for cut in range(1, len(word))
        if word[:cut] in TOKEN_ID and word[cut:] in TOKEN_ID
    ]
