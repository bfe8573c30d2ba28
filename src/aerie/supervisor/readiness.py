"""Watches one engine from its first answer on: when it is ready, what it serves, and whether it died or hangs.

Ready is `/health`, the served name, and one real completion with the drafter drafting. What happens afterwards is the
judge's to say (`aerie.supervisor.liveness`); here is what it is shown, and who asks.
"""

import asyncio
import contextlib
import json
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any

import aiohttp

from aerie.auth import read_keys
from aerie.engine_metrics import EngineMetrics, Speculation, read_metrics
from aerie.startup.activity import Activity
from aerie.supervisor import gpus
from aerie.supervisor.arguments import EngineArguments
from aerie.supervisor.liveness import Dead, Hung, Judge, Observation
from aerie.supervisor.processes import Look, first
from aerie.supervisor.sampling import sample
from aerie.supervisor.state import Answered, Event, Refused, Served
from aerie.supervisor.tree import waits_in

# Seconds.
_FIRST_POLLS = 0.5  # between two looks at a port that does not listen yet
_POLL = 2.0  # between two looks at /health, so that a dead engine shows within 5 s
_LATE = 4.0  # until an answer counts as late
_SILENT = 60.0  # of late answers until requests should go elsewhere; lateness alone restarts nothing
_LET_GO = 30.0  # that a dead engine's API server gets to end by itself
_LOOK_AGAIN = 10.0  # between two readiness checks that fail, and between two tellings of what is being served
_OBSERVE = 4.0  # between two looks at the figures and the processes
_SEEN_WITHIN = 4.0  # or a driver does not answer; with _OBSERVE less than the time that one look may stand for
_COUNTED_WITHIN = 5.0  # until the counters must show the drafts of a completion that has ended

_QUOTED = 200  # characters of a refusal that the reason quotes
_COMPLETION = {"prompt": "Are you ready?", "max_tokens": 16, "temperature": 0, "ignore_eos": True}
# One step, of as many tokens as cost no more than one does, and the same in every tokenizer. See `Judge.grace`.
_SIGN_OF_LIFE = {"prompt": list(range(100, 164)), "max_tokens": 1, "temperature": 0}
_RANK = "X-data-parallel-rank"  # vllm/entrypoints/generate/base/serving.py
_PATIENTLY = None  # a first completion may compile kernels for minutes; the judge counts


class _NotReadyError(Exception):
    """The engine answers and fails the readiness check, for the reason in the message."""


async def watch(
    arguments: EngineArguments,
    keys_file: Path,
    stall_timeout: float,
    api_server: int,
    dispatch: Callable[[Event], None],
) -> Dead | Hung:
    """Follow the engine whose first process is `api_server`, until cancelled or until it can only be ended.

    An answer that is late proves nothing and ends nothing, but for an engine that has not served yet: after
    `stall_timeout` seconds of silence its start has failed.
    """
    # A kept connection that the server just closed would look like a dead engine. An engine's certificate names the
    # host's public name, if anything, and we ask on the host itself.
    connector = aiohttp.TCPConnector(force_close=True, ssl=False)
    # Without aiohttp's own limits, which now and then swallow a cancellation that comes at their very moment.
    unlimited = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(arguments.url, connector=connector, timeout=unlimited) as session:
        api = _Api(session, arguments.served_name, keys_file)
        watch = _Watch(api, arguments.step_tokens, Judge(api_server, stall_timeout), api_server, dispatch)
        try:
            return await watch.run()
        finally:
            watch.let_go()


@dataclass(frozen=True)
class _Checked:
    """An engine that passed the readiness check."""

    speculation: Speculation | None
    longest_prompt: int
    answered: "_Answered"


@dataclass(frozen=True)
class _Answered:
    """An engine that answered a completion of `tokens` after `seconds`."""

    tokens: int
    seconds: float


