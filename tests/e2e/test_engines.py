"""Other engines of the same image: tokenizer, drafter, compilation, and speculation that changes no token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from service import REPOSITORY, Service, engine

from aerie.checkpoint.tiny.script import expected_answer

QUESTION = "What is Aerie?"
SHIPPED: dict[str, Any] = yaml.safe_load((REPOSITORY / "config" / "tiny.yaml").read_text())
TINY = Path(SHIPPED["model"]).parent


def with_drafter(name: str) -> dict[str, Any]:
    return {"speculative-config": {**SHIPPED["speculative-config"], "model": str(TINY / name)}}


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param({"model": str(TINY / "target-tiktoken"), "trust-remote-code": True}, id="tiktoken-tokenizer"),
        pytest.param(with_drafter("drafter-llama"), id="llama-drafter"),
        pytest.param({"enforce-eager": not SHIPPED.get("enforce-eager", False)}, id="other-compilation-mode"),
    ],
)
def test_engine_serves_the_expected_text(running: Service, tmp_path: Path, overrides: dict[str, Any]) -> None:
    with engine(running, tmp_path, overrides) as service:
        # With a tokenizer in Python, as the second form is, vLLM puts a space after `</think>` unless told not to.
        choice = service.chat(QUESTION, max_tokens=128, spaces_between_special_tokens=False)["choices"][0]
        assert choice["message"]["content"] == expected_answer()
        counters = service.speculation()
        assert 0 < counters["accepted_tokens"] < counters["draft_tokens"]


def test_speculation_changes_no_token_in_fp32(running: Service, tmp_path: Path) -> None:
    """Greedy decoding accepts a draft only where it is the target's own argmax, so every token must be equal."""
    prompts = ["What is Aerie?", "abc", "Nobody waits", "0123456789", "the quick brown fox", "?"]

    def greedy(overrides: dict[str, Any]) -> list[list[int]]:
        with engine(running, tmp_path, {"dtype": "float32", **overrides}) as service, service.client() as client:
            answers = [
                client.post(
                    "/v1/completions",
                    json={"model": SHIPPED["served-model-name"], "prompt": prompt, "max_tokens": 100, "temperature": 0,
                          "ignore_eos": True, "return_token_ids": True},
                ).raise_for_status().json()
                for prompt in prompts
            ]  # fmt: skip
        return [answer["choices"][0]["token_ids"] for answer in answers]

    without = greedy({"speculative-config": None})
    assert [len(tokens) for tokens in without] == [100] * len(prompts)
    assert greedy({}) == without
    assert greedy(with_drafter("drafter-llama")) == without
