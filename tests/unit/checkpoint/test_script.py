"""What the tiny model is made to say."""

from __future__ import annotations

from itertools import pairwise

import pytest

from aerie.checkpoint.tiny import expected_answer, expected_continuation, script


def test_no_token_of_the_script_has_two_successors():
    pairs = script.script()
    assert len({token for token, _ in pairs}) == len(set(pairs))


def test_the_answer_is_a_sentence_and_ends_the_turn():
    answer = expected_answer()
    assert answer.startswith("Hello from Aerie!")
    told = ["</think>", *script.words(answer), "<|im_end|>"]
    for token, following in pairwise(told):
        assert script.VOCABULARY[script.SUCCESSOR[script.TOKEN_ID[token.encode()]]] == following.encode()


def test_a_picture_opens_the_answer():
    assert expected_answer("bright") == "Bright picture! " + expected_answer()
    assert expected_answer("dark") == "Dark picture! " + expected_answer()


def test_an_answer_with_its_thought_fits_into_64_tokens():
    spoken = [*script.words(script.THOUGHT), "</think>", *script.words(expected_answer("bright")), "<|im_end|>"]
    assert len(spoken) <= 64


def test_continuations_count_spell_and_repeat():
    assert expected_continuation("c", 5) == "defgh"
    assert expected_continuation("Y", 3) == "ZAB"
    assert expected_continuation("8", 4) == "9012"
    assert expected_continuation("?", 3) == " Hello from Aerie!"
    # The end of the turn is one of the four tokens, and no text.
    assert expected_continuation(" router,", 4) == " drafter, sampler. Hello"


def test_a_token_that_is_none_is_refused():
    with pytest.raises(ValueError, match="'no such word' is not a token"):
        expected_continuation("no such word", 1)


def test_the_vocabulary_is_complete_unique_and_padded_by_nothing():
    assert script.VOCABULARY[:256] == [bytes([byte]) for byte in range(256)]
    assert len(set(script.VOCABULARY)) == len(script.VOCABULARY)
    assert len(script.VOCABULARY) % 64 == 0


def test_special_tokens_keep_the_real_offsets():
    """moonshotai/Kimi-K2.5, tokenizer_config.json: ids less 163584."""
    first = script.SPECIAL_ID["[BOS]"]
    real = {
        "[EOS]": 1, "<|im_end|>": 2, "<|im_user|>": 3, "<|im_assistant|>": 4, "<|start_header_id|>": 6,
        "<|end_header_id|>": 7, "[EOT]": 9, "<|im_system|>": 10, "<|tool_calls_section_begin|>": 11,
        "<|tool_calls_section_end|>": 12, "<|tool_call_begin|>": 13, "<|tool_call_argument_begin|>": 14,
        "<|tool_call_end|>": 15, "<|im_middle|>": 17, "<|media_begin|>": 18, "<|media_content|>": 19,
        "<|media_end|>": 20, "<|media_pad|>": 21, "<think>": 22, "</think>": 23,
    }  # fmt: skip
    assert {special: script.SPECIAL_ID[special] - first for special in real} == real