class _Watch:
    def __init__(
        self,
        api: "_Api",
        step_tokens: int | None,
        judge: Judge,
        api_server: int,
        dispatch: Callable[[Event], None],
    ) -> None:
        self._api = api
        self._step_tokens = step_tokens
        self._dispatch = dispatch
        self._judge = judge
        self._listening = self._serving = False
        self._request: asyncio.Task[_Checked | _Answered] | None = None
        self._asked = ""
        self._look = Look(_look_at, api_server)
        self._seen = (Activity(), False)
        self._late = False
        self._answered_at = time.monotonic()
        self._down_since: float | None = None
        self._next_check = 0.0
        self._next_look = 0.0
        self._told: tuple[float, EngineMetrics] | None = None

    async def run(self) -> Dead | Hung:
        while True:
            if dead := await self._ask_health():
                return dead
            if self._api.was_well and self._down_since is None:
                self._take_answer()
                if hung := await self._observe():
                    self._refuse(hung.reason)
                    return hung
                self._ask()
            await self._pause(_POLL if self._api.was_well else _FIRST_POLLS)

    async def _pause(self, seconds: float) -> None:
        """Wait, but not longer than for a completion of our own."""
        if self._request:
            await first(self._request, timeout=seconds)
        else:
            await asyncio.sleep(seconds)

    async def _ask_health(self) -> Dead | None:
        self._late = False
        try:
            failure = await self._api.health_failure()
        except TimeoutError:
            self._listens()
            self._late, self._down_since = True, None  # whatever was before, a late answer is no proof
            silence = time.monotonic() - self._answered_at
            if self._serving and silence > _SILENT:
                self._refuse(f"no answer from /health for {silence:.0f} s: busy or hung, and not restarted for it")
            return None
        self._answered_at = time.monotonic()
        if failure is None:
            self._listens()
            self._down_since = None
        elif self._api.was_well:  # until then a closed port is how every start looks
            self._down_since = self._down_since or self._answered_at
            self.let_go()
            self._refuse(failure)
            if self._answered_at - self._down_since >= _LET_GO:
                return Dead(failure)
        return None

    def _listens(self) -> None:
        """Say so at once: from here on requests may come, and with them words that are not for everybody."""
        if not self._listening:
            self._listening = True
            self._dispatch(Answered())

    def let_go(self) -> None:
        """Wait no longer for a completion that is under way."""
        if self._request:
            self._request.cancel()
            self._request = None

    def _refuse(self, reason: str) -> None:
        self._serving, self._next_check = False, 0.0
        self._dispatch(Refused(reason))

    def _ask(self) -> None:
        """Begin a completion of our own if it is time for one and none is under way."""
        if self._request or self._late:
            return
        if not self._serving and time.monotonic() >= self._next_check:
            self._asked = self._judge.engines[0]
            self._request = asyncio.create_task(self._api.check(self._rank()))
        elif (engine := self._judge.to_ask) is not None:
            self._asked = engine
            self._request = asyncio.create_task(self._api.sign_of_life(self._rank()))

    def _rank(self) -> str | None:
        """Return the engine that is asked, where there are several."""
        return self._asked if len(self._judge.engines) > 1 else None

    def _take_answer(self) -> None:
        """Take in what came of a completion of our own that has ended."""
        if self._request is None or not self._request.done():
            return
        request, asked, self._request = self._request, self._asked, None
        try:
            answer = request.result()
        except TimeoutError:
            pass  # late is not wrong; the next check asks again
        except _NotReadyError as error:
            self._refuse(str(error))
        except (LookupError, TypeError, ValueError) as error:
            self._refuse(f"an answer was not in the form of OpenAI's API: {error!r}")
        else:
            if isinstance(answer, _Answered):
                self._judge.answered(asked, answer.tokens, answer.seconds)
                return
            self._judge.answered(asked, answer.answered.tokens, answer.answered.seconds)
            self._judge.served(self._step_tokens or answer.longest_prompt)
            self._serving = True
            self._dispatch(Served(answer.speculation))
            return
        self._next_check = time.monotonic() + _LOOK_AGAIN

    async def _observe(self) -> Hung | None:
        if time.monotonic() < self._next_look:
            return None
        asked = self._asked if self._request else None
        metrics, seen = await asyncio.gather(self._metrics(), self._look.take(_SEEN_WITHIN))
        # A driver that does not answer any more leaves us with what was seen last: processes that do not move.
        self._seen = seen or self._seen
        self._next_look = time.monotonic() + _OBSERVE
        if metrics:
            self._tell(metrics)
        self._judge.saw(Observation(time.time(), metrics, self._seen[0], asked, self._seen[1]))
        return self._judge.verdict(waits_in)

    async def _metrics(self) -> EngineMetrics | None:
        with contextlib.suppress(TimeoutError, ValueError, _NotReadyError):
            return await self._api.metrics()
        return None

    def _tell(self, metrics: EngineMetrics) -> None:
        now = time.monotonic()
        then, before = self._told or (now, metrics)
        if self._told is None or now - then >= _LOOK_AGAIN:
            self._told = now, metrics
            if self._serving and now > then:
                self._dispatch(Served(metrics.speculation, metrics.serving_since(before, now - then)))


