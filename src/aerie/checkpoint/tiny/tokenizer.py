"""The tiny model's tokenizer in two forms: `tokenizer.json`, and a tiktoken file with code of its own."""

from __future__ import annotations

import base64
import json
from importlib import resources
from typing import TYPE_CHECKING, Any

from aerie.checkpoint.tiny.script import BASE_VOCABULARY, PIECES, SPECIAL_ID, SPECIALS, STRUCTURE, merges

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

# Positions that the model was made for; config.json's `max_position_embeddings` says the same.
MAX_LENGTH = 4096

ROLES: dict[str, Any] = {
    "bos_token": "[BOS]",
    "eos_token": "<|im_end|>",
    "unk_token": "[UNK]",
    "pad_token": "[PAD]",
    "additional_special_tokens": [name for name in SPECIALS if name.startswith("<|") and name not in STRUCTURE],
    "model_max_length": MAX_LENGTH,
    "clean_up_tokenization_spaces": False,
}


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON file whose bytes depend on its content alone."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _copy(name: str, folder: Path) -> None:
    (folder / name).write_bytes(resources.files(__package__).joinpath(name).read_bytes())


def write_fast_form(folder: Path) -> None:
    """Write tokenizer.json, its configuration and the chat template."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers  # noqa: PLC0415 (see package)

    # The printable character that byte-level BPE writes for each byte: itself where printable, else 256 and up.
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    byte_symbols = [chr(byte if byte in printable else next(others)) for byte in range(256)]

    def symbols(token: bytes) -> str:
        return "".join(byte_symbols[byte] for byte in token)

    bpe = models.BPE(
        vocab={symbols(token): token_id for token_id, token in enumerate(BASE_VOCABULARY)},
        merges=[(symbols(left), symbols(right)) for left, right in merges()],
        ignore_merges=True,  # a piece that is a token is that token, as in tiktoken
    )
    tokenizer = Tokenizer(bpe)
    split = pre_tokenizers.Split(Regex(PIECES), "isolated")
    to_symbols = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, to_symbols])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(name, special=name not in STRUCTURE, normalized=False) for name in SPECIALS])
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **ROLES})
    _copy("chat_template.jinja", folder)


def write_tiktoken_form(
    folder: Path, vocabulary: Sequence[bytes] = BASE_VOCABULARY, special_id: Mapping[str, int] = SPECIAL_ID
) -> None:
    """Write a tokenizer as Kimi's own repositories hold theirs; loading it takes `trust_remote_code`."""
    ranks = [b"%s %d\n" % (base64.b64encode(token), rank) for rank, token in enumerate(vocabulary)]
    (folder / "tiktoken.model").write_bytes(b"".join(ranks))
    flags = {"normalized": False, "lstrip": False, "rstrip": False, "single_word": False}
    config = {
        "tokenizer_class": "TikTokenTokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
        "pieces": PIECES,
        "added_tokens_decoder": {
            str(token_id): {"content": name, "special": name not in STRUCTURE, **flags}
            for name, token_id in special_id.items()
        },
        **ROLES,
    }
    write_json(folder / "tokenizer_config.json", config)
    _copy("tokenization_kimi.py", folder)
    _copy("chat_template.jinja", folder)
