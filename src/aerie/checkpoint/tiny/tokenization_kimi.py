"""A tokenizer in the form in which Kimi repositories ship theirs: a tiktoken vocabulary and code that reads it.

`target-tiktoken` gets a copy of this file. transformers loads it with `trust_remote_code`, by way of `auto_map` in
tokenizer_config.json, which also lists the special tokens (`added_tokens_decoder`) and the expression that cuts a text
into pieces (`pieces`). So it imports nothing of Aerie.
"""

import base64
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import tiktoken
from transformers import AddedToken, PreTrainedTokenizer


def byte_symbols() -> list[str]:
    """Give each byte the character that byte-level BPE writes for it: itself where printable, else one from 256 up."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


class TikTokenTokenizer(PreTrainedTokenizer):  # type: ignore[misc]
    """Byte-pair encoding by tiktoken; special tokens keep the ids that tokenizer_config.json gives them."""

    vocab_files_names: ClassVar = {"vocab_file": "tiktoken.model"}
    model_input_names: ClassVar = ["input_ids", "attention_mask"]

    def __init__(self, vocab_file: str, pieces: str, added_tokens_decoder: dict[str, Any], **options: Any) -> None:
        lines = (line.split() for line in Path(vocab_file).read_bytes().splitlines() if line)
        ranks = {base64.b64decode(token): int(rank) for token, rank in lines}
        self.vocab_file = vocab_file
        self.encoding = tiktoken.Encoding("kimi", pat_str=pieces, mergeable_ranks=ranks, special_tokens={})
        symbols = byte_symbols()
        self.byte_of_symbol = {symbol: byte for byte, symbol in enumerate(symbols)}
        self.token_of_id = {rank: "".join(symbols[byte] for byte in token) for token, rank in ranks.items()}
        self.id_of_token = {token: token_id for token_id, token in self.token_of_id.items()}
        # transformers gives them as objects or, from a file that it has saved itself, as dictionaries.
        specials = {
            int(token_id): token if isinstance(token, AddedToken) else AddedToken(**token)
            for token_id, token in added_tokens_decoder.items()
        }
        super().__init__(pieces=pieces, added_tokens_decoder=specials, special_tokens_pattern="none", **options)

    @property
    def vocab_size(self) -> int:
        """Number of tokens, special ones aside."""
        return len(self.token_of_id)

    def get_vocab(self) -> dict[str, int]:
        """All tokens, special ones among them, and their ids."""
        return {**self.id_of_token, **self.added_tokens_encoder}

    def _tokenize(self, text: str, **_: object) -> list[str]:
        return [self.token_of_id[token_id] for token_id in self.encoding.encode_ordinary(text)]

    def _convert_token_to_id(self, token: str) -> int | None:
        return self.id_of_token.get(token, self.unk_token_id)

    def _convert_id_to_token(self, index: int) -> str | None:
        return self.token_of_id.get(index, self.unk_token)

    def convert_tokens_to_string(self, tokens: Sequence[str]) -> str:
        """Join tokens to the text that they stand for; bytes that are no UTF-8 become U+FFFD."""
        parts = [
            bytes(self.byte_of_symbol[symbol] for symbol in token) if token in self.id_of_token else token.encode()
            for token in tokens
        ]
        return b"".join(parts).decode(errors="replace")

    def save_vocabulary(self, save_directory: str, filename_prefix: str | None = None) -> tuple[str]:
        """Copy the vocabulary into a directory; the path of the copy."""
        target = Path(save_directory) / "-".join(filter(None, [filename_prefix, "tiktoken.model"]))
        shutil.copyfile(self.vocab_file, target)
        return (str(target),)
