"""`aerie serve`: one event loop around the engine, its state and its status page."""

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from logging.handlers import QueueHandler, QueueListener
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import aerie
from aerie import patches
from aerie.auth import KEYS_FILE_VARIABLE, ApiKeyMiddleware
from aerie.startup import StartupReader
from aerie.status import serve_status
from aerie.supervisor import arguments, readiness
from aerie.supervisor.processes import Engine, Reaper, adopt_orphans, kill_descendants
from aerie.supervisor.state import (
    USAGE_ERROR,
    Ended,
    Event,
    Exit,
    Held,
    Phase,
    Progressed,
    Refused,
    Started,
    State,
    StopAsked,
    Stopped,
    reduce,
    resume,
    to_json,
)

_log = logging.getLogger("aerie")

_STATE_FILE = "state.json"
_PUBLISH_EVERY = 0.25  # seconds at least between two writings of the state file
_LAST_OUTPUT = 5.0  # seconds that a stuck reader of our stdout may delay what follows an engine's end
_KILLED_BY = 128  # plus the signal's number, as a shell reports it
# vLLM gives its engine 600 s by default, and a 595 GB checkpoint from a disk takes longer (seconds).
_ENGINE_READY_TIMEOUT = ("VLLM_ENGINE_READY_TIMEOUT_S", "86400")


@dataclass(frozen=True)
class Options:
    """What `aerie serve` was told; `stop_timeout` in seconds."""

    engine_arguments: list[str]
    once: bool
    state_dir: Path
    status_host: str
    status_port: int
    keys_file: Path
    stop_timeout: float


def serve(options: Options) -> int:
    """Run the service until it is told to stop and return the exit code."""
    listener = _log_to_stderr()
    try:
        return asyncio.run(_Service(options).run())
    finally:
        listener.stop()