def _look_at(api_server: int) -> tuple[Activity, bool]:
    return sample(api_server), any(gpus.busy_percent())


class _Api:
    """The engine's API, asked with the first key of the key file."""

    def __init__(self, session: aiohttp.ClientSession, served_name: str, keys_file: Path) -> None:
        self.was_well = False
        self._session = session
        self._served_name = served_name
        self._keys_file = keys_file

    async def health_failure(self) -> str | None:
        """Return what is wrong with `/health`, None for nothing; raises TimeoutError where the answer is late."""
        try:
            async with asyncio.timeout(_LATE), self._session.get("/health") as response:
                self.was_well |= response.status == HTTPStatus.OK
                return None if response.status == HTTPStatus.OK else f"/health answered {response.status}"
        except TimeoutError:
            raise
        except aiohttp.ClientConnectorError as error:
            return f"/health cannot be reached: {error.os_error.strerror or error}"
        except (aiohttp.ClientError, ValueError) as error:  # a ValueError for a host's name that cannot be one
            return f"/health cannot be reached: {error}"

    async def metrics(self) -> EngineMetrics:
        """Return the engine's own figures; raises TimeoutError and _NotReadyError."""
        return read_metrics(await self._ask("GET", "/metrics", _LATE))

    async def check(self, rank: str | None) -> _Checked:
        """Get one completion and return the counters after it; raises _NotReadyError with what was amiss."""
        models = json.loads(await self._ask("GET", "/v1/models", _PATIENTLY))["data"]
        model = next((model for model in models if model["id"] == self._served_name), None)
        if model is None:
            names = ", ".join(model["id"] for model in models)
            raise _NotReadyError(f"/v1/models offers {names}, and not {self._served_name}")
        before = (await self.metrics()).speculation
        await self._complete(_COMPLETION, rank)
        after = await self._drafted_since(before) if before else None
        return _Checked(after, int(model.get("max_model_len") or 0), await self.sign_of_life(rank))

    async def sign_of_life(self, rank: str | None) -> _Answered:
        """Get one token, of the engine with that number if one is given; return what it took. Raises _NotReadyError."""
        began = time.monotonic()
        # A prompt that the prefix cache knows would be no measure.
        tokens = await self._complete(_SIGN_OF_LIFE | {"cache_salt": uuid.uuid4().hex}, rank)
        return _Answered(tokens, time.monotonic() - began)

    async def _complete(self, request: dict[str, Any], rank: str | None) -> int:
        """Return the number of the prompt's tokens."""
        body = {"model": self._served_name, **request}
        usage = json.loads(await self._ask("POST", "/v1/completions", _PATIENTLY, body, rank))["usage"]
        if not usage["completion_tokens"]:
            raise _NotReadyError("a completion came back without a token")
        return int(usage["prompt_tokens"])

    async def _drafted_since(self, before: Speculation) -> Speculation:
        deadline = time.monotonic() + _COUNTED_WITHIN
        while (after := (await self.metrics()).speculation) is None or after.drafts <= before.drafts:
            if time.monotonic() > deadline:
                raise _NotReadyError("speculation is on, and the drafter drafted nothing in a completion")
            await asyncio.sleep(_FIRST_POLLS)
        return after

    def _key(self) -> str:
        try:
            return read_keys(self._keys_file)[0]
        except (OSError, ValueError, IndexError) as error:
            raise _NotReadyError(f"no key to ask with in {self._keys_file}: {error}") from None

    async def _ask(
        self, method: str, path: str, limit: float | None, body: dict[str, Any] | None = None, rank: str | None = None
    ) -> str:
        headers = {"Authorization": f"Bearer {self._key()}"} | ({_RANK: rank} if rank else {})
        try:
            async with (
                asyncio.timeout(limit),
                self._session.request(method, path, json=body, headers=headers) as response,
            ):
                text = await response.text()
        except TimeoutError:
            raise
        except aiohttp.ClientError as error:
            raise _NotReadyError(f"{path} cannot be reached: {error}") from None
        if response.status != HTTPStatus.OK:
            raise _NotReadyError(f"{path} answered {response.status}: {text[:_QUOTED]}")
        return text
