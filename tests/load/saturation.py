"""Keeps a running service saturated for an hour and proves that its supervisor takes a busy engine for a busy one.

    .venv/bin/python tests/load/saturation.py [--minutes 60] [--api URL] [--status URL] [--keys FILE]

Without more it loads the service that `./run up` started. It asks addresses on loopback only, at most `--concurrency`
requests at a time and `--requests` in all, for `--minutes`. Prompts are of every length up to the longest that the
engine takes, one in ten is given up by its caller half-way, and nobody waits politely: that is how a hang looks to
whoever judges by late answers. Exit code 0 and `N passed`, or 1 and what was not so.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from statistics import quantiles
from typing import Any
from urllib.parse import urlsplit

import httpx

REPOSITORY = Path(__file__).resolve().parents[2]
PROJECT_DIR = REPOSITORY / ".aerie"
LOOPBACK = {"127.0.0.1", "localhost", "::1"}
LOOK_EVERY = 2.0  # seconds between two looks at /status
GIVEN_UP_SHARE, LONGEST_SHARE = 0.1, 0.02
LONGEST_ANSWER = 256  # tokens
CEILING = 512  # requests at a time, whatever is asked for
DICE = random.Random(0)  # noqa: S311 - for lengths, not for secrets


@dataclass
class Seen:
    """What came of the requests, and what /status said meanwhile."""

    outcomes: Counter[str] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    answer_tokens: int = 0
    states: list[dict[str, Any]] = field(default_factory=list)
    unanswered: int = 0

    def serving(self, name: str) -> list[float]:
        return [state["serving"][name] for state in self.states if state["serving"]]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--concurrency", type=int, default=200, help=f"requests at a time, {CEILING} at most")
    parser.add_argument("--requests", type=int, default=100_000, help="in all")
    parser.add_argument("--api", default="http://127.0.0.1:8000")
    parser.add_argument("--status", default="http://127.0.0.1:8001")
    parser.add_argument("--keys", type=Path, default=PROJECT_DIR / "secrets" / "api-keys")
    given = parser.parse_args()
    for url in (given.api, given.status):
        if urlsplit(url).hostname not in LOOPBACK:
            parser.error(f"{url} is not on loopback: this is a load that nobody may put on another machine's service")
    given.concurrency = min(given.concurrency, CEILING)
    return given


async def load(client: httpx.AsyncClient, model: dict[str, Any], ends: float, left: list[int], seen: Seen) -> None:
    """Be one caller: one request after the other until the time or the requests are used up."""
    while time.monotonic() < ends and left[0] > 0:
        left[0] -= 1
        longest = model["max_model_len"] - LONGEST_ANSWER
        length = longest if DICE.random() < LONGEST_SHARE else int(longest ** DICE.random())
        body = {
            "model": model["id"],
            "prompt": [DICE.randrange(100, 200) for _ in range(max(1, length))],
            "max_tokens": DICE.randint(1, LONGEST_ANSWER),
            "ignore_eos": True,
        }
        given_up = DICE.random() < GIVEN_UP_SHARE
        began = time.monotonic()
        try:
            # A queue of hundreds is long: only the end of the test ends a request that its caller does not give up.
            async with asyncio.timeout(DICE.uniform(1, 30) if given_up else max(ends - began, 0) + 1):
                answer = await client.post("/v1/completions", json=body)
        except TimeoutError:
            seen.outcomes["given up" if given_up else "cut off at the end"] += 1
        except httpx.HTTPError as error:
            seen.outcomes[f"failed: {type(error).__name__}"] += 1
            await asyncio.sleep(1)
        else:
            if answer.status_code != httpx.codes.OK:
                seen.outcomes[f"failed: {answer.status_code} {answer.text[:120]}"] += 1
                await asyncio.sleep(1)
                continue
            seen.outcomes["answered"] += 1
            seen.seconds.append(time.monotonic() - began)
            seen.prompt_tokens += answer.json()["usage"]["prompt_tokens"]
            seen.answer_tokens += answer.json()["usage"]["completion_tokens"]


async def look(client: httpx.AsyncClient, ends: float, seen: Seen) -> None:
    while time.monotonic() < ends:
        try:
            seen.states.append((await client.get("/status")).raise_for_status().json())
        except httpx.HTTPError:
            seen.unanswered += 1
        await asyncio.sleep(LOOK_EVERY)


async def saturate(given: argparse.Namespace) -> tuple[dict[str, Any], Seen, dict[str, Any]]:
    """Return the state before, what was seen, and the state after."""
    headers = {"Authorization": f"Bearer {given.keys.read_text().split()[0]}"}
    patience = 60 * given.minutes + 60
    limits = httpx.Limits(max_connections=given.concurrency, max_keepalive_connections=given.concurrency)
    seen = Seen()
    async with (
        httpx.AsyncClient(base_url=given.api, headers=headers, timeout=patience, limits=limits, trust_env=False) as api,
        httpx.AsyncClient(base_url=given.status, timeout=10, trust_env=False) as status,
    ):
        try:
            before = (await status.get("/status")).json()
        except httpx.HTTPError as error:
            sys.exit(
                f"no service answers at {given.status} ({error}): run `./run up`, or give --api, --status and --keys"
            )
        if before["phase"] != "ready":
            sys.exit(f"the service is {before['phase']}, not ready: {before['reason']}")
        model = (await api.get("/v1/models")).raise_for_status().json()["data"][0]
        ends = time.monotonic() + 60 * given.minutes
        left = [given.requests]
        callers = (load(api, model, ends, left, seen) for _ in range(given.concurrency))
        await asyncio.gather(look(status, ends, seen), *callers)
        after = (await status.get("/status")).json()
    return before, seen, after


def checks(before: dict[str, Any], seen: Seen, after: dict[str, Any]) -> list[tuple[bool, str]]:
    """Return (whether it is so, what) of each thing to prove."""
    phases = Counter(state["phase"] for state in seen.states)
    waiting = seen.serving("requests_waiting")
    saturated = sum(number > 0 for number in waiting) / max(len(waiting), 1)
    failed = {what: number for what, number in seen.outcomes.items() if what.startswith("failed")}

    def unchanged(what: str, *path: str) -> tuple[bool, str]:
        def value(state: Any) -> Any:
            for key in path:
                state = state[key]
            return state

        values = sorted({str(value(state)) for state in (before, *seen.states, after)})
        return len(values) == 1, f"{what}: {', '.join(values)}"

    return [
        unchanged("one engine process throughout", "engine", "pid"),
        unchanged("engine starts", "engine", "starts"),
        unchanged("hangs declared", "hangs"),
        unchanged("failures", "failures"),
        (after["phase"] == "ready", f"the phase at the end is {after['phase']} ({dict(phases)} in all)"),
        (seen.unanswered == 0, f"looks at /status without an answer: {seen.unanswered}"),
        (not failed, f"requests that failed: {failed or 'none'}"),
        (seen.outcomes["answered"] > 0, f"requests answered: {seen.outcomes['answered']}"),
        (saturated > 0.8, f"requests waited for a place in {saturated:.0%} of {len(waiting)} looks: saturated"),
    ]


def main() -> int:
    given = arguments()
    began = time.monotonic()
    before, seen, after = asyncio.run(saturate(given))
    minutes = (time.monotonic() - began) / 60
    tenths = quantiles(seen.seconds, n=10) if len(seen.seconds) > 1 else [0.0] * 9
    running, waiting = seen.serving("requests_running"), seen.serving("requests_waiting")
    print(f"{minutes:.1f} minutes, {given.concurrency} at a time: {dict(seen.outcomes)}")
    print(f"{seen.prompt_tokens} prompt tokens, {seen.answer_tokens} answer tokens; seconds to an answer: "
          f"median {tenths[4]:.1f}, nine of ten below {tenths[8]:.1f}")  # fmt: skip
    print(f"running {max(running, default=0):.0f} and waiting {max(waiting, default=0):.0f} at most; "
          f"KV cache {max(seen.serving('kv_cache_usage'), default=0):.0%} at most")  # fmt: skip
    results = checks(before, seen, after)
    for good, what in results:
        print(f"{'passed' if good else 'FAILED'}  {what}")
    passed = sum(good for good, _ in results)
    print(f"{passed} passed" + (f", {len(results) - passed} failed" if passed < len(results) else ""))
    return 0 if passed == len(results) else 1


if __name__ == "__main__":
    sys.exit(main())
