"""Programs that may hang: each in a process of its own, which tells its steps on a pipe and ends with this one.

A dead path between two GPUs holds whoever uses it, in the driver or in a kernel on the GPU, and no timeout inside the
process ends that. So whoever waits here waits for a message, not for the program, and kills what does not go on.
"""

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from aerie.supervisor.prctl import signal_when_parent_dies
from aerie.supervisor.tree import Survivor, survivor

_TAIL = 4000  # bytes of what a child printed, from its end
_ENDS_WITHIN = 10.0  # seconds after SIGKILL: freeing GPU memory takes some; a process that a driver holds never ends
_LOOK = 0.05  # seconds

Message = Mapping[str, Any]


@dataclass(frozen=True)
class Program:
    """What to start: its name in messages, its command, and its whole environment. The pipe's number comes last."""

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]


def module(name: str, *arguments: str) -> list[str]:
    """Return the command of one of this package's programs; the current directory lends it no module."""
    return [sys.executable, "-P", "-m", name, *arguments]


class Telling:
    """A child's end of the pipe. To be made first: from then on the child ends with its parent, whatever ends that."""

    def __init__(self, parent: int, pipe: int) -> None:
        signal_when_parent_dies(signal.SIGKILL)
        if os.getppid() != parent:  # it ended before that was asked for
            os.kill(os.getpid(), signal.SIGKILL)
        os.set_inheritable(pipe, False)  # noqa: FBT003 - it has no keyword
        self._pipe = pipe

    def __call__(self, **message: object) -> None:
        """Write one message, a line of JSON; short enough to be written whole."""
        os.write(self._pipe, json.dumps(message).encode() + b"\n")


@dataclass(frozen=True)
class Said:
    """Child number `child` said something, or ended: then `message` is None."""

    child: int
    message: Message | None


class Children:
    """Running programs. `started` makes them, and leaves none behind."""

    def __init__(self, programs: Sequence[Program], folder: Path) -> None:
        self._programs = programs
        self._said: queue.SimpleQueue[Said] = queue.SimpleQueue()
        self._outputs = [folder / f"{number}.log" for number in range(len(programs))]
        self._processes: list[subprocess.Popen[bytes]] = []
        self.survivors: list[Survivor] = []
        """Those that SIGKILL did not end, after `end`."""

    def start(self) -> None:
        """Start all of them; OSError where one cannot be started."""
        for number, program in enumerate(self._programs):
            reading, writing = os.pipe()
            try:
                with self._outputs[number].open("wb") as output:
                    process = subprocess.Popen(
                        [*program.command, str(os.getpid()), str(writing)],
                        env=dict(program.environment),
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        pass_fds=(writing,),
                        start_new_session=True,  # a terminal's Ctrl-C is for the parent, which ends them
                    )
            except OSError:
                os.close(reading)
                raise
            finally:
                os.close(writing)
            self._processes.append(process)
            threading.Thread(target=self._read, args=(number, os.fdopen(reading, "rb")), daemon=True).start()

    def next(self, seconds: float) -> Said | None:
        """Return what is said next; None where nobody says anything for so long."""
        try:
            return self._said.get(timeout=max(0.0, seconds))
        except queue.Empty:
            return None

    def name(self, child: int) -> str:
        """Return what the child is called."""
        return self._programs[child].name

    def failed_how(self, child: int) -> str | None:
        """Say how a child failed whose pipe is closed, and what it printed last; None where it ended well."""
        try:
            code = self._processes[child].wait(_ENDS_WITHIN)
        except subprocess.TimeoutExpired:
            return "it closed its pipe and did not end"
        if code == 0:
            return None
        how = f"signal {-code} ended it" if code < 0 else f"it ended with {code}"
        last = self.last_line(child)
        return f"{how}: {last}" if last else how

    def last_line(self, child: int) -> str:
        """Return the last line that a child printed."""
        with self._outputs[child].open("rb") as output:
            output.seek(max(0, output.seek(0, os.SEEK_END) - _TAIL))
            lines = output.read().decode(errors="replace").strip().splitlines()
        return lines[-1].strip() if lines else ""

    def end(self) -> None:
        """Kill all that is left, with what it started, and see that it is gone."""
        for process in self._processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        deadline = time.monotonic() + _ENDS_WITHIN
        left = list(self._processes)
        while left and time.monotonic() < deadline:
            left = [process for process in left if process.poll() is None]
            time.sleep(_LOOK if left else 0)
        self.survivors = [survivor(process.pid, titled=False) for process in left]

    def _read(self, child: int, pipe: BinaryIO) -> None:
        with pipe:
            for line in pipe:
                self._said.put(Said(child, json.loads(line)))
        self._said.put(Said(child, None))


@contextmanager
def started(programs: Iterable[Program]) -> Iterator[Children]:
    """Start programs; on leaving, however that comes about, none of them is left. OSError where one cannot start."""
    with tempfile.TemporaryDirectory(prefix="aerie-fabric-", ignore_cleanup_errors=True) as folder:
        children = Children(list(programs), Path(folder))
        try:
            children.start()
            yield children
        finally:
            children.end()
