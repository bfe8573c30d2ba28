"""The weights are read into the page cache while the engine starts, in a process of its own that may hang.

vLLM imports for half a minute before it reads its first tensor, and then reads one page fault after another: meanwhile
the disk reads ahead. The process is not below the engine, so what it reads does not count as the engine's progress; and
where a disk does not answer and it cannot be killed, nobody waits for it.
"""

import asyncio
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import IO, Any

from aerie.cache import warm
from aerie.engine_arguments import read_arguments
from aerie.supervisor.processes import Reaper
from aerie.supervisor.revisions import Revision

_log = logging.getLogger("aerie")
_WORTH_IT = 10**9
"""Bytes from which on it is: less is loaded before a process has started."""
_READS_PAGES = frozenset({"", "auto", "hf", "safetensors"})
"""Values of load-format that read safetensors through the page cache by a CPU's copy; the others read by themselves."""


class Warming:
    """One start's reading ahead."""

    def __init__(self, reaper: Reaper, tell: Callable[[Mapping[str, Any] | None], None]) -> None:
        """`tell` gets how far it is, in the form of the state's `warming`."""
        self._reaper = reaper
        self._tell = tell
        self._process: subprocess.Popen[bytes] | None = None
        self._ended: asyncio.Future[int] | None = None
        self._reading: asyncio.Task[None] | None = None

    @property
    def pids(self) -> frozenset[int]:
        """Of what still runs: no part of the engine."""
        alive = self._process and self._ended and not self._ended.done()
        return frozenset({self._process.pid}) if self._process and alive else frozenset()

    def start(self, words: Sequence[str], revisions: Sequence[Revision], *, has_gpus: bool) -> None:
        """Begin, where it makes sense for an engine with these arguments; say why not where it could have been."""
        self._tell(None)
        total = sum(each.weights for each in revisions)
        if total < _WORTH_IT:
            return
        if why := not_for(words):
            _log.info("the weights are not read ahead: %s", why)
            return
        # On a CPU the engine keeps the weights in memory itself, beside the pages that it has them from.
        engine = 0 if has_gpus else total
        directories = [str(each.directory) for each in revisions]
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", warm.__name__, str(engine), *directories],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                start_new_session=True,  # a terminal's Ctrl-C reaches it through us only
            )
        except OSError as error:
            _log.warning("the weights are not read ahead: %s", error.strerror)
            return
        self._ended = self._reaper.status_of(self._process)
        self._reading = asyncio.create_task(self._read(self._process.stdout))

    def stop(self) -> None:
        """End it without waiting for it: the engine is ready, or gone."""
        if self._reading:
            self._reading.cancel()
        if pids := self.pids:
            self._tell(None)
            with suppress(ProcessLookupError):
                os.kill(min(pids), signal.SIGKILL)

    async def _read(self, output: IO[bytes] | None) -> None:
        if output is None:
            return
        reader = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), output
        )
        try:
            async for line in reader:
                self._take(line)
        finally:
            transport.close()

    def _take(self, line: bytes) -> None:
        try:
            said = json.loads(line)
        except ValueError:
            return
        if "state" in said:
            _log.info("the page cache: %s", said["text"])
        self._tell({"state": "reading"} | said)


def not_for(words: Sequence[str]) -> str | None:
    """Return why an engine with these arguments gains nothing by it; None where it does."""
    given = str(read_arguments(words).get("load-format") or "").lower()
    return None if given in _READS_PAGES else f"load-format {given} reads them by itself"
