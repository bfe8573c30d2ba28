"""Processes: starting the engine, copying its output, collecting every exit status, ending a whole tree."""

import asyncio
import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
_CHUNK = 64 * 1024  # bytes, a pipe's capacity


def adopt_orphans() -> None:
    """Make this process the parent of its descendants' orphans, as process 1 of a container is anyway.

    Raises OSError where the kernel refuses.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


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

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        reaper: Reaper,
        on_output: Callable[[bytes], None],
    ) -> None:
        """Start `command` in a session of its own, so that a terminal's Ctrl-C reaches it through us only.

        Raises OSError where it cannot be started.
        """
        process = subprocess.Popen(
            command,
            bufsize=0,
            env=environment,
            stdin=subprocess.DEVNULL,  # transformers would ask a terminal whether to run the checkpoint's code
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.pid = process.pid
        self.ended = reaper.status_of(process)
        self._loop = asyncio.get_running_loop()
        self._on_output = on_output
        self._copied = asyncio.Event()
        # A thread, because a slow reader of our stdout must hold up the engine's output and nothing else of ours.
        threading.Thread(target=self._copy, args=(process.stdout,), daemon=True).start()

    def terminate(self) -> None:
        """Ask the engine to drain and end; its first process passes that on to the others itself."""
        if not self.ended.done():
            os.kill(self.pid, signal.SIGTERM)

    async def output_copied(self, limit: float) -> None:
        """Wait until everything the engine wrote has been passed on, or `limit` seconds for a reader that stopped."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._copied.wait(), limit)

    def _copy(self, output: IO[bytes]) -> None:
        readable = True
        with output, contextlib.suppress(RuntimeError):  # the event loop may be closed before a stuck reader goes on
            while chunk := output.read(_CHUNK):
                self._loop.call_soon_threadsafe(self._on_output, chunk)
                readable = readable and _write_all(sys.stdout.fileno(), chunk)
            self._loop.call_soon_threadsafe(self._copied.set)


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


def descendants() -> set[int]:
    """Return the living processes below this one; after `adopt_orphans` none of them can leave the tree."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            # pid (name) state ppid ...; the name may hold spaces and parentheses.
            state, parent = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[:2]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if state not in "ZX":
            children.setdefault(int(parent), []).append(int(entry.name))
    found: set[int] = set()
    unseen = [os.getpid()]
    while unseen:
        below = children.get(unseen.pop(), [])
        found.update(below)
        unseen += below
    return found


async def kill_descendants() -> None:
    """Kill everything below this process and return when it is gone, however long the kernel takes to free a GPU."""
    while alive := descendants():
        for pid in alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        await asyncio.sleep(0.1)
