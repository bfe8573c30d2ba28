"""What a shrunken model is made to say, by the tokens that its tokenizer has."""

from __future__ import annotations

import pytest

from aerie.rehearsal.chain import chain_of

SPECIALS = ["<|im_end|>", "<|im_middle|>", "<think>", "</think>", "<|tool_calls_section_begin|>", "<|tool_call_begin|>",
            "<|tool_call_argument_begin|>", "<|tool_call_end|>", "<|tool_calls_section_end|>"]  # fmt: skip


class Tokenizer:
    """Some words are tokens, all else is bytes; special tokens come after 1000."""

    def __init__(self, words=(), specials=SPECIALS):
        self.words = {word: 256 + number for number, word in enumerate(words)}
        self.specials = {name: 1000 + number for number, name in enumerate(specials)}

    def encode(self, text):
        tokens = []
        while text:
            word = max((word for word in self.words if text.startswith(word)), key=len, default=text[0])
            tokens.append(self.words.get(word, ord(text[0])))
            text = text.removeprefix(word)
        return tokens

    def chain(self):
        return chain_of(self.encode, self.specials.get)

    def text(self, tokens):
        names = {token: name for name, token in (self.words | self.specials).items()}
        return "".join(names.get(token) or chr(token) for token in tokens)


def test_a_thought_an_answer_and_a_call():
    tokenizer = Tokenizer(["Ready", " steady", " go", "Every", " part", "functions", "up", "{}"])
    chain = tokenizer.chain()
    assert chain.function == "up"
    said = tokenizer.text(chain.tokens)
    assert said.startswith("<|im_middle|><think>Ready steady go</think>Every part of<|tool_calls_section_begin|>")
    assert (chain.thought, chain.answer) == ("Ready steady go", "Every part of")
    assert said.endswith(
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.up:0<|tool_call_argument_begin|>{}"
        "<|tool_call_end|><|tool_calls_section_end|><|im_end|>"
    )
    assert len(set(chain.tokens)) == len(chain.tokens)


def test_bytes_alone_make_do_with_less():
    """`functions` has two n, and vLLM takes a call without it, too."""
    tokenizer = Tokenizer()
    chain = tokenizer.chain()
    assert (chain.thought, chain.answer, chain.function) == ("Ready go", "bhjkqwxz", "up")
    assert "<|tool_call_begin|>up:0<|tool_call_argument_begin|>{}<|tool_call_end|>" in tokenizer.text(chain.tokens)
    assert len(set(chain.tokens)) == len(chain.tokens)


def test_another_function_where_the_tokens_of_the_first_are_taken():
    """The answer has said `up` already."""
    tokenizer = Tokenizer(["Ready", " steady", "functions", "up", "lookup", "{}"])
    tokenizer.words |= {"Every": tokenizer.words["up"], " part": 900}
    assert tokenizer.chain().function == "f"  # the o of go was said, too


def test_without_the_special_tokens_of_calls_there_is_none():
    tokenizer = Tokenizer(["Ready", " steady", "Every", " part", "functions", "up", "{}"], SPECIALS[:4])
    assert tokenizer.chain().function is None
    assert tokenizer.text(tokenizer.chain().tokens).endswith("<|im_end|>")


def test_a_tokenizer_that_can_say_nothing():
    with pytest.raises(ValueError, match="no 2 words of"):
        chain_of(lambda _: [1, 1], lambda _: None)
