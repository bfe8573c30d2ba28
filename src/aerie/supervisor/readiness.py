"""Asks the engine whether it can be used: `/health`, the served name, one real completion with the drafter drafting."""

import asyncio
import contextlib
import json
import time
from collections.abc import Callable
from http import HTTPStatus
from pathlib import Path
from typing import Any

import aiohttp

from aerie.auth import read_keys
from aerie.speculation import Speculation, read_counters
from aerie.supervisor.arguments import EngineArguments
from aerie.supervisor.state import Answered, Event, Refused, Served

# Seconds.
_FIRST_POLLS = 0.5  # between two looks at a port that does not listen yet
_POLL = 2.0  # between two looks at /health, so that a dead engine shows within 5 s
_LATE = 4.0  # until an answer counts as late
_SILENT = 60.0  # of late answers until requests should go elsewhere; a busy engine is never restarted for them
_LET_GO = 30.0  # that a dead engine's API server gets to end by itself
_LOOK_AGAIN = 10.0  # between two readiness checks that fail, and between two readings of the counters
_COUNTED_WITHIN = 5.0  # until the counters must show the drafts of a completion that has ended

_QUOTED = 200  # characters of a refusal that the reason quotes
_COMPLETION = {"prompt": "Are you ready?", "max_tokens": 16, "temperature": 0, "ignore_eos": True}
_PROMPT = aiohttp.ClientTimeout(total=_LATE)
_PATIENT = aiohttp.ClientTimeout(total=None)  # a first completion may compile kernels for minutes


class _NotReadyError(Exception):
    """The engine answers and fails the readiness check, for the reason in the message."""


async def watch(arguments: EngineArguments, keys_file: Path, dispatch: Callable[[Event], None]) -> None:
    """Follow one engine's health until cancelled.

    Returns when the engine is known to be dead and its API server stays; never because an answer is late.
    """
    # A kept connection that the server just closed would look like a dead engine. An engine's certificate names the
    # host's public name, if anything, and we ask on the host itself.
    connector = aiohttp.TCPConnector(force_close=True, ssl=False)
    async with aiohttp.ClientSession(arguments.url, connector=connector, timeout=_PROMPT) as session:
        api = _Api(session, arguments.served_name, keys_file)
        await _follow(api, dispatch)


async def _follow(api: "_Api", dispatch: Callable[[Event], None]) -> None:
    serving = False
    next_look = 0.0
    answered_at = time.monotonic()
    down_since: float | None = None
    while down_since is None or time.monotonic() - down_since < _LET_GO:
        try:
            failure = await api.health_failure()
        except TimeoutError:
            down_since = None  # whatever was before, a late answer is no proof
            silence = time.monotonic() - answered_at
            if serving and silence > _SILENT:
                serving, next_look = False, 0.0
                dispatch(Refused(f"no answer from /health for {silence:.0f} s: busy or hung, and not restarted for it"))
        else:
            answered_at = time.monotonic()
            if failure is None:
                down_since = None
                if answered_at >= next_look:
                    serving = await (_count(api, dispatch) if serving else _check(api, dispatch))
                    next_look = time.monotonic() + _LOOK_AGAIN
            elif api.was_well:  # until then a closed port is how every start looks
                serving, next_look = False, 0.0
                down_since = down_since or answered_at
                dispatch(Refused(failure))
        await asyncio.sleep(_POLL if api.was_well else _FIRST_POLLS)


async def _check(api: "_Api", dispatch: Callable[[Event], None]) -> bool:
    dispatch(Answered())
    try:
        speculation = await api.complete_once()
    except TimeoutError:
        return False  # late is not wrong; the next look asks again
    except _NotReadyError as error:
        dispatch(Refused(str(error)))
        return False
    except (LookupError, TypeError, ValueError) as error:
        dispatch(Refused(f"an answer was not in the form of OpenAI's API: {error!r}"))
        return False
    dispatch(Served(speculation))
    return True


async def _count(api: "_Api", dispatch: Callable[[Event], None]) -> bool:
    with contextlib.suppress(TimeoutError, ValueError, _NotReadyError):  # the counters can wait; /health decides
        dispatch(Served(await api.counters()))
    return True


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
            async with self._session.get("/health") as response:
                self.was_well |= response.status == HTTPStatus.OK
                return None if response.status == HTTPStatus.OK else f"/health answered {response.status}"
        except TimeoutError:
            raise
        except aiohttp.ClientConnectorError as error:
            return f"/health cannot be reached: {error.os_error.strerror or error}"
        except aiohttp.ClientError as error:
            return f"/health cannot be reached: {error}"

    async def counters(self) -> Speculation | None:
        """Return the counters of speculation, None where the engine has none."""
        return read_counters(await self._ask("GET", "/metrics"))

    async def complete_once(self) -> Speculation | None:
        """Get one completion and return the counters after it; raises _NotReadyError with what was amiss."""
        models = json.loads(await self._ask("GET", "/v1/models", patience=_PATIENT))
        names = [model["id"] for model in models["data"]]
        if self._served_name not in names:
            raise _NotReadyError(f"/v1/models offers {', '.join(names)}, and not {self._served_name}")
        before = await self.counters()
        request = {"model": self._served_name, **_COMPLETION}
        answer = json.loads(await self._ask("POST", "/v1/completions", patience=_PATIENT, body=request))
        if not answer["usage"]["completion_tokens"]:
            raise _NotReadyError("a completion came back without a token")
        if before is None:
            return None
        deadline = time.monotonic() + _COUNTED_WITHIN
        while (after := await self.counters()) is None or after.drafts <= before.drafts:
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
        self, method: str, path: str, patience: aiohttp.ClientTimeout = _PROMPT, body: dict[str, Any] | None = None
    ) -> str:
        headers = {"Authorization": f"Bearer {self._key()}"}
        try:
            async with self._session.request(method, path, json=body, headers=headers, timeout=patience) as response:
                text = await response.text()
        except TimeoutError:
            raise
        except aiohttp.ClientError as error:
            raise _NotReadyError(f"{path} cannot be reached: {error}") from None
        if response.status != HTTPStatus.OK:
            raise _NotReadyError(f"{path} answered {response.status}: {text[:_QUOTED]}")
        return text
