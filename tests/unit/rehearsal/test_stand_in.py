"""A tokenizer for a target that has none."""

from __future__ import annotations

import re

import pytest
from sparse_checkpoint import MODELS

from aerie.checkpoint.config import ConfigError, read_target
from aerie.checkpoint.tiny.script import PIECES
from aerie.rehearsal.chain import chain_of
from aerie.rehearsal.stand_in import stand_in_for


@pytest.fixture(scope="module")
def stand_in():
    return stand_in_for(read_target(MODELS / "moonshotai--Kimi-K2.5"))


def test_it_has_the_ids_of_kimi_k25(stand_in):
    """config.json: [BOS] 163584, [PAD] 163839, 163840 in all; <|media_pad|> is its media_placeholder_token_id."""
    assert len(stand_in.vocabulary) == 163584
    assert sorted(stand_in.special_id.values()) == list(range(163584, 163840))
    assert {name: stand_in.special_id[name] for name in ("[BOS]", "[EOS]", "<|media_pad|>", "[UNK]", "[PAD]")} == {
        "[BOS]": 163584, "[EOS]": 163585, "<|media_pad|>": 163605, "[UNK]": 163838, "[PAD]": 163839,
    }  # fmt: skip


def test_each_token_stands_once_and_is_one_piece(stand_in):
    """Tiktoken gives a piece that is a token as that token, whatever its parts are."""
    assert len(set(stand_in.vocabulary)) == len(stand_in.vocabulary)
    pieces = re.compile(PIECES)
    assert all(pieces.fullmatch(token.decode()) for token in stand_in.vocabulary[256:])


def test_all_of_it_can_be_said(stand_in):
    ids = {token: number for number, token in enumerate(stand_in.vocabulary)}
    chain = chain_of(lambda text: [ids[piece.encode()] for piece in re.findall(PIECES, text)], stand_in.special_id.get)
    assert (chain.thought, chain.answer, chain.function) == (
        "Ready steady go", "Every part of the start did its work", "up",
    )  # fmt: skip


@pytest.mark.parametrize(
    "ids",
    [
        {"bos_token_id": None},
        {"bos_token_id": 1},
        {"pad_token_id": 163590},
        {"pad_token_id": 163840},
        {"bos_token_id": 10**7, "pad_token_id": 10**7 + 300},
    ],
)
def test_without_ids_there_is_none(kimi, ids):
    target = read_target(kimi.directory)
    with pytest.raises(ConfigError, match=r"has no tokenizer, and of config\.json's bos_token_id"):
        stand_in_for(type(target)(target.directory, {**target.whole, **ids}))
