"""A target's tokenizer, template and preprocessor, by their files."""

from __future__ import annotations

import json
import os

import pytest
from hypothesis import HealthCheck, given, settings
from odd_json import mutations

from aerie.checkpoint.config import read_target
from aerie.checkpoint.tiny.script import VOCABULARY
from aerie.checkpoint.tiny.tokenizer import write_tiktoken_form
from aerie.checkpoint.tokenizer import read_tokenizer
from aerie.rehearsal.findings import Verdict
from aerie.rehearsal.stand_in import stand_in_for
from aerie.rehearsal.static.hardware import RTX_PRO_6000
from aerie.rehearsal.static.settings import settings_from
from aerie.rehearsal.static.tokenizer import tokenizer_is_right


class Checkpoint:
    def __init__(self, directory):
        self.directory = directory

    def findings(self, *, needed=True, **given):
        engine = settings_from(
            {"trust-remote-code": True, **{name.replace("_", "-"): value for name, value in given.items()}},
            RTX_PRO_6000,
        )
        found = tokenizer_is_right(read_target(self.directory), read_tokenizer(self.directory), engine, needed=needed)
        return {each.check: each for each in found}

    def says(self, check, **given):
        found = self.findings(**given)[check]
        return found.verdict, found.text

    def change(self, name, **fields):
        path = self.directory / name
        content = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps({key: value for key, value in (content | fields).items() if value is not None}))


@pytest.fixture
def whole(kimi):
    """Kimi-K2.5 with a tokenizer in the form of its own."""
    stand_in = stand_in_for(read_target(kimi.directory))
    write_tiktoken_form(kimi.directory, stand_in.vocabulary, stand_in.special_id)
    return Checkpoint(kimi.directory)


def fast(checkpoint, tokens, **added):
    """Put a tokenizer.json in place of tiktoken.model."""
    (checkpoint.directory / "tiktoken.model").unlink()
    checkpoint.change("tokenizer_config.json", auto_map=None, added_tokens_decoder=None)
    content = {"model": {"vocab": {str(number): number for number in range(tokens)}},
               "added_tokens": [{"content": name, "id": number} for name, number in added.items()]}  # fmt: skip
    (checkpoint.directory / "tokenizer.json").write_text(json.dumps(content))


def test_a_whole_one(whole):
    assert {check: (each.verdict, each.text) for check, each in whole.findings().items()} == {
        "tokenizer": (Verdict.PASSED, "tiktoken.model: 163,840 ids of 163,840"),
        "end of turn": (Verdict.PASSED, "<|im_end|> (163586) ends an answer"),
        "chat template": (Verdict.PASSED, "chat_template.jinja"),
        "preprocessor": (Verdict.PASSED, "preprocessor_config.json"),
    }


def test_none(kimi):
    found = Checkpoint(kimi.directory)
    assert found.says("tokenizer") == (
        Verdict.FAILED, f"{kimi.directory} has none of tokenizer.json, tiktoken.model, tokenizer.model",
    )  # fmt: skip
    assert found.says("chat template")[0] is Verdict.FAILED
    without = found.findings(needed=False)
    assert {each.verdict for check, each in without.items() if check != "preprocessor"} == {Verdict.SKIPPED}


def test_none_and_none_to_be_made(kimi):
    found = Checkpoint(kimi.directory)
    found.change("config.json", bos_token_id=None)
    verdict, text = found.says("tokenizer", needed=False)
    assert verdict is Verdict.FAILED
    assert "has no tokenizer, and of config.json's bos_token_id None" in text


def test_another_models(whole):
    write_tiktoken_form(whole.directory)
    verdict, text = whole.says("tokenizer")
    assert verdict is Verdict.FAILED
    assert text == (
        f"tiktoken.model and tokenizer_config.json have {len(VOCABULARY)} ids, and config.json's vocab_size is "
        "163,840: it is another model's"
    )


def test_another_models_of_as_many_ids(whole):
    """By the ids that config.json names."""
    fast(whole, 163839, **{"[BOS]": 0, "[PAD]": 163839})
    assert whole.says("tokenizer") == (
        Verdict.FAILED, "[BOS] is 0, and config.json's bos_token_id is 163584: it is another model's",
    )  # fmt: skip
    fast_end = {"[BOS]": 163584, "<|im_end|>": 163586, "[PAD]": 163839}
    (whole.directory / "tiktoken.model").touch()
    fast(whole, 163584, **fast_end)
    assert whole.says("tokenizer") == (
        Verdict.FAILED, "config.json's eos_token_id 163585 is no special token of the tokenizer",
    )  # fmt: skip


def test_a_vocabulary_may_be_padded_a_little(whole):
    ids = {"[BOS]": 163584, "[EOS]": 163585, "<|im_end|>": 163586}
    fast(whole, 163584, **ids)
    whole.change("config.json", vocab_size=163840)
    assert whole.says("tokenizer") == (Verdict.PASSED, "tokenizer.json: 163,587 ids of 163,840")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 2795286\n",
         "tiktoken.model is cut off, or no tiktoken vocabulary: lines of a token in base64 and its rank"),
        (b"AA== 0\nAQ== 1\n",
         "tiktoken.model has 2 tokens, and the special ones of tokenizer_config.json begin at 163,584"),
        (b"AA== 0\nAQ== 1\nAg==", "tiktoken.model is cut off"),
    ],
)  # fmt: skip
def test_a_vocabulary_that_is_not_whole(whole, content, said):
    (whole.directory / "tiktoken.model").write_bytes(content)
    verdict, text = whole.says("tokenizer")
    assert verdict is Verdict.FAILED
    assert text.startswith(said)


