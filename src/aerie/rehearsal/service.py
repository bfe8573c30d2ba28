"""The rehearsal's engine as a client sees it: OpenAI's API, with the ids of the tokens that it says."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import httpx

from aerie.checkpoint.shrink import Profile
from aerie.engine_metrics import EngineMetrics, read_metrics
from aerie.rehearsal.pair import Pair
from aerie.rehearsal.static.settings import Settings

_TIMEOUT = 240.0  # seconds; a first answer may compile kernels
_QUOTED = 300  # characters of a refusal


class RefusedError(Exception):
    """The engine answered with a refusal, or not at all; the message quotes it."""


@dataclass(frozen=True)
class Service:
    """The engine that is asked: `longest` is the longest request in tokens that it takes."""

    url: str
    key: str
    pair: Pair
    settings: Settings
    longest: int
    profile: Profile
    reads_pictures: bool

    @property
    def model(self) -> str:
        """The name that it serves under."""
        names = self.settings.given.get("served-model-name") or str(self.pair.target)
        return str(names[0] if isinstance(names, list) else names)

    def say(self, prompt: Sequence[int], count: int, **options: Any) -> Any:
        """Return the first choice of a completion of so many tokens after these; raises RefusedError."""
        body = {"prompt": list(prompt), "max_tokens": count, "ignore_eos": True, **options}
        return self._ask("/v1/completions", body)["choices"][0]

    def chat(self, content: Any, count: int) -> Any:
        """Return the answer to one message of a user, of at most `count` tokens; raises RefusedError."""
        return self._ask("/v1/chat/completions", _conversation(content, count))

    def stream_chat(self, content: Any, count: int, **options: Any) -> Iterator[dict[str, Any]]:
        """Yield the events of a streamed answer; raises RefusedError."""
        body = self._body(_conversation(content, count) | options | {"stream": True})
        with self._answer("/v1/chat/completions", body) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    yield json.loads(line.removeprefix("data: "))

    def is_healthy(self) -> bool:
        """Return whether it answers, and its engine core lives."""
        try:
            with self._answer("/health"):
                return True
        except RefusedError:
            return False

    def metrics(self) -> EngineMetrics:
        """Return what it counts; raises RefusedError."""
        with self._answer("/metrics") as answer:
            return read_metrics(answer.read().decode())

    def _ask(self, path: str, body: Mapping[str, Any]) -> Any:
        with self._answer(path, self._body(body)) as answer:
            return json.loads(answer.read())

    def _body(self, body: Mapping[str, Any]) -> dict[str, Any]:
        return {"model": self.model, "temperature": 0, "return_token_ids": True, **body}

    @contextmanager
    def _answer(self, path: str, body: Mapping[str, Any] | None = None) -> Iterator[httpx.Response]:
        headers = {"Authorization": f"Bearer {self.key}"}
        # No proxy, and no certificate to check: it listens on loopback.
        client = httpx.Client(base_url=self.url, headers=headers, timeout=_TIMEOUT, trust_env=False, verify=False)  # noqa: S501
        try:
            with client, client.stream("GET" if body is None else "POST", path, json=body) as answer:
                if answer.status_code != HTTPStatus.OK:
                    raise RefusedError(f"{answer.status_code} {answer.read().decode(errors='replace')[:_QUOTED]}")
                yield answer
        except httpx.HTTPError as error:
            raise RefusedError(f"no answer: {error or type(error).__name__}") from None


def _conversation(content: Any, count: int) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], "max_tokens": count}
