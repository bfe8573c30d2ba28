"""Processes: starting the engine, copying its output, collecting every exit status, seeing and ending its tree."""

import asyncio
import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import IO, Any, Generic, TypeVar

from aerie.supervisor import leash
from aerie.supervisor.tree import Survivor, Vital, descendants, kill, survivor, vital_below

_CHUNK = 64 * 1024  # bytes, a pipe's capacity
# Seconds.
_LOOK = 0.25  # between two looks at the vital processes: the price is one small read for each
_DISCOVER = 1.0  # between two looks for new ones: a read for each process of the machine or container
_KILL_AGAIN = 0.05
_TITLE_WITHIN = 0.5  # that of a process which the kernel holds, maybe with the lock that its reader needs

_Result = TypeVar("_Result")


class Reaper:
    """The one caller of `waitpid`: collects orphans, and hands a child's status to whoever started it."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._awaited: dict[int, tuple[subprocess.Popen[bytes], asyncio.Future[int]]] = {}
        self._loop.add_signal_handler(signal.SIGCHLD, self._collect)

    def status_of(self, process: subprocess.Popen[bytes]) -> asyncio.Future[int]:
        """Return a future of the status, as `os.waitstatus_to_exitcode` gives it.

        Call it in the same step of the event loop that started `process`, so that its end cannot have been collected.
        """
        future: asyncio.Future[int] = self._loop.create_future()
        self._awaited[process.pid] = (process, future)
        return future

    def _collect(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid in self._awaited:
                process, future = self._awaited.pop(pid)
                # Popen believes that it alone waits for its child; it learns the status from here.
                process.returncode = os.waitstatus_to_exitcode(status)
                future.set_result(process.returncode)


class Engine:
    """One run of a command whose output is copied byte for byte to our stdout and shown to `on_output`."""

    def __init__(self, leashed: subprocess.Popen[bytes], reaper: Reaper, on_output: Callable[[bytes], None]) -> None:
        self.pid = 0
        self.ended = reaper.status_of(leashed)
        self._leash = leashed.pid
        self._loop = asyncio.get_running_loop()
        self._on_output = on_output
        self.copied = asyncio.Event()
        """Set when nobody can write any more, and everything has been passed on."""
        # One piece at a time, so that an engine that floods its log neither fills our memory nor keeps the loop for it.
        self._read = threading.Semaphore(1)
        # A thread, because a slow reader of our stdout must hold up the engine's output and nothing else of ours.
        threading.Thread(target=self._copy, args=(leashed.stdout,), daemon=True).start()

    @classmethod
    async def start(
        cls,
        command: Sequence[str],
        environment: Mapping[str, str],
        reaper: Reaper,
        on_output: Callable[[bytes], None],
    ) -> "Engine":
        """Start `command` on a leash, in a session of its own: a terminal's Ctrl-C reaches it through us only.

        Raises OSError where it cannot be started.
        """
        leashed, answer = _leashed(command, environment)
        engine = cls(leashed, reaper, on_output)
        with open(answer, encoding="utf-8") as answers:  # noqa: ASYNC230, PTH123 - a descriptor, read in a thread
            said = (await off_loop(answers.readline)).strip()
        if not said.isdecimal():
            await engine.ended
            number, _, words = said.partition(" ")
            raise OSError(int(number), words) if number.isdecimal() else OSError(said or "the process before it ended")
        engine.pid = int(said)
        return engine

    def terminate(self) -> None:
        """Ask the engine to drain and end; its first process passes that on to the others itself."""
        if not self.ended.done():
            os.kill(self._leash, signal.SIGTERM)

    def _show(self, chunk: bytes) -> None:
        try:
            self._on_output(chunk)
        finally:
            self._read.release()

    def _copy(self, output: IO[bytes]) -> None:
        readable = True
        with output, contextlib.suppress(RuntimeError):  # the event loop may be closed before a stuck reader goes on
            while chunk := output.read(_CHUNK):
                self._read.acquire()
                self._loop.call_soon_threadsafe(self._show, chunk)
                readable = readable and _write_all(sys.stdout.fileno(), chunk)
            self._loop.call_soon_threadsafe(self.copied.set)


def _leashed(command: Sequence[str], environment: Mapping[str, str]) -> tuple[subprocess.Popen[bytes], int]:
    """Start the leash; return it, and the pipe by which it says how starting the command went."""
    answer, report = os.pipe()
    try:
        leashed = subprocess.Popen(
            [sys.executable, "-P", "-m", leash.__name__, str(os.getpid()), str(report), *command],
            bufsize=0,
            env=environment,
            stdin=subprocess.DEVNULL,  # transformers would ask a terminal whether to run the checkpoint's code
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=(report,),
            start_new_session=True,
        )
    except OSError:
        os.close(answer)
        raise
    finally:
        os.close(report)
    return leashed, answer


def _write_all(descriptor: int, data: bytes) -> bool:
    """Write all of `data`, however slowly it is read; return whether anybody can still read more."""
    while data:
        try:
            data = data[os.write(descriptor, data) :]
        except BlockingIOError:  # another holder of the same pipe made it non-blocking
            select.select([], [descriptor], [])
        except OSError:
            return False
    return True


async def first(*awaited: asyncio.Future[Any], timeout: float | None = None) -> None:  # noqa: ASYNC109 - passed on
    """Return when any of them is done, or after `timeout` seconds."""
    await asyncio.wait(awaited, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)


async def off_loop(function: Callable[..., _Result], *arguments: object) -> _Result:
    """Call `function` in a thread of its own, for which no end waits: a stuck driver may never answer."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[_Result] = loop.create_future()

    def call() -> None:
        try:
            settle = partial(future.set_result, function(*arguments))
        except Exception as error:  # noqa: BLE001 - raised where it is waited for
            settle = partial(future.set_exception, error)
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(lambda: future.done() or settle())

    threading.Thread(target=call, daemon=True).start()
    return await future


