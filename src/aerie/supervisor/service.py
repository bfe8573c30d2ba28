"""`aerie serve`: one event loop around the engine, its state and its status page."""

import asyncio
import errno
import logging
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from logging.handlers import QueueHandler, QueueListener
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import aerie
from aerie import patches
from aerie.cache.loader import explain
from aerie.diagnosis import Diagnosis, Evidence
from aerie.engine_arguments import ConfigurationError
from aerie.rehearsal.static.hardware import identity
from aerie.status import serve_status
from aerie.supervisor import arguments, crash, gpus, revisions
from aerie.supervisor.caches import Caches, keys
from aerie.supervisor.json_file import JsonFile
from aerie.supervisor.prctl import adopt_orphans
from aerie.supervisor.processes import Reaper, first, off_loop
from aerie.supervisor.release import held_back
from aerie.supervisor.retry import RETRY, STATE_FILE
from aerie.supervisor.run import EngineRun, StopSignals
from aerie.supervisor.state import (
    USAGE_ERROR,
    Ended,
    Event,
    Held,
    Phase,
    RetryAsked,
    Served,
    State,
    StopAsked,
    Stopped,
    Warmed,
    reduce,
    resume,
    to_json,
)
from aerie.supervisor.warming import Warming

_log = logging.getLogger("aerie")
_report = logging.getLogger("aerie.report")  # printed without our name before it

_HISTORY_FILE = "starts.json"
_NOT_INSTALLED = frozenset({errno.ENOENT, errno.EACCES, errno.ENOEXEC})
# Seconds.
_PUBLISH_EVERY = 0.25  # at least, between two writings of the state file
_GPUS_ANSWER_WITHIN = 60.0  # the first time, which may wake each of them up
_STOPS_ANYWAY = 3.0  # after which a process that SIGKILL does not end keeps us no longer from stopping


@dataclass(frozen=True)
class Options:
    """What `aerie serve` was told; the timeouts in seconds."""

    engine_arguments: list[str]
    once: bool
    state_dir: Path
    cache_dir: Path
    status_host: str
    status_port: int
    keys_file: Path
    drain_timeout: int
    stall_timeout: float
    warm: bool = True


def serve(options: Options) -> int:
    """Run the service until it is told to stop and return the exit code."""
    listener = _log_to_stderr()
    try:
        return asyncio.run(_Service(options).run())
    finally:
        listener.stop()


@dataclass(frozen=True)
class _Gpus:
    """The GPUs before an engine has them: bytes in use and PCI addresses, () where they cannot be asked."""

    used: tuple[int, ...] = ()
    addresses: tuple[str, ...] = ()

    @classmethod
    def now(cls) -> "_Gpus":
        # The addresses, too: a GPU that has failed may not be asked any more.
        return cls(gpus.used_bytes(), gpus.pci_addresses())


