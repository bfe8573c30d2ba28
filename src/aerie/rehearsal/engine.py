"""A supervised engine of the rehearsal's own: on loopback, on ports that nobody has, with a key that nobody else knows.

It is `aerie serve --once`, so what watches the real start watches this one, and says why it failed.
"""

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from aerie.gate.judge import Judgement, Memory, Verdict, judge, tell
from aerie.gate.state import NoState, State
from aerie.supervisor import arguments, leash
from aerie.supervisor.json_file import JsonFile
from aerie.supervisor.prctl import adopt_orphans
from aerie.supervisor.retry import STATE_FILE
from aerie.supervisor.tree import descendants, kill

# Seconds.
_POLL = 0.25
_STALL = 300.0  # without any progress: a model that loads in a second has nothing to wait for
_DRAIN = 10
_STOPS_WITHIN = 60.0  # the drain, and what the supervisor takes after it
_LINES = 20  # of a log, where no diagnosis could be made


class Engine:
    """One start of `vllm serve`, from its first line to its last; use it in `with`."""

    def __init__(self, words: Sequence[str], folder: Path, environment: Mapping[str, str]) -> None:
        """`words` are vLLM's arguments; logs, state and key go to `folder`."""
        self._folder = folder
        self._words = [*words]
        self._environment = {**environment}
        self._state = JsonFile(folder / STATE_FILE, "")
        self.log = folder / "engine.log"
        self.key = secrets.token_urlsafe(24)
        self.url = arguments.read(words, environment).url
        """Of its API."""
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        """Start it."""
        adopt_orphans()  # so that what it leaves behind is seen
        keys = self._folder / "keys"
        keys.touch(mode=0o600)
        keys.write_text(f"{self.key}\n", encoding="utf-8")
        supervisor = [
            *(sys.executable, "-P", "-m", "aerie.cli", "serve", "--once"),
            *("--state-dir", str(self._folder), "--cache-dir", str(self._folder)),
            *("--status-host", "127.0.0.1", "--status-port", str(free_port())),
            *("--api-keys-file", str(keys), "--drain-timeout", str(_DRAIN), "--stall-timeout", str(_STALL)),
            *("--", *self._words),
        ]
        # On a leash: were this process killed, the engine would go, too.
        answer, report = os.pipe()
        try:
            with self.log.open("wb") as log:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", leash.__name__, str(os.getpid()), str(report), *supervisor],
                    env=self._environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    pass_fds=(report,),
                    start_new_session=True,  # a terminal's Ctrl-C reaches it through us
                )
        except OSError:
            os.close(answer)
            raise
        finally:
            os.close(report)
        with open(answer, encoding="utf-8") as answers:  # noqa: PTH123 - a descriptor
            answers.readline()  # that it was started; what keeps it from that is in its log, too
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave nothing behind, however it ended."""
        if self._process and self._process.poll() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_STOPS_WITHIN)
        while left := descendants(os.getpid()):
            kill(left)
            time.sleep(_POLL)
            self._collect()

    def wait(self, say: Callable[[str], None]) -> Judgement:
        """Wait until it is ready or has failed; `say` gets a line wherever there is news."""
        memory = Memory.at(time.monotonic())
        while True:
            ended = self._process is None or self._process.poll() is not None
            now = time.monotonic()
            memory, judgement = judge(memory, self._look(), now, _STALL)
            if ended and judgement.verdict is not Verdict.READY:
                return Judgement(Verdict.FAILED, judgement.step, self.diagnosis())
            if judgement.verdict is not None:
                return judgement
            memory, news = tell(memory, judgement.step, now)
            if news:
                say(str(judgement.step))
            time.sleep(_POLL)

    def stop(self) -> tuple[int | None, list[int]]:
        """End it and return its exit code, None where it did not end in time, and the processes that it left behind."""
        if self._process is None:
            return 0, []
        self._process.send_signal(signal.SIGTERM)
        code = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self._process.wait(_STOPS_WITHIN)
        self._collect()
        return code, sorted(descendants(os.getpid()))

    def ended(self, within: float = 0.0) -> bool:
        """Return whether it has ended by itself, or does so within some seconds."""
        if self._process is None:
            return False
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(within)
        return self._process.returncode is not None

    def diagnosis(self) -> dict[str, Any] | None:
        """Return what the supervisor says about its failure, None where it says nothing."""
        found = self._state.read().get("diagnosis")
        return found if isinstance(found, dict) else None

    def last_words(self) -> str:
        """Return the end of its log."""
        return "\n".join(self.text().splitlines()[-_LINES:])

    def text(self) -> str:
        """Return its log."""
        return self.log.read_text(encoding="utf-8", errors="replace")

    def _look(self) -> State | NoState:
        state = self._state.read()
        return state or NoState("the supervisor is starting")

    @staticmethod
    def _collect() -> None:
        """Take the exit codes of orphans that came to us; the engine's own is Popen's."""
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG) != (0, 0):
                pass


def free_port() -> int:
    """Return a TCP port of loopback that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
