"""Run a long command on the target and show its output while it runs.

`ansible.builtin.command` says nothing until the command ends, which for an image build is many silent minutes, and it
dies with the connection. This action starts the command detached on the target, with its output in a log file there,
and polls that file over the task's own connection. The target needs a POSIX shell, setsid and flock (util-linux).

The task's parameters:
    cmd                  the command, for /bin/sh
    log                  path of the log file on the target; its directory must exist
    label                what to call the command in what is displayed (default: the task's name)
    show                 regular expression; only the lines in which it is found are displayed (default: all)
    creates              path on the target; where it exists nothing is run
    chdir                directory on the target to run in
    unreachable_timeout  seconds that the target may be out of reach before the task gives up (default: 600)

The task keyword `environment` works as with `command`. Returned: rc, log, stdout and stdout_lines (the last 200 lines
of the log).

Beside the log stand LOG.lock (locked while the command runs; holds its process group and a digest of the command) and
LOG.rc (its exit status). So a rerun of the same task after a lost controller joins the running command and does not
start a second one. An interrupted play (Ctrl-C, SIGTERM) ends the command with its whole process group.
"""

from __future__ import annotations

import base64
import codecs
import collections
import hashlib
import io
import re
import shlex
import signal
import sys
import time
from typing import Any, ClassVar

from ansible.errors import AnsibleActionFail, AnsibleConnectionFailure
from ansible.plugins.action import ActionBase

TAIL_LINES = 200
FAILURE_LINES = 40
CHUNK_BYTES = 256 * 1024
POLL_SECONDS = (0.1, 2.0)
"""First and longest pause between two polls: short commands end at once, long ones cost the target little."""
SILENCE_SECONDS = 30.0
"""After so long without a displayed line, one line says that the command still runs."""
LEAST_WIDTH = 100
"""Columns that a displayed line may fill also where the terminal has fewer, or none is known."""
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
NO_TERMINAL = b"\n"
"""On a script's stdin; without any, Ansible gives ssh a terminal, whose end can take the last output with it."""

# Through a pipe (`| tee`, a CI job) Ansible's output comes in blocks of 8 KiB, and nobody would see it go on for half
# an hour. The process that prints imports this module, too, and only there is it of use.
if isinstance(sys.stdout, io.TextIOWrapper):
    sys.stdout.reconfigure(line_buffering=True)

# The exclusive lock is taken before the fork and held by the detached shell alone (the command gets it closed), so
# "locked" means "running" without trusting a process id that may have been given to somebody else.
START = """
cd -- "$3" || exit 1
exec 9>>"$1.lock" || exit 1
if ! flock -n 9; then
  read -r group digest <"$1.lock"
  if [ "$digest" = "$4" ]; then echo "joined $(wc -c <"$1")"; else echo "busy $group"; fi
  exit 0
fi
rm -f -- "$1.rc" && : >"$1" || exit 1
setsid sh -c '
  echo "$$ $3" >"$1.lock"
  sh -c "$2" >>"$1" 2>&1 9>&-
  echo $? >"$1.rc.new" && mv -- "$1.rc.new" "$1.rc"
' watched "$1" "$2" "$4" </dev/null >/dev/null 2>&1 &
echo "started 0"
"""

# The exit status is read before the log, so the log is complete when there is a status.
POLL = """
if [ -f "$1.rc" ]; then read -r rc <"$1.rc"; echo "ended $rc"
elif ! flock -n "$1.lock" true; then echo "running -"
elif [ -f "$1.rc" ]; then read -r rc <"$1.rc"; echo "ended $rc"
else echo "lost -"
fi
tail -c "+$(($2 + 1))" "$1" | head -c "$3" | base64
"""

# Ansible gives an interrupted worker 10 s.
STOP = """
read -r group digest <"$1.lock" || exit 0
kill -s 0 -- "-$group" 2>/dev/null || exit 0
kill -s TERM -- "-$group"
for _ in 1 2 3 4 5 6 7 8 9 10; do
  sleep 0.5
  kill -s 0 -- "-$group" 2>/dev/null || exit 0
done
kill -s KILL -- "-$group"
"""

CONTROL_SEQUENCE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Interrupted(BaseException):
    """A signal ends the play; not an Exception, so that no handler of Ansible's takes it for a failed task."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


class Lines:
    """Turns chunks of bytes into whole lines of plain text; a carriage return ends one too, as progress bars use it."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._rest = ""

    def feed(self, chunk: bytes, *, final: bool = False) -> list[str]:
        """Return the lines that are complete; all that is left when final."""
        text = self._rest + self._decoder.decode(chunk, final)
        lines = re.split(r"[\r\n]+", text)
        self._rest = "" if final else lines.pop()
        return [plain for line in lines if (plain := CONTROL_SEQUENCE.sub("", line).rstrip())]


