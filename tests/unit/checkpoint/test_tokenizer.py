"""Both forms of the tokenizer give the same ids, texts and chats."""

from __future__ import annotations

import base64
import json

import pytest

transformers = pytest.importorskip("transformers", reason="loads both forms as vLLM does; it is in the image")
pytest.importorskip("torch", reason="the weights are made with torch, which is in the image")
pytest.importorskip("tiktoken", reason="the second form reads its vocabulary with tiktoken, which is in the image")

from aerie.checkpoint.tiny import script  # noqa: E402 - needs the libraries above

TEXTS = [
    script.ANSWER,
    "What is Aerie?",
    "  two  spaces\n\tand\u00a0others \n",
    "isn't a model: not in the nest, naïve, 日本語, 🦅",
    "",
    " ",
    "a",
    "<|im_user|>user<|im_middle|>Hello<|im_end|><|im_assistant|>",
    "no <|such|> token, <think>yes</think>",
    "".join(map(chr, range(1, 0x300))),
]
CONVERSATIONS = {
    "text": [{"role": "user", "content": "What is Aerie?"}],
    "system and turns": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hello from Aerie!"},
        {"role": "user", "content": [{"type": "text", "text": "Who are you?"}]},
    ],
    "picture": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}},
                                             {"type": "text", "text": "What is that?"}]}],
    "tool call": [
        {"role": "user", "content": "Time?"},
        {"role": "assistant", "content": "", "tool_calls": [
            {"id": "functions.time:0", "function": {"name": "time", "arguments": {"zone": "UTC"}}}]},
        {"role": "tool", "tool_call_id": "functions.time:0", "content": "12:00"},
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def fast(pair):
    return transformers.AutoTokenizer.from_pretrained(pair / "target")


@pytest.fixture(scope="module")
def slow(pair, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path_factory.mktemp("modules")))
        return transformers.AutoTokenizer.from_pretrained(pair / "target-tiktoken", trust_remote_code=True)


def test_each_form_is_what_it_says(fast, slow):
    assert fast.is_fast
    assert not slow.is_fast
    assert type(slow).__name__ == "TikTokenTokenizer"


@pytest.mark.parametrize("text", TEXTS)
def test_both_forms_encode_alike_and_lose_nothing(fast, slow, text):
    ids = fast.encode(text)
    assert slow.encode(text) == ids
    assert fast.decode(ids) == slow.decode(ids) == text
    assert fast.decode(ids, skip_special_tokens=True) == slow.decode(ids, skip_special_tokens=True)
    assert fast.convert_ids_to_tokens(ids) == slow.convert_ids_to_tokens(ids)


def test_what_the_model_says_is_one_token_a_word(fast):
    assert len(fast.encode(script.ANSWER)) == len(script.words(script.ANSWER))


def test_ids_are_the_scripts(fast, slow):
    assert fast.get_vocab() == slow.get_vocab()
    assert len(fast) == len(slow) == len(script.VOCABULARY)
    for special, token_id in script.SPECIAL_ID.items():
        assert fast.convert_tokens_to_ids(special) == slow.convert_tokens_to_ids(special) == token_id
    for name in ("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id"):
        assert getattr(fast, name) == getattr(slow, name) is not None
    assert set(fast.all_special_tokens) == set(slow.all_special_tokens)
    assert {"[BOS]", "<|im_end|>", "<|media_pad|>"} < set(fast.all_special_tokens)
    assert not script.STRUCTURE & set(fast.all_special_tokens)


@pytest.mark.parametrize("messages", CONVERSATIONS.values(), ids=CONVERSATIONS.keys())
def test_chats_are_rendered_alike(fast, slow, messages):
    tools = [{"type": "function", "function": {"name": "time", "parameters": {}}}]
    for options in ({}, {"tools": tools}, {"thinking": False}):
        rendered = fast.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **options)
        assert rendered == slow.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **options)
        end = "<think></think>" if "thinking" in options else "<think>"
        assert rendered.endswith(f"<|im_end|><|im_assistant|>assistant<|im_middle|>{end}")
        assert ("tool_declare" in rendered) == ("tools" in options)


def test_a_chat_has_the_real_models_form(fast):
    rendered = fast.apply_chat_template(CONVERSATIONS["picture"], tokenize=False)
    picture = "<|media_begin|>image<|media_content|><|media_pad|><|media_end|>"
    assert rendered == f"<|im_user|>user<|im_middle|>{picture}What is that?<|im_end|>"
    rendered = fast.apply_chat_template(CONVERSATIONS["tool call"], tokenize=False)
    assert (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.time:0<|tool_call_argument_begin|>"
        '{"zone": "UTC"}<|tool_call_end|><|tool_calls_section_end|><|im_end|>'
    ) in rendered


def test_the_second_form_is_the_real_repositories(pair):
    lines = (pair / "target-tiktoken" / "tiktoken.model").read_bytes().splitlines()
    assert [int(line.split()[1]) for line in lines] == list(range(len(script.BASE_VOCABULARY)))
    assert [base64.b64decode(line.split()[0]) for line in lines] == script.BASE_VOCABULARY
    config = json.loads((pair / "target-tiktoken" / "tokenizer_config.json").read_text())
    assert config["auto_map"]["AutoTokenizer"] == ["tokenization_kimi.TikTokenTokenizer", None]
    assert not (pair / "target-tiktoken" / "tokenizer.json").exists()


def test_it_survives_saving_and_loading(slow, tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    slow.save_pretrained(tmp_path / "saved")
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "saved", trust_remote_code=True)
    assert again.encode(TEXTS[3]) == slow.encode(TEXTS[3])
    assert again.get_vocab() == slow.get_vocab()
