"""One engine, from its start until nothing of it moves any more: watched, ended where it must be, and diagnosed."""

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

from aerie import patches
from aerie.auth import KEYS_FILE_VARIABLE, ApiKeyMiddleware
from aerie.diagnosis import Diagnosis, Evidence, Kind, relevant
from aerie.startup.history import History
from aerie.startup.start import StartReader
from aerie.supervisor import arguments, evidence, readiness, sampling
from aerie.supervisor.json_file import JsonFile
from aerie.supervisor.liveness import Dead, Hung
from aerie.supervisor.output import Output
from aerie.supervisor.processes import Engine, Look, Reaper, first, kill_below, vital_death
from aerie.supervisor.state import Answered, Event, Exit, Progressed, Refused, Served, Started
from aerie.supervisor.tree import Vital

_log = logging.getLogger("aerie")

# vLLM's own deadlines in seconds, unless they are given: a clock must not end what still makes progress.
_DEADLINES = {
    "VLLM_ENGINE_READY_TIMEOUT_S": "86400",  # 600 s by default, and a 595 GB checkpoint from a disk takes longer
    "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "1800",  # 300 s by default for one step; a hang is found by the judge before
}

# Seconds.
_TEARDOWN = 10  # that an engine gets after it has drained, to end by itself
_LOADING_GRACE = 5.0  # that an engine gets which has nothing to drain
_KILLED_WITHIN = 0.2  # that the diagnosis waits for what was killed, and can say nothing more
_LOOKED_AGAIN = 0.5  # in which a process that died has been seen
_LAST_OUTPUT = 5.0  # that a stuck reader of our stdout may delay what follows an engine's end
_LAST_OUTPUT_OF_SURVIVORS = 0.1  # who still hold the pipe
_SAMPLED_EVERY = 1.0
_SAMPLED_WITHIN = 5.0  # or the driver does not answer, and nothing is seen to move

_FATAL = "vllm serve reported a fatal error"

_Seen = str | Vital | Dead | Hung
"""What a watcher saw of an engine that has to go; text is the engine's own."""

# Sent by persons and machines; what a process does to itself (SIGSEGV, SIGABRT, SIGBUS) is a crash.
_SENT = frozenset({"SIGKILL", "SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT"})


@dataclass(frozen=True)
class Ending:
    """How an engine came to its end."""

    words: str
    """In one line."""
    status: int | None
    """`os.waitstatus_to_exitcode` of its first process; None where the supervisor ended it."""
    kind: Kind | None = None
    """HUNG, or KILLED where a process died that may have said why."""
    evidence: tuple[str, ...] = ()
    """What shows that it hung."""
    asked: bool = False
    """By a person or by Docker: then there is nothing to diagnose."""


@dataclass
class StopSignals:
    """What was asked of the service: to stop, and then not to wait."""

    stop: asyncio.Event
    kill: asyncio.Event


