"""The steps against a scripted API, which can be told to do each thing wrong."""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from aerie.checkpoint.script import Script
from aerie.checkpoint.shrink import Profile
from aerie.engine_arguments import read_arguments
from aerie.rehearsal import steps
from aerie.rehearsal.chain import Chain
from aerie.rehearsal.findings import Verdict
from aerie.rehearsal.pair import Pair
from aerie.rehearsal.service import Service
from aerie.rehearsal.static.hardware import GIB, Hardware
from aerie.rehearsal.static.settings import settings_from

CHAIN = Chain(tuple(range(1500, 1520)), function="go", thought="Ready", answer="Every part")
SCRIPT = Script(2000, CHAIN.tokens)


@dataclass
class Wrong:
    """What the scripted API does wrong."""

    token: int | None = None
    """The place in each answer of a token that is not the script's."""
    mixed: bool = False
    thought: str = "Ready"
    answer: str = " Every part of"
    function: str = "go"
    arguments: tuple[str, ...] = ("{", "}")
    ended: str = "tool_calls"
    drafts: int = 12
    accepted: tuple[int, ...] = (12, 0, 0)
    rank: int = 1
    held: float = 0.0
    picture_tokens: int = 4
    status: int = 200
    text: str | None = None
    asked: list[dict[str, Any]] = field(default_factory=list)


class _Api(BaseHTTPRequestHandler):
    wrong: Wrong

    def log_message(self, *_arguments: Any) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        wrong = self.wrong
        name = 'model_name="m",engine="0"'
        count = sum(1 for body in wrong.asked if body.get("max_tokens") == 48)
        lines = [
            f"vllm:num_requests_running{{{name}}} 0.0",
            f"vllm:num_requests_waiting{{{name}}} 0.0",
            f"vllm:kv_cache_usage_perc{{{name}}} {wrong.held}",
            f"vllm:spec_decode_num_drafts_total{{{name}}} {count * wrong.drafts}",
            f"vllm:spec_decode_num_draft_tokens_total{{{name}}} {count * wrong.drafts * 3}",
            f"vllm:spec_decode_num_accepted_tokens_total{{{name}}} {count * sum(wrong.accepted)}",
            *(
                f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{{name},position="{place}"}} {count * accepted}'
                for place, accepted in enumerate(wrong.accepted)
            ),
        ]
        self._send("\n".join(lines) + "\n")

    def do_POST(self) -> None:
        wrong = self.wrong
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        wrong.asked.append(body | {"key": self.headers["Authorization"]})
        if wrong.status != 200:
            self._send("no such thing", wrong.status)
            return
        if wrong.text is not None:
            self._send(wrong.text)
            return
        if body.get("stream"):
            self._send("".join(f"data: {json.dumps(event)}\n\n" for event in self._events()) + "data: [DONE]\n\n")
        elif "prompt" in body:
            self._send(json.dumps({"choices": [self._completion(body)]}))
        else:
            self._send(json.dumps(self._chat(body)))

    def _say(self, last: int, count: int) -> list[int]:
        said = SCRIPT.continuation(0 if self.wrong.mixed else last, count)
        if self.wrong.token is not None and self.wrong.token < count:
            said[self.wrong.token] = 1999
        return said

    def _completion(self, body: dict[str, Any]) -> dict[str, Any]:
        prompt = body["prompt"]
        choice = {"token_ids": self._say(prompt[-1], body["max_tokens"])}
        if "prompt_logprobs" in body:
            choice["prompt_logprobs"] = [None, *({str(token): {"rank": self.wrong.rank}} for token in prompt[1:])]
        return choice

    def _chat(self, body: dict[str, Any]) -> dict[str, Any]:
        content = body["messages"][0]["content"]
        length = 9 + (self.wrong.picture_tokens if any("image_url" in part for part in content) else 0)
        return {
            "prompt_token_ids": [1] * (length - 1) + [1501],
            "usage": {"prompt_tokens": length},
            "choices": [
                {
                    "token_ids": self._say(1501, body["max_tokens"]),
                    "message": {"content": self.wrong.answer, "reasoning": self.wrong.thought},
                }
            ],
        }

    def _events(self) -> list[dict[str, Any]]:
        calls = [{"name": self.wrong.function}, *({"arguments": part} for part in self.wrong.arguments)]
        deltas: list[dict[str, Any]] = [
            {"role": "assistant"},
            *({"tool_calls": [{"function": call}]} for call in calls),
        ]
        events = [{"choices": [{"delta": delta, "finish_reason": None}]} for delta in deltas]
        return [*events, {"choices": [{"delta": {}, "finish_reason": self.wrong.ended}]}, {"choices": []}]

    def _send(self, text: str, status: int = 200) -> None:
        data = text.encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def wrong():
    return Wrong()


@pytest.fixture
def service(wrong):
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Api", (_Api,), {"wrong": wrong}))
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    words = [
        *("/w/target", "--max-model-len", "200", "--reasoning-parser", "kimi_k2", "--tool-call-parser", "kimi_k2"),
        *("--enable-auto-tool-choice", "--speculative-config", '{"method": "eagle3", "num_speculative_tokens": 3}'),
        *("--max-num-batched-tokens", "200", "--max-num-seqs", "16"),
    ]
    settings = settings_from(read_arguments(words), Hardware("CPU", None, GIB, 0, 1))
    pair = Pair(
        Path("/w/target"), Path("/w/drafter"), SCRIPT, CHAIN, (), has_own_tokenizer=True, expected_acceptance=(1.0,)
    )
    url = f"http://127.0.0.1:{server.server_port}"
    yield Service(url, "secret", pair, settings, 200, Profile.CPU, reads_pictures=True)
    server.shutdown()
    thread.join()
    server.server_close()