class Look(Generic[_Result]):
    """A look at processes or GPUs that may never return: a driver that does not answer holds whoever asks it."""

    def __init__(self, look: Callable[..., _Result], *arguments: object) -> None:
        self._look = partial(off_loop, look, *arguments)
        self._under_way: asyncio.Task[_Result] | None = None

    async def take(self, limit: float) -> _Result | None:
        """Return what is seen; None where that takes longer than `limit` seconds, and the next one waits for it, too.

        Whatever the look raises is raised here.
        """
        self._under_way = self._under_way or asyncio.ensure_future(self._look())
        await first(self._under_way, timeout=limit)
        if not self._under_way.done():
            return None
        look, self._under_way = self._under_way, None
        return look.result()


async def vital_death(root: int) -> Vital:
    """Return which of vLLM's engine cores and workers below `root` has died, as soon as it is seen.

    vLLM's own processes take seconds to notice that of each other, and its API server may stay for good.
    """
    vital: dict[int, Vital] = {}
    look = Look(vital_below, root)
    discovered = -_DISCOVER
    while True:
        if time.monotonic() - discovered >= _DISCOVER:
            vital |= {process.pid: process for process in await look.take(_LOOK) or ()}
            discovered = time.monotonic()
        for process in vital.values():
            if not process.lives():
                return process
        await asyncio.sleep(_LOOK)


async def kill_below(root: int, limit: float, apart: Collection[int] = ()) -> list[Survivor]:
    """Kill everything below `root`; return what is still there after `limit` seconds, so at best nothing.

    Nobody waits for those of `apart`, which are no part of an engine and somebody else's to kill.
    Freeing hundreds of gigabytes takes the kernel seconds; a process that waits in a driver may never end.
    """
    deadline = time.monotonic() + limit
    while alive := descendants(root) - set(apart):
        kill(alive)
        if time.monotonic() > deadline:
            return await asyncio.gather(*map(_survivor, sorted(alive)))
        await asyncio.sleep(_KILL_AGAIN)
    return []


async def _survivor(pid: int) -> Survivor:
    try:
        return await asyncio.wait_for(off_loop(partial(survivor, titled=True), pid), _TITLE_WITHIN)
    except TimeoutError:
        return survivor(pid, titled=False)