class _Service:
    def __init__(self, options: Options) -> None:
        self._options = options
        self._state_file = JsonFile(options.state_dir / STATE_FILE, "the back-off will not outlast a restart")
        self._history = JsonFile(options.cache_dir / _HISTORY_FILE, "no start will tell how long it is going to take")
        self._state = resume(self._state_file.read(), State(since=_now()))
        self._versions = {"aerie": aerie.__version__, "vllm": patches.vllm_version()}
        self._gpus = _Gpus()
        self._held = revisions.Holding()
        self._warmings: list[Warming] = []
        self._caches = Caches(options.cache_dir, os.environ)
        self._proving: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._retry = asyncio.Event()
        self._signals = StopSignals(asyncio.Event(), asyncio.Event())

    async def run(self) -> int:
        adopt_orphans()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop, signal.Signals(number).name)
        loop.add_signal_handler(RETRY, self._try_again)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGINT})  # which the command had blocked
        self._reaper = Reaper()
        host, port = self._options.status_host, self._options.status_port
        try:
            status = await serve_status(host, port, self.snapshot)
        except (OSError, UnicodeError) as error:  # a UnicodeError for a host's name that cannot be one
            why = getattr(error, "strerror", None) or error
            _log.error("cannot serve the status on %s:%s: %s; choose another --status-port or -host", host, port, why)
            return 1
        publisher = asyncio.create_task(self._publish())
        try:
            return await self._live()
        finally:
            publisher.cancel()
            self._state_file.write(self.snapshot())
            await status.cleanup()

    def snapshot(self) -> dict[str, Any]:
        """Return the state as everybody else sees it."""
        return to_json(self._state, self._versions, os.getpid())

    def _dispatch(self, event: Event) -> None:
        before, self._state = self._state, reduce(self._state, event, _now())
        if self._state == before:
            return
        self._changed.set()
        if (self._state.phase, self._state.reason) != (before.phase, before.reason):
            _log.info("%s", "; ".join(filter(None, (self._state.phase, self._state.reason, self._next_start()))))

    def _next_start(self) -> str | None:
        if self._state.phase is Phase.HELD and not self._options.once:
            return "`aerie retry` in this container starts it anew"
        return f"next start {self._state.next_start:%H:%M:%S} UTC" if self._state.next_start else None

    def _stop(self, name: str) -> None:
        if self._signals.stop.is_set():
            _log.warning("%s again: killing the engine without waiting for its requests", name)
            self._signals.kill.set()
        self._signals.stop.set()
        self._dispatch(StopAsked())

    def _try_again(self) -> None:
        self._dispatch(RetryAsked())
        self._retry.set()

    async def _live(self) -> int:
        while await self._may_start():
            code = await self._start_and_see()
            if self._options.once and not self._signals.stop.is_set():
                return code
        self._dispatch(Stopped())
        return 0

    async def _may_start(self) -> bool:
        """Wait for the time of the next start, or for a person where none is set; return False for a stop."""
        self._retry.clear()
        events = [asyncio.create_task(event.wait()) for event in (self._signals.stop, self._retry)]
        pause = (self._state.next_start - _now()).total_seconds() if self._state.next_start else 0.0
        await first(*events, timeout=None if self._state.phase is Phase.HELD else max(0.0, pause))
        for event in events:
            event.cancel()
        if self._retry.is_set():
            self._gpus = _Gpus()  # what still holds their memory, a person has looked at
        return not self._signals.stop.is_set()

    async def _start_and_see(self) -> int:
        """Run one engine to its end, if one may start; return the exit code that tells what came of it."""
        if left := await self._released():  # by an engine before, which a person may have thought gone
            self._dispatch(Held(_stuck(left), self._state.diagnosis))
            return crash.STUCK
        try:
            engine = self._configuration()
            return await self._run(engine) if await self._hold(engine) else 0
        except ConfigurationError as error:
            self._dispatch(Held(str(error)))
            return USAGE_ERROR
        finally:
            self._held.release()
            self._caches.release()

    async def _hold(self, engine: arguments.EngineArguments) -> bool:
        """Hold the checkpoints, and look at the GPUs; return False for a stop. Raises ConfigurationError."""
        take = asyncio.create_task(off_loop(self._held.take, engine))
        stop = asyncio.create_task(self._signals.stop.wait())
        await first(take, stop)
        stop.cancel()
        if not take.done():
            take.cancel()
            return False
        take.result()
        self._state = replace(
            self._state, model=engine.served_name, models=tuple(revisions.shown(self._held.revisions))
        )
        if not self._gpus.used:  # or could not be asked then
            self._gpus = await self._look_at_gpus()
        return not self._signals.stop.is_set()

    async def _run(self, engine: arguments.EngineArguments) -> int:
        options = self._options
        words = revisions.pinned(options.engine_arguments, engine, self._held.revisions)
        variables = await self._open_caches(words)
        await self._note_loader(words)
        run = EngineRun(
            engine,
            options.keys_file,
            options.drain_timeout,
            options.stall_timeout,
            self._history,
            self._dispatch_of_run,
            self._gpus.addresses,
            self._apart,
        )
        if options.warm:
            warming = Warming(self._reaper, lambda told: self._dispatch(Warmed(told)))
            self._warmings = [each for each in self._warmings if each.pids] + [warming]
            warming.start(words, self._held.revisions, has_gpus=bool(self._gpus.used))
        try:
            ending = await run.until_it_ends(words, self._reaper, self._signals, variables)
        except OSError as error:
            return self._not_started(error)
        finally:
            self._stop_warming()
        await run.ended()
        if ending.asked:
            self._dispatch(Ended(ending.words, ending.status))
            await self._released()
            return 0
        diagnosis = run.diagnose(ending)
        how = crash.reason(ending.words, diagnosis, listened=run.listened)
        if not run.served and (done := await off_loop(self._caches.blame, diagnosis)):
            _log.warning("%s", done)
        self._tell(run, diagnosis, lambda shown: Ended(how, ending.status, shown))
        if left := await self._released():
            diagnosis = run.diagnose(ending, left)
            self._tell(run, diagnosis, lambda shown: Held(_stuck(left), shown))
            return crash.STUCK
        return crash.exit_code(diagnosis, ending.status, served=run.served)

    def _dispatch_of_run(self, event: Event) -> None:
        if isinstance(event, Served):
            self._stop_warming()  # what it has not read, nobody waits for any more
            if not self._state.served:
                self._proving = asyncio.create_task(self._prove_caches())
        self._dispatch(event)

    async def _open_caches(self, words: list[str]) -> dict[str, str]:
        """Open this start's own caches; return the variables that lead there, none where they cannot be kept apart."""
        try:
            return await off_loop(self._caches.open, lambda: keys(words, os.environ, identity()))
        except OSError as error:
            _log.warning("compiled graphs and kernels are not kept apart: %s", error)
            return {}

    async def _note_loader(self, words: list[str]) -> None:
        """Tell how the weights are read, where there are any worth telling of, and what would be chosen instead."""
        directories = [each.directory for each in self._held.revisions if each.weights]
        note = None
        if directories:
            try:
                note = await asyncio.wait_for(off_loop(explain, words, directories), _GPUS_ANSWER_WITHIN)
            except (OSError, TimeoutError) as error:
                _log.warning("how the weights are read best cannot be said: %s", error)
        self._state = replace(self._state, loader=note)
        if note:
            _log.info("the loader: %s", note)

    async def _prove_caches(self) -> None:
        try:
            await off_loop(self._caches.proven)
        except OSError as error:
            _log.warning("what was compiled cannot be recorded: %s", error)

    def _stop_warming(self) -> None:
        for each in self._warmings:
            each.stop()

    def _apart(self) -> frozenset[int]:
        """Return the processes that are no part of an engine."""
        return frozenset().union(*(each.pids for each in self._warmings))

    def _not_started(self, error: OSError) -> int:
        """Hold where another start cannot help; a machine that is short of memory or processes may have them later."""
        why = f"vllm cannot be started: {error.strerror or error}"
        if error.errno in _NOT_INSTALLED:
            self._dispatch(Held(f"{why}; it must be installed and on PATH"))
            return USAGE_ERROR
        self._dispatch(Ended(why, None))
        return crash.NOT_STARTED

    def _configuration(self) -> arguments.EngineArguments:
        """Read and check what the engine is started with; raises ConfigurationError."""
        arguments.check_keys(self._options.keys_file)
        engine = arguments.read(self._options.engine_arguments, os.environ)
        arguments.check_paths(engine)
        arguments.draining(engine, self._options.drain_timeout)
        if engine.port == self._options.status_port:
            both = f"port {self._options.status_port} is given to both the API and the status"
            raise ConfigurationError(f"{both}: change --port or --status-port")
        return engine

    def _tell(self, run: EngineRun, diagnosis: Diagnosis, event: Callable[[crash.Shown], Event]) -> None:
        """Keep the diagnosis, show it, and print it as the last thing for now."""
        at, report = _now(), None
        try:
            report = crash.write_report(self._options.state_dir, diagnosis, run.output.tail, at)
        except OSError as error:
            _log.error("cannot write the report of the crash: %s", error)
        self._dispatch(event(crash.shown(diagnosis, at, report, listened=run.listened)))
        if report:
            _log.info("the engine's last output is kept in %s", report)
        _report.info("%s", diagnosis.text())

    async def _look_at_gpus(self) -> "_Gpus":
        """Return how the GPUs are before an engine has them: nothing where a stop or a stuck driver comes first."""
        look = asyncio.create_task(off_loop(_Gpus.now))
        stop = asyncio.create_task(self._signals.stop.wait())
        await first(look, stop, timeout=_GPUS_ANSWER_WITHIN)
        stop.cancel()
        if look.done():
            return look.result()
        look.cancel()
        if not self._signals.stop.is_set():
            _log.warning(
                "the GPUs' driver has not answered in %.0f s, so nobody will see whether their memory comes back: "
                "see nvidia-smi",
                _GPUS_ANSWER_WITHIN,
            )
        return _Gpus()

    async def _released(self) -> list[Evidence]:
        """Wait until nothing is left of the engine, not long where a stop was asked for; return what does not go."""
        release = asyncio.create_task(held_back(self._gpus.used, apart=self._apart()))
        stop = asyncio.create_task(self._signals.stop.wait())
        await first(release, stop)
        if stop.done():
            await first(release, timeout=_STOPS_ANYWAY)
        stop.cancel()
        if release.done():
            return release.result()
        release.cancel()
        _log.error("stopping, though the kernel has not let go of the engine's processes or of their GPU memory")
        return []

    async def _publish(self) -> None:
        """Write the state file after each change, and not more often than it is read."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            self._state_file.write(self.snapshot())
            await asyncio.sleep(_PUBLISH_EVERY)


def _stuck(left: list[Evidence]) -> str:
    told = "; ".join(evidence.text for evidence in left)
    if any(evidence.pid for evidence in left):
        remedy = "see the kernel's log, reset or reboot"
    else:  # the kernel has let go of the processes
        remedy = "end the program that nvidia-smi names, or reset the GPU; a retry takes for given what is in use then"
    return f"an engine before has not gone, and none starts beside it: {told}; {remedy}"


def _now() -> datetime:
    return datetime.now(UTC)


class _OwnLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        """Say whose line it is, but for a report, which has a form of its own."""
        return record.getMessage() if record.name == _report.name else f"aerie: {record.getMessage()}"


def _log_to_stderr() -> QueueListener:
    """Send our own lines through a thread, for the same reason as the engine's."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_OwnLines())
    queue: SimpleQueue[logging.LogRecord] = SimpleQueue()
    _log.addHandler(QueueHandler(queue))
    _log.setLevel(logging.INFO)
    _log.propagate = False
    listener = QueueListener(queue, handler)
    listener.start()
    return listener