def found(check, service):
    return [(each.verdict, each.text) for each in steps.run(check, service)]


@pytest.mark.parametrize("check", steps.STEPS)
def test_all_is_well(service, wrong, check):
    assert [verdict for verdict, _ in found(check, service)] == [Verdict.PASSED]
    assert {body["key"] for body in wrong.asked} == {"Bearer secret"}
    assert {body["temperature"] for body in wrong.asked} == {0}


@pytest.mark.parametrize(
    "check", [name for name in steps.STEPS if name not in {"tool call", "same without speculation"}]
)
def test_another_token(service, wrong, check):
    wrong.token = 5
    (verdict, text), *_ = found(check, service)
    assert verdict is Verdict.FAILED
    assert "token 6 of " in text
    assert "is 1999" in text


def test_answers_that_were_mixed_up(service, wrong):
    wrong.mixed = True
    (verdict, text), *_ = found("parallel requests", service)
    assert verdict is Verdict.FAILED
    assert text.startswith("7 of 8 answers are wrong")


@pytest.mark.parametrize("check", steps.STEPS)
def test_a_refusal_is_quoted(service, wrong, check):
    wrong.status = 400
    ((verdict, text),) = found(check, service)
    assert (verdict, text) == (Verdict.FAILED, "400 no such thing")


@pytest.mark.parametrize("text", ["not JSON", "{}"])
@pytest.mark.parametrize("check", ["text", "picture", "KV cache"])
def test_another_form(service, wrong, check, text):
    wrong.text = text
    ((verdict, said),) = found(check, service)
    assert verdict is Verdict.FAILED
    assert said.startswith("the answer has not the form of OpenAI's API")


def test_nobody_answers(service):
    gone = Service(
        "http://127.0.0.1:1", "secret", service.pair, service.settings, 200, Profile.CPU, reads_pictures=True
    )
    ((verdict, text),) = found("text", gone)
    assert verdict is Verdict.FAILED
    assert text.startswith("no answer: ")


@pytest.mark.parametrize(
    ("check", "change", "text"),
    [
        ("text", {"thought": "", "answer": "Ready Every part"}, "reasoning-parser kimi_k2 made the thought ''"),
        ("picture", {"picture_tokens": 0}, "a picture added no token to the prompt"),
        ("tool call", {"function": ""}, "tool-call-parser kimi_k2 made '' with '{}', which ended with tool_calls, of"),
        ("tool call", {"arguments": ('{"x',)}, "tool-call-parser kimi_k2 made 'go' with '{\"x', which"),
        ("tool call", {"ended": "stop"}, "tool-call-parser kimi_k2 made 'go' with '{}', which ended with stop"),
        ("speculation", {"drafts": 0, "accepted": (0, 0, 0)}, "nothing was drafted for 48 tokens"),
        ("speculation", {"accepted": (1, 0, 0)}, "of 12 drafts the target accepted 1, 0, 0 tokens by position"),
        ("speculation", {"accepted": (12, 3, 0)}, "of 12 drafts the target accepted 12, 3, 0 tokens by position"),
        ("same without speculation", {"rank": 2}, "at 48 of 48 places the target alone would have said another token"),
    ],
)
def test_what_else_can_be_wrong(service, wrong, check, change, text):
    for name, value in change.items():
        setattr(wrong, name, value)
    ((verdict, said),) = found(check, service)
    assert verdict is Verdict.FAILED
    assert said.startswith(text)


def test_a_cache_that_does_not_empty(service, wrong, monkeypatch):
    monkeypatch.setattr(steps, "_EMPTIES_WITHIN", 0.3)
    wrong.held = 0.25
    ((verdict, text),) = found("KV cache", service)
    assert verdict is Verdict.FAILED
    assert text.startswith("25.0% are held")


def test_a_drafter_without_a_head_of_its_own(service, wrong):
    wrong.accepted = (3, 1, 0)
    shared = Pair(
        service.pair.target, service.pair.drafter, SCRIPT, CHAIN, (), has_own_tokenizer=True, expected_acceptance=None
    )
    other = Service(service.url, "secret", shared, service.settings, 200, Profile.CPU, reads_pictures=True)
    ((verdict, text),) = found("speculation", other)
    assert verdict is Verdict.PASSED
    assert "is not known" in text


def test_a_small_vocabulary(service, wrong):
    small = Script(300, tuple(range(40, 60)))
    pair = replace(service.pair, script=small, chain=replace(CHAIN, tokens=small.chain))
    for check in ("long prompt", "parallel requests", "KV cache"):
        found(check, replace(service, longest=800, pair=pair))
    assert max(max(body["prompt"]) for body in wrong.asked) == 299


def test_a_long_prompt_is_as_long_as_may_be(service, wrong):
    found("long prompt", service)
    assert len(wrong.asked[0]["prompt"]) == 187


@pytest.mark.parametrize("check", ["long prompt", "KV cache"])
def test_prompts_hold_what_the_answer_begins_with(service, wrong, check):
    """So that its tokens read what was cached of them before, too."""
    found(check, service)
    prompt = wrong.asked[0]["prompt"]
    assert set(CHAIN.tokens) <= set(prompt[:-1])
    assert prompt[-1] == CHAIN.tokens[0]
    assert len(set(prompt)) > 100
