"""A program between the supervisor and the engine, so that no process of the engine outlives the supervisor.

As process 1 of a container the supervisor takes all others with it, whatever ends it; elsewhere nothing tells vLLM's
engine core that the supervisor was killed, or even its own API server, and it would keep its GPU memory. The kernel can
signal a child when its parent dies (PR_SET_PDEATHSIG), though not the children's children: this is that child, and the
others are below it.

    python -P -m aerie.supervisor.leash PID FD COMMAND...

PID is the supervisor's. Into the pipe FD goes one line: the command's own pid, or the number and the words of the error
for which it cannot be started.
"""

import contextlib
import os
import resource
import signal
import sys
import time

from aerie.supervisor.prctl import adopt_orphans, signal_when_parent_dies
from aerie.supervisor.tree import descendants, kill

_ORPHANED = signal.SIGUSR1
_HANDLED = {signal.SIGCHLD, signal.SIGTERM, _ORPHANED}
_KILLED_BY = 128  # plus the signal's number, as a shell reports it
_KILL_AGAIN = 0.05  # seconds


def main(supervisor: int, report: int, command: list[str]) -> int:
    """Run `command` and return its exit code, or die by the signal that it died by.

    SIGTERM is handed on to the command alone, which tells its own processes. When the supervisor dies, everything is
    killed.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, _HANDLED)
    adopt_orphans()
    signal_when_parent_dies(_ORPHANED)
    if os.getppid() != supervisor:  # it died before we were listening
        return _KILLED_BY + signal.SIGKILL
    os.set_inheritable(report, False)  # noqa: FBT003 - it has no keyword
    with open(report, "w", encoding="utf-8") as told:
        try:
            # What Python ignores for itself (SIGPIPE) and what is blocked here would be inherited.
            ours = (signal.SIGPIPE, signal.SIGXFSZ)
            engine = os.posix_spawnp(command[0], command, os.environ, setsigmask=(), setsigdef=ours)
        except OSError as error:
            print(error.errno, error.strerror, file=told)
            return 1
        print(engine, file=told)
    while True:
        number = signal.sigwait(_HANDLED)
        if number == signal.SIGTERM:
            os.kill(engine, signal.SIGTERM)
        elif number == _ORPHANED:
            _end_everything()
            return _KILLED_BY + signal.SIGKILL
        elif (status := _collect(engine)) is not None:
            return _end_as(status)


def _collect(engine: int) -> int | None:
    """Collect whatever has ended; return the engine's status if it is among them."""
    ended = None
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            if pid == engine:
                ended = os.waitstatus_to_exitcode(status)
    return ended


def _end_everything() -> None:
    while alive := descendants(os.getpid()):
        kill(alive)
        _collect(0)
        time.sleep(_KILL_AGAIN)


def _end_as(status: int) -> int:
    """Return the exit code, or end as the engine did; what is left below comes to the supervisor."""
    if status >= 0:
        return status
    number = -status
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the engine has written its own
    if number not in {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    os.kill(os.getpid(), number)
    return _KILLED_BY + number  # never reached, but for a signal that ends nothing


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]))
