"""The real status port with a state that a test changes, on a thread, for clients that wait."""

from __future__ import annotations

import asyncio
import threading
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Self

from aerie.status import serve_status

if TYPE_CHECKING:
    from aiohttp import web


class StatusPort(AbstractContextManager["StatusPort"]):
    """Serves `state` on loopback from `start()` to `stop()`; the port stays the same if it is started again."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state
        self.port = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    def __enter__(self) -> Self:
        self._thread.start()
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def start(self) -> None:
        self._runner = self._do(serve_status("127.0.0.1", self.port, lambda: self.state))
        self.port = self._runner.addresses[0][1]

    def stop(self) -> None:
        if self._runner:
            self._do(self._runner.cleanup())
            self._runner = None

    def _do(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout=20)
