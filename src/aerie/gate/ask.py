"""`aerie ask`: one chat completion of the local engine, and what speculation did for it."""

import json
import sys
from dataclasses import asdict
from http import HTTPStatus
from pathlib import Path
from typing import Any

from aerie.auth import read_keys
from aerie.engine_metrics import Speculation, read_metrics
from aerie.gate.http import UnreachableError, request

_QUOTED = 300  # characters of a refusal
_TIMEOUT = 300.0  # seconds; a first answer may compile kernels


class _RefusedError(Exception):
    """The engine answered with an error, or with something unexpected; the message quotes it."""


def ask(url: str, keys_file: Path, prompt: str, max_tokens: int, *, as_json: bool) -> int:
    """Print the answer to `prompt` and the counters of speculation, for it and in all; return 0, or 1 and why."""
    try:
        answer = _ask(url, _first_key(keys_file), prompt, max_tokens)
    except (UnreachableError, _RefusedError) as error:
        print(f"no completion from {url}: {error}", file=sys.stderr)
        return 1
    except (LookupError, TypeError, ValueError) as error:
        print(f"no completion from {url}: what answers there is not OpenAI's API ({error!r})", file=sys.stderr)
        return 1
    print(json.dumps(answer) if as_json else _describe(answer))
    return 0


def _first_key(path: Path) -> str:
    try:
        return read_keys(path)[0]
    except (OSError, ValueError, IndexError) as error:
        raise _RefusedError(f"no key to ask with in {path} ({error})") from None


def _ask(url: str, key: str, prompt: str, max_tokens: int) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {key}"}
    model = _call(f"{url}/v1/models", headers)["data"][0]["id"]
    before = _counters(url)
    body = {"model": model, "messages": [{"role": "user", "content": prompt}], "max_tokens": max_tokens}
    completion = _call(f"{url}/v1/chat/completions", headers, body | {"temperature": 0})
    after = _counters(url)
    speculation = before and after and {"request": asdict(after - before), "total": asdict(after)}
    choice = completion["choices"][0]
    return {
        "model": model,
        # A reasoning parser leaves no content where the answer ended within its reasoning.
        "answer": choice["message"].get("content") or choice["message"].get("reasoning") or "",
        "finish_reason": choice["finish_reason"],
        "usage": completion["usage"],
        "speculation": speculation,
    }


def _call(url: str, headers: dict[str, str], body: Any = None) -> Any:
    status, text = request(url, _TIMEOUT, headers, body)
    if status != HTTPStatus.OK:
        raise _RefusedError(f"{status} {text[:_QUOTED]}")
    return json.loads(text)


def _counters(url: str) -> Speculation | None:
    return read_metrics(request(f"{url}/metrics", _TIMEOUT)[1]).speculation


def _describe(answer: dict[str, Any]) -> str:
    lines = [answer["answer"]]
    for what, counters in (answer["speculation"] or {}).items():
        lines.append(f"speculation, {what}: {Speculation(**counters)}")
    return "\n".join(lines)