class ActionModule(ActionBase):
    """See the module's docstring."""

    TRANSFERS_FILES = False
    _requires_connection = True
    ARGUMENTS: ClassVar[dict[str, Any]] = {
        "cmd": {"type": "str", "required": True},
        "log": {"type": "str", "required": True},
        "label": {"type": "str"},
        "show": {"type": "str", "default": ""},
        "creates": {"type": "str"},
        "chdir": {"type": "str", "default": "."},
        "unreachable_timeout": {"type": "float", "default": 600.0},
    }

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Run, watch, and return the task's result."""
        result: dict[str, Any] = super().run(tmp, task_vars)
        _, parameters = self.validate_argument_spec(argument_spec=self.ARGUMENTS)
        creates = parameters["creates"]
        if creates and self._script('[ -e "$1" ]', creates)["rc"] == 0:
            return result | {"changed": False, "rc": 0, "msg": f"not run, since {creates} exists"}
        if self._task.check_mode:
            # As with `command`: only with `creates` is it known that the command would run.
            would = {"changed": True} if creates else {"changed": False, "skipped": True}
            return result | would | {"rc": 0, "msg": "would have run, but for check mode"}

        hosts = (task_vars or {}).get("ansible_play_hosts_all", [])
        host = (task_vars or {}).get("inventory_hostname", "")
        self._prefix = f"    {host} " if len(hosts) > 1 else "    "
        self._label = parameters["label"] or self._task.get_name()
        self._show = re.compile(parameters["show"])
        self._log = parameters["log"]
        self._tail: collections.deque[str] = collections.deque(maxlen=TAIL_LINES)
        self._began = self._last_shown = time.monotonic()

        offset = self._start(parameters["cmd"], parameters["chdir"])
        previous = {signum: signal.signal(signum, self._interrupt) for signum in STOP_SIGNALS}
        try:
            rc = self._watch(offset, parameters["unreachable_timeout"])
        except Interrupted as interruption:
            stopped = self._script(STOP, self._log)
            if stopped["rc"] != 0:
                self._say(f"could not be ended: {stopped['stderr'].strip()}")
            previous[interruption.signum](interruption.signum, None)  # type: ignore[operator, misc]
            raise
        finally:
            for signum, handler in previous.items():
                signal.signal(signum, handler)

        result |= {"changed": True, "rc": rc, "log": self._log}
        result |= {"stdout": "\n".join(self._tail), "stdout_lines": list(self._tail)}
        if rc != 0:
            last = "\n".join(list(self._tail)[-FAILURE_LINES:])
            result |= {"failed": True, "msg": f"{self._label} {self._ending(rc)}. The end of {self._log}:\n{last}"}
        return result

    @staticmethod
    def _ending(rc: int | None) -> str:
        if rc is None:
            return "ended without an exit status: it was killed, or the machine was restarted"
        return f"ended with exit status {rc}"

    @staticmethod
    def _interrupt(signum: int, _frame: object) -> None:
        # Ansible follows Ctrl-C with a SIGTERM at once, which must not cut the clean-up short.
        for each in STOP_SIGNALS:
            signal.signal(each, signal.SIG_IGN)
        raise Interrupted(signum)

    def _script(self, script: str, *args: str, environment: str = "") -> dict[str, Any]:
        command = shlex.join(["/bin/sh", "-c", script, "watched", *args])
        outcome: dict[str, Any] = self._low_level_execute_command(
            f"{environment} {command}".lstrip(), in_data=NO_TERMINAL
        )
        return outcome

    def _start(self, cmd: str, chdir: str) -> int:
        """Start the command, or join it where it still runs; return the offset in the log to read from."""
        digest = hashlib.sha256(f"{chdir}\0{cmd}".encode()).hexdigest()
        outcome = self._script(START, self._log, cmd, chdir, digest, environment=self._compute_environment_string())
        if outcome["rc"] != 0:
            raise AnsibleActionFail(
                f"{self._label} could not be started in {chdir!r} with its log in {self._log}: "
                f"{outcome['stderr'].strip()}"
            )
        state, number = outcome["stdout"].split()
        if state == "busy":
            raise AnsibleActionFail(
                f"{self._label}: another command with the log {self._log} is still running (process group {number}). "
                f"Wait for it, or end it with: kill -s TERM -- -{number}"
            )
        if state == "joined":
            self._display.display(f"{self._prefix}{self._label}: still running from an earlier run, joined")
        return int(number)

    def _watch(self, offset: int, unreachable_timeout: float) -> int | None:
        """Follow the log to its end; return the exit status, None where the command vanished without one."""
        lines = Lines()
        pause, longest = POLL_SECONDS
        last_contact = time.monotonic()
        while True:
            try:
                outcome = self._script(POLL, self._log, str(offset), str(CHUNK_BYTES))
            except AnsibleConnectionFailure as failure:
                if time.monotonic() - last_contact > unreachable_timeout:
                    raise
                self._say(f"out of reach, the command goes on: {failure}")
                time.sleep(longest)
                continue
            last_contact = time.monotonic()
            status, _, encoded = outcome["stdout"].partition("\n")
            state, _, number = status.strip().partition(" ")
            chunk = base64.b64decode(encoded)
            offset += len(chunk)
            more = len(chunk) == CHUNK_BYTES
            ended = state != "running" and not more
            self._take(lines.feed(chunk, final=ended))
            if ended:
                return int(number) if state == "ended" else None
            if not more:
                time.sleep(pause)
                pause = min(pause * 1.5, longest)

    def _take(self, lines: list[str]) -> None:
        self._tail.extend(lines)
        for line in lines:
            if self._show.search(line):
                self._say(line)
        if time.monotonic() - self._last_shown > SILENCE_SECONDS:
            self._say(f"still running; last line: {self._tail[-1]}" if self._tail else "still running")

    def _say(self, text: str) -> None:
        self._last_shown = time.monotonic()
        if self._task.no_log:
            return
        minutes, seconds = divmod(int(self._last_shown - self._began), 60)
        width = max(self._display.columns, LEAST_WIDTH)
        self._display.display(f"{self._prefix}{self._label} {minutes}:{seconds:02d} {text}"[:width])