def test_files_that_are_no_json(whole):
    (whole.directory / "tokenizer_config.json").write_text('{"bos_token": ')
    verdict, text = whole.says("tokenizer")
    assert verdict is Verdict.FAILED
    assert text.startswith("tokenizer_config.json is not JSON (Expecting value")


def test_the_code_that_it_brings(whole):
    assert whole.says("tokenizer", trust_remote_code=False) == (
        Verdict.FAILED, "tokenizer_config.json takes code of the checkpoint's own, tokenization_kimi.TikTokenTokenizer",
    )  # fmt: skip
    (whole.directory / "tokenization_kimi.py").unlink()
    assert whole.says("tokenizer") == (
        Verdict.FAILED,
        "tokenizer_config.json takes tokenization_kimi.TikTokenTokenizer, and there is no tokenization_kimi.py",
    )


def test_the_older_form_of_the_code_that_it_brings(whole):
    """A list for AutoTokenizer alone, as transformers wrote it before there was a mapping."""
    whole.change("tokenizer_config.json", auto_map=["tokenization_kimi.TikTokenTokenizer", None])
    assert whole.says("tokenizer")[0] is Verdict.PASSED
    assert whole.says("tokenizer", trust_remote_code=False) == (
        Verdict.FAILED, "tokenizer_config.json takes code of the checkpoint's own, tokenization_kimi.TikTokenTokenizer",
    )  # fmt: skip


@pytest.mark.parametrize("name", ["tokenizer_config.json", "generation_config.json", "tokenizer.json"])
def test_files_that_cannot_be_read(whole, name):
    path = whole.directory / name
    path.write_text("[" * 100_000)
    assert whole.says("tokenizer")[1].startswith(f"{name} is not JSON (")
    path.unlink()
    os.mkfifo(path)
    assert whole.says("tokenizer") == (Verdict.FAILED, f"{name} cannot be read: it is no regular file")


SMALL = {
    "tokenizer_config.json": {
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
        "added_tokens_decoder": {"2": {"content": "<|im_end|>"}, "3": {"content": "[PAD]"}},
        "eos_token": "<|im_end|>",
        "pad_token": {"content": "[PAD]"},
        "chat_template": "{{ messages }}",
    },
    "generation_config.json": {"eos_token_id": [2, 3]},
    "tokenizer.json": {
        "model": {"vocab": {"a": 0, "b": 1, "<|im_end|>": 2}},
        "added_tokens": [{"content": "<|im_end|>", "id": 2}, {"content": "[PAD]", "id": 3}],
    },
}


@settings(max_examples=200, deadline=2000, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(files=mutations([SMALL]))
def test_every_form_of_its_files_ends_in_findings(kimi, files):
    for name in SMALL:
        content = files.get(name) if isinstance(files, dict) else None
        (kimi.directory / name).write_text("" if content is None else json.dumps(content))
    found = Checkpoint(kimi.directory).findings()
    assert {"tokenizer", "end of turn", "chat template"} <= found.keys()


@pytest.mark.parametrize("given_template", ["a" * 5000, "a\0b"])
def test_a_template_whose_name_no_file_can_have(whole, given_template):
    assert whole.says("chat template", chat_template=given_template)[0] is Verdict.FAILED


def test_a_directory_whose_name_none_can_have(tmp_path):
    assert read_tokenizer(tmp_path / "a\0b").names == frozenset()


def test_an_answer_that_does_not_end(whole):
    """config.json's eos is [EOS], which no turn ends with."""
    end = "[EOS]"
    whole.change("tokenizer_config.json", eos_token=end)
    assert whole.says("end of turn") == (
        Verdict.WARNED, "<|im_end|> (163586) is none of the tokens that end an answer: [163585]",
    )  # fmt: skip
    whole.change("generation_config.json", eos_token_id=163586)
    assert whole.says("end of turn")[0] is Verdict.PASSED


def test_templates(whole, tmp_path):
    (whole.directory / "chat_template.jinja").unlink()
    verdict, text = whole.says("chat template")
    assert verdict is Verdict.FAILED
    assert text.startswith(f"{whole.directory} has no chat_template.jinja, and tokenizer_config.json holds none")
    assert whole.says("chat template", chat_template="{{ messages }}")[0] is Verdict.PASSED
    elsewhere = tmp_path / "kimi.jinja"
    assert whole.says("chat template", chat_template=str(elsewhere)) == (
        Verdict.FAILED, f"chat-template {elsewhere} is no file here",
    )  # fmt: skip
    elsewhere.touch()
    assert whole.says("chat template", chat_template=str(elsewhere))[0] is Verdict.PASSED
    whole.change("tokenizer_config.json", chat_template="{{ messages }}")
    assert whole.says("chat template") == (Verdict.PASSED, "in tokenizer_config.json")


def test_a_preprocessor_for_vision_alone(whole):
    (whole.directory / "preprocessor_config.json").unlink()
    assert whole.says("preprocessor")[0] is Verdict.FAILED
    assert "preprocessor" not in whole.findings(language_model_only=True)
