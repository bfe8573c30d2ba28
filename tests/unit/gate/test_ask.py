"""One question to the engine, and what speculation did for it."""

import json

import pytest

from aerie.cli import main

COUNTERS = (
    'vllm:spec_decode_num_drafts_total{{engine="0"}} {0}\n'
    'vllm:spec_decode_num_draft_tokens_total{{engine="0"}} {1}\n'
    'vllm:spec_decode_num_accepted_tokens_total{{engine="0"}} {2}\n'
    'vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="0"}} {2}\n'
)


@pytest.fixture
def keys_file(tmp_path):
    path = tmp_path / "api-keys"
    path.write_text("# ours\nfirst\nsecond\n")
    return str(path)


@pytest.fixture
def engine(answers):
    readings = iter([COUNTERS.format(10, 30, 20), COUNTERS.format(14, 42, 30)])
    completion = {
        "choices": [{"message": {"content": "Aerie serves."}, "finish_reason": "length"}],
        "usage": {"completion_tokens": 14},
    }
    answers["/metrics"] = (200, lambda _body: next(readings))
    answers["/v1/models"] = (200, json.dumps({"data": [{"id": "kimi"}]}))
    answers["/v1/chat/completions"] = (200, json.dumps(completion))
    return answers


def ask(engine, keys_file, *options):
    return main(["ask", "--url", engine["url"], "--api-keys-file", keys_file, *options, "What is Aerie?"])


def test_the_answer_and_the_counters_are_printed(engine, keys_file, capsys):
    assert ask(engine, keys_file, "--max-tokens", "14") == 0
    assert capsys.readouterr().out == (
        "Aerie serves.\n"
        "speculation, request: 4 drafts, 10 of 12 drafted tokens accepted, 3.50 tokens a step\n"
        "speculation, total: 14 drafts, 30 of 42 drafted tokens accepted, 3.14 tokens a step\n"
    )
    path, key, body = engine["asked"][2]
    assert (path, key) == ("/v1/chat/completions", "Bearer first")
    assert (body["model"], body["max_tokens"]) == ("kimi", 14)
    assert body["messages"] == [{"role": "user", "content": "What is Aerie?"}]


def test_json_holds_the_same(engine, keys_file, capsys):
    assert ask(engine, keys_file, "--json") == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["model"], answer["answer"], answer["finish_reason"]) == ("kimi", "Aerie serves.", "length")
    assert answer["speculation"]["request"] == {
        "drafts": 4, "draft_tokens": 12, "accepted_tokens": 10, "accepted_by_position": [10],
    }  # fmt: skip
    assert answer["speculation"]["total"]["drafts"] == 14


def test_without_speculation_there_is_only_the_answer(engine, keys_file, capsys):
    engine["/metrics"] = (200, "")
    assert ask(engine, keys_file) == 0
    assert capsys.readouterr().out == "Aerie serves.\n"


@pytest.mark.parametrize(
    ("message", "answer"),
    [({"content": None, "reasoning": "Let me think"}, "Let me think"), ({"content": None, "reasoning": None}, "")],
)
def test_an_answer_that_ended_in_its_reasoning_is_told_too(engine, keys_file, capsys, message, answer):
    completion = {"choices": [{"message": message, "finish_reason": "length"}], "usage": {}}
    engine["/v1/chat/completions"] = (200, json.dumps(completion))
    assert ask(engine, keys_file) == 0
    assert capsys.readouterr().out.splitlines()[0] == answer


def test_a_refusal_is_quoted(engine, keys_file, capsys):
    engine["/v1/models"] = (401, "who are you")
    assert ask(engine, keys_file) == 1
    assert capsys.readouterr().err == f"no completion from {engine['url']}: 401 who are you\n"


def test_nobody_there_and_no_key_are_told(tmp_path, keys_file, capsys):
    nowhere = {"url": "http://127.0.0.1:9"}
    assert ask(nowhere, keys_file) == 1
    assert "127.0.0.1:9: " in capsys.readouterr().err
    assert ask(nowhere, str(tmp_path / "none")) == 1
    assert f"no key to ask with in {tmp_path}/none" in capsys.readouterr().err


@pytest.mark.parametrize("answer", ["<html>", "{}", '{"data": []}', "[]", "7", '{"data": [{}]}'])
def test_what_is_not_openais_api_is_told(engine, keys_file, capsys, answer):
    engine["/v1/models"] = (200, answer)
    assert ask(engine, keys_file) == 1
    assert "what answers there is not OpenAI's API" in capsys.readouterr().err
