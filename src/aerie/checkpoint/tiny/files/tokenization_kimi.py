"""A tokenizer in the form in which Kimi repositories ship theirs: a tiktoken vocabulary and code that reads it.

Loaded by transformers with `trust_remote_code`, by way of `auto_map` in tokenizer_config.json, which also lists the
special tokens (`added_tokens_decoder`) and the expression that cuts a text into pieces (`pieces`).
"""

import base64
import shutil
from pathlib import Path

import tiktoken
from transformers import AddedToken, PreTrainedTokenizer


def _byte_symbols():
    """One printable character for each byte, so that any token can be written as a string (GPT-2's convention)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("\N{INVERTED EXCLAMATION MARK}"), ord("\N{NOT SIGN}") + 1),
                 *range(ord("\N{REGISTERED SIGN}"), 256)]  # fmt: skip
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}


class TikTokenTokenizer(PreTrainedTokenizer):
    """Byte-pair encoding by tiktoken; special tokens keep the ids that tokenizer_config.json gives them."""

    vocab_files_names = {"vocab_file": "tiktoken.model"}
    model_input_names = ["input_ids", "attention_mask"]

    def __init__(self, vocab_file, pieces, added_tokens_decoder, **kwargs):
        lines = (line.split() for line in Path(vocab_file).read_bytes().splitlines() if line)
        ranks = {base64.b64decode(token): int(rank) for token, rank in lines}
        self.vocab_file = vocab_file
        self.encoding = tiktoken.Encoding("kimi", pat_str=pieces, mergeable_ranks=ranks, special_tokens={})
        symbols = _byte_symbols()
        self.byte_of_symbol = {symbol: byte for byte, symbol in symbols.items()}
        self.token_of_id = {rank: "".join(symbols[byte] for byte in token) for token, rank in ranks.items()}
        self.id_of_token = {token: token_id for token_id, token in self.token_of_id.items()}
        specials = {int(i): t if isinstance(t, AddedToken) else AddedToken(**t) for i, t in added_tokens_decoder.items()}
        super().__init__(pieces=pieces, added_tokens_decoder=specials, special_tokens_pattern="none", **kwargs)

    @property
    def vocab_size(self):
        return len(self.token_of_id)

    def get_vocab(self):
        return {**self.id_of_token, **self.added_tokens_encoder}

    def _tokenize(self, text, **_):
        return [self.token_of_id[token_id] for token_id in self.encoding.encode_ordinary(text)]

    def _convert_token_to_id(self, token):
        return self.id_of_token.get(token, self.unk_token_id)

    def _convert_id_to_token(self, index):
        return self.token_of_id.get(index, self.unk_token)

    def convert_tokens_to_string(self, tokens):
        parts = []
        for token in tokens:
            known = token in self.id_of_token
            parts.append(bytes(self.byte_of_symbol[symbol] for symbol in token) if known else token.encode())
        return b"".join(parts).decode(errors="replace")

    def save_vocabulary(self, save_directory, filename_prefix=None):
        name = f"{filename_prefix}-tiktoken.model" if filename_prefix else "tiktoken.model"
        target = Path(save_directory) / name
        if target.resolve() != Path(self.vocab_file).resolve():
            shutil.copyfile(self.vocab_file, target)
        return (str(target),)