class _Service:
    def __init__(self, options: Options) -> None:
        self._options = options
        self._state = resume(self._saved(), State(since=_now()))
        self._versions = {"aerie": aerie.__version__, "vllm": patches.vllm_version()}
        self._state_file_failed = False
        self._changed = asyncio.Event()
        self._stopping = asyncio.Event()
        self._kill_now = asyncio.Event()

    async def run(self) -> int:
        adopt_orphans()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop, signal.Signals(number).name)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGINT})  # which the command had blocked
        self._reaper = Reaper()
        host, port = self._options.status_host, self._options.status_port
        try:
            status = await serve_status(host, port, self.snapshot)
        except OSError as error:
            _log.error("cannot serve the status: %s; choose another --status-port", error.strerror)
            return 1
        publisher = asyncio.create_task(self._publish())
        try:
            return await self._live()
        finally:
            publisher.cancel()
            self._write_state()
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
            next_start = f"next start {self._state.next_start:%H:%M:%S} UTC" if self._state.next_start else None
            _log.info("%s", "; ".join(filter(None, (self._state.phase, self._state.reason, next_start))))

    def _stop(self, name: str) -> None:
        if self._stopping.is_set():
            _log.warning("%s again: killing the engine without waiting for its requests", name)
            self._kill_now.set()
        self._stopping.set()
        self._dispatch(StopAsked())

    async def _live(self) -> int:
        try:
            engine = self._configuration()
        except arguments.ConfigurationError as error:
            return await self._hold(str(error))
        self._state = replace(self._state, model=engine.served_name)
        while not await self._stopped_before_next_start():
            try:
                status = await self._run_engine(engine)
            except OSError as error:
                return await self._hold(f"vllm cannot be started: {error}; it must be installed and on PATH")
            if self._options.once and not self._stopping.is_set():
                return status if status >= 0 else _KILLED_BY - status
            if self._state.phase is Phase.HELD:
                await self._stopping.wait()
        self._dispatch(Stopped())
        return 0

    async def _hold(self, problem: str) -> int:
        """Keep the page up with the problem until a person stops the service; with --once say it and end."""
        self._dispatch(Held(problem))
        if self._options.once:
            return USAGE_ERROR
        await self._stopping.wait()
        self._dispatch(Stopped())
        return 0

    def _configuration(self) -> arguments.EngineArguments:
        """Read and check what the engine is started with; raises ConfigurationError."""
        arguments.check_keys(self._options.keys_file)
        engine = arguments.read(self._options.engine_arguments, os.environ)
        arguments.check_paths(engine)
        if engine.port == self._options.status_port:
            both = f"port {self._options.status_port} is given to both the API and the status"
            raise arguments.ConfigurationError(f"{both}: change --port or --status-port")
        return engine

    async def _stopped_before_next_start(self) -> bool:
        pause = self._state.next_start - _now() if self._state.next_start else timedelta()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), max(0.0, pause.total_seconds()))
        return self._stopping.is_set()

    async def _run_engine(self, engine: arguments.EngineArguments) -> int:
        """Run one engine to its end, and until nothing of it is left; return its status. Raises OSError."""
        middleware = f"{ApiKeyMiddleware.__module__}.{ApiKeyMiddleware.__qualname__}"
        command = ["vllm", "serve", *self._options.engine_arguments, "--middleware", middleware]
        environment = {_ENGINE_READY_TIMEOUT[0]: _ENGINE_READY_TIMEOUT[1]} | os.environ
        environment[KEYS_FILE_VARIABLE] = str(self._options.keys_file)
        reader = StartupReader()

        def on_output(data: bytes) -> None:
            report = reader.feed(data)
            self._dispatch(Progressed({"phase": report.step, "fraction": report.fraction}, report.last_line))

        process = Engine(command, environment, self._reaper, on_output)
        self._dispatch(Started(process.pid))
        _log.info("%s", patches.summary())
        async with asyncio.TaskGroup() as tasks:
            watch = tasks.create_task(readiness.watch(engine, self._options.keys_file, self._dispatch))
            stop = tasks.create_task(self._stopping.wait())
            kill = tasks.create_task(self._kill_now.wait())
            await _first(process.ended, watch, stop)
            if stop.done():
                process.terminate()
                await _first(process.ended, kill, timeout=self._options.stop_timeout)
            elif process.ended.done():
                self._dispatch(Refused(str(Exit.of(process.ended.result(), _now()))))
            else:
                _log.warning("the engine is dead and its API server stays: killing it")
            for task in (watch, stop, kill):
                task.cancel()
        await kill_descendants()
        await process.output_copied(_LAST_OUTPUT)
        status = await process.ended
        how = str(Exit.of(status, _now()))
        self._dispatch(Ended(f"{how}: {reader.report.error}" if reader.report.error else how, status))
        return status

    async def _publish(self) -> None:
        """Write the state file after each change, and not more often than it is read."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            self._write_state()
            await asyncio.sleep(_PUBLISH_EVERY)

    def _write_state(self) -> None:
        path = self._options.state_dir / _STATE_FILE
        draft = path.with_suffix(".new")
        try:
            draft.write_text(json.dumps(self.snapshot(), indent=1) + "\n", encoding="utf-8")
            draft.replace(path)
        except OSError as error:
            if not self._state_file_failed:  # a full disk must not end a service that serves, nor fill the log
                _log.error("cannot write %s: %s; the back-off will not outlast a restart", path, error)
            self._state_file_failed = True

    def _saved(self) -> dict[str, Any]:
        try:
            saved = json.loads((self._options.state_dir / _STATE_FILE).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return saved if isinstance(saved, dict) else {}


async def _first(*awaited: asyncio.Future[Any], timeout: float | None = None) -> None:  # noqa: ASYNC109 - passed on
    await asyncio.wait(awaited, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)


def _now() -> datetime:
    return datetime.now(UTC)


def _log_to_stderr() -> QueueListener:
    """Send our own lines through a thread, for the same reason as the engine's."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("aerie: %(message)s"))
    queue: SimpleQueue[logging.LogRecord] = SimpleQueue()
    _log.addHandler(QueueHandler(queue))
    _log.setLevel(logging.INFO)
    _log.propagate = False
    listener = QueueListener(queue, handler)
    listener.start()
    return listener