class EngineRun:
    """One engine, and what its output, its health and its processes tell of it."""

    def __init__(
        self,
        engine: arguments.EngineArguments,
        keys_file: Path,
        drain_timeout: int,
        stall_timeout: float,
        history: JsonFile,
        dispatch: Callable[[Event], None],
        gpus: Sequence[str] = (),
        apart: Callable[[], Collection[int]] = tuple,
    ) -> None:
        """`gpus` are the PCI addresses of those that it may use; () where that is not known.

        `apart` tells the processes below the supervisor that are no part of the engine.
        """
        self._engine = engine
        self._keys_file = keys_file
        self._drain_timeout = drain_timeout
        self._stall_timeout = stall_timeout
        self._history = history
        self._dispatch_to = dispatch
        self._apart = apart
        self._devices = evidence.with_ports_above(gpus)
        self._answered = self.served = False
        self._began = time.time()
        self.output = Output(StartReader(self._began, History.from_json(history.read()), stall_timeout))
        self._cgroup = evidence.MemoryCgroup()
        self._oom_kills = self._cgroup.oom_kills()

    @property
    def listened(self) -> bool:
        """Whether anybody could have sent it a request: then what it says may quote one."""
        return self._answered or self.output.open

    async def until_it_ends(
        self, given: list[str], reaper: Reaper, signals: StopSignals, variables: Mapping[str, str] | None = None
    ) -> Ending:
        """Start `vllm serve` with what it was given, and return when its first process is gone or has to go.

        `variables` are those of its environment that are not the supervisor's own, too.
        Raises OSError where it cannot be started.
        """
        process = await Engine.start(self._command(given), self._environment(variables or {}), reaper, self._on_output)
        self._process = process
        self._dispatch(Started(process.pid))
        self._progress()
        _log.info("%s", patches.summary())
        async with asyncio.TaskGroup() as tasks:
            vital = tasks.create_task(vital_death(os.getpid()))
            watchers = [vital, *(tasks.create_task(watcher) for watcher in self._watchers(process.pid))]
            stop, kill = (tasks.create_task(event.wait()) for event in (signals.stop, signals.kill))
            await first(process.ended, stop, *watchers)
            if stop.done():
                ending = await self._stopped(process, kill)
            elif process.ended.done():
                ending = _exited(process.ended.result())
            else:
                ending = _ending(next(watcher for watcher in watchers if watcher.done()).result())
            if not ending.asked:
                self._dispatch(Refused(ending.words))
                await self.output.settled(process.copied)
            if ending.words == _FATAL:  # said of one who was killed, before we looked at it again
                await first(vital, timeout=_LOOKED_AGAIN)
            if ending.words == _FATAL and vital.done():
                ending = _ending(vital.result())
            elif ending.words == _FATAL and process.ended.done():  # it has not waited for us
                ending = _exited(process.ended.result())
            for task in (stop, kill, *watchers):
                task.cancel()
        return ending

    async def ended(self) -> None:
        """Kill what is left and pass on its last words; what does not die at once is left to others."""
        survivors = await kill_below(os.getpid(), _KILLED_WITHIN, self._apart())
        with contextlib.suppress(TimeoutError):
            limit = _LAST_OUTPUT_OF_SURVIVORS if survivors else _LAST_OUTPUT
            await asyncio.wait_for(self._process.copied.wait(), limit)
        self.output.end()
        self._progress()

    def diagnose(self, ending: Ending, further: Sequence[Evidence] = ()) -> Diagnosis:
        """Say why it ended: unasked, so it failed. vLLM 0.32.0 ends with status 0, too, when its core was killed."""
        at = time.time()
        told = evidence.outside(self._oom_kills, at, self._cgroup)
        seen = relevant(told, at, self._devices, since=self._began)
        shown = (ending.words, *ending.evidence) if ending.kind is Kind.HUNG else ()
        hangs = [Evidence("supervisor", at, text, kind=Kind.HUNG) for text in shown]
        found = self.output.collector.diagnose(ending.words, [*seen, *hangs, *further], ending.kind)
        return cast("Diagnosis", found)  # it is None only where no words are given

    def _command(self, given: list[str]) -> list[str]:
        middleware = f"{ApiKeyMiddleware.__module__}.{ApiKeyMiddleware.__qualname__}"
        drain = arguments.draining(self._engine, self._drain_timeout)
        return ["vllm", "serve", *given, *drain, "--middleware", middleware]

    def _environment(self, variables: Mapping[str, str]) -> dict[str, str]:
        environment = {**_DEADLINES, **os.environ, **variables}
        environment[KEYS_FILE_VARIABLE] = str(self._keys_file)
        return environment

    def _watchers(self, pid: int) -> list[Coroutine[Any, Any, _Seen]]:
        """Return what sees an engine that has to go, each in its own way; none of them ends for another reason."""
        return [
            readiness.watch(self._engine, self._keys_file, self._stall_timeout, pid, self._dispatch),
            self._last_words(),
            self._stall(pid),
        ]

    def _on_output(self, data: bytes) -> None:
        self.output.feed(data)
        if not self.served:
            self._progress()

    def _dispatch(self, event: Event) -> None:
        match event:
            case Answered():
                self._answered = True
                self.output.start.answered(time.time())
            case Served() if not self.served:
                self.served = True
                self.output.start.ready(time.time())
                self._progress()
                start = self.output.start.view(time.time())
                self._history.write(History.from_json(self._history.read()).record(start).to_json())
        self._dispatch_to(event)

    def _progress(self) -> None:
        self._dispatch_to(Progressed(self.output.progress(), self.output.last_line))

    async def _last_words(self) -> str:
        await self.output.dying.wait()
        return _FATAL

    async def _stall(self, pid: int) -> Hung:
        """Return once nothing has moved for too long before the engine answers: from there on, readiness' judge counts.

        An engine that answers and fails the check is no stall, and loading it again would not mend it.
        """
        look = Look(sampling.sample, pid)
        while not self.served:
            if activity := await look.take(_SAMPLED_WITHIN):
                self.output.start.observe(activity, time.time())
            self._progress()
            start = self.output.start.view(time.time())
            if start.stalled and not self._answered:
                silence = f"nothing moved for {start.silent_seconds:.0f} s"
                where = start.waiting_for and f"waiting for {start.waiting_for}"
                return Hung(f"the start has stalled: {silence} while {start.phase}", (where,) if where else ())
            await asyncio.sleep(_SAMPLED_EVERY)
        for_ever: asyncio.Future[Hung] = asyncio.get_running_loop().create_future()
        return await for_ever  # what hangs from here on is readiness' to tell

    async def _stopped(self, process: Engine, kill: asyncio.Task[Any]) -> Ending:
        process.terminate()
        limit = self._drain_timeout + _TEARDOWN if self.listened else _LOADING_GRACE
        await first(process.ended, kill, timeout=limit)
        status = process.ended.result() if process.ended.done() else None
        return Ending("a stop was asked for", status, asked=True)


def _exited(status: int) -> Ending:
    """Return the ending of an engine whose first process has ended by itself, or by a signal that was not ours."""
    exited = Exit.of(status, datetime.now(UTC))
    return Ending(str(exited), status, Kind.KILLED if exited.signal in _SENT else None)


def _ending(seen: _Seen) -> Ending:
    """Return the ending of an engine that its watchers gave up."""
    match seen:
        case Hung(reason, evidence):
            return Ending(reason, None, Kind.HUNG, evidence)
        case Dead(reason):
            return Ending(f"the engine is dead, and its API server stays: {reason}", None)
        case Vital():
            return Ending(f"{seen.title} (pid {seen.pid}) died", None, Kind.KILLED)
        case _:
            return Ending(seen, None)
