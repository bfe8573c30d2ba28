"""Wait on the target until the service is ready, show its start while it goes on, fail with the diagnosis of a crash.

The service is judged where it runs: each poll is `aerie wait --piece` in the container, over the task's own connection.
A poll ends when there is something to tell, or after POLL_SECONDS, and hands back what it has to remember; the next one
brings that along. So there is one judge, a crash shows within a second, and a connection that breaks loses nothing. The
wait ends on a failure, or when nothing has moved for as long as the service permits, never on a clock. The target needs
Docker, and compose unless `container` is given.

The task's parameters:
    project_dir          directory of the compose project on the target; this or `container` is required
    service              its service (default: vllm)
    container            name or id of a container, where there is no compose project
    absent_timeout       seconds that the container may be missing, restarting or out of Docker's reach (default: 60)
    unreachable_timeout  seconds that the target may be out of reach before the task gives up (default: 600)

The task keyword `environment` works as with `command`. Displayed: one line a change, with the host's name; nothing with
`no_log`, and nothing where Ansible's output is for programs, which is under every stdout callback that is not built on
`default`. In check mode the task is skipped.

Returned, never as changed:
    ready      whether the service can be used
    verdict    ready; failed; stalled: nothing moved; nobody: nothing answered that this gate can read
    phase      of the service at the end, none where it did not answer
    seconds    that the wait took
    diagnosis  of a failure: signature, title, cause, remedy, kind, root, evidence and so on; else none
    msg        what the verdict is and why, for people: after a crash the container's own last words
"""

from __future__ import annotations

import io
import json
import shlex
import sys
import time
from typing import Any

from ansible import constants
from ansible.errors import AnsibleConnectionFailure
from ansible.plugins.action import ActionBase
from ansible.plugins.callback.default import CallbackModule as DefaultCallback
from ansible.plugins.loader import callback_loader

POLL_SECONDS = 10
"""Longest poll: a connection that died is noticed soon, and Docker is not asked every second."""
ANSWER_SECONDS = 30
"""Until a poll is given up that Docker does not answer."""
PAUSE_SECONDS = 1.0
"""After a poll that could not ask the service."""
LONGEST_LINE = 300
"""Characters of a displayed line. It wraps where the terminal is narrower, for its end tells how long it will take."""

USAGE_ERROR = 2
TIMED_OUT = 124
NOT_THERE = (126, 127)
"""What a shell and Docker return for a command that they cannot run or find."""
NO_TERMINAL = b"\n"
"""On the command's stdin; without any, Ansible gives ssh a terminal, whose end can take the last output with it."""

# Through a pipe (`| tee`, a CI job) Ansible's output comes in blocks of 8 KiB, and nobody would see it go on for half
# an hour. The process that prints imports this module, too, and only there is it of use.
if isinstance(sys.stdout, io.TextIOWrapper):
    sys.stdout.reconfigure(line_buffering=True)


class ActionModule(ActionBase):
    """See the module's docstring."""

    TRANSFERS_FILES = False
    _requires_connection = True

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Wait, and return the task's result."""
        result: dict[str, Any] = super().run(tmp, task_vars)
        _, parameters = self.validate_argument_spec(
            argument_spec={
                "project_dir": {"type": "str"},
                "service": {"type": "str", "default": "vllm"},
                "container": {"type": "str"},
                "absent_timeout": {"type": "float", "default": 60.0},
                "unreachable_timeout": {"type": "float", "default": 600.0},
            },
            required_one_of=[("project_dir", "container")],
            mutually_exclusive=[("project_dir", "container")],
        )
        if self._task.check_mode:
            return result | {"skipped": True, "msg": "would have waited until the service is ready, but for check mode"}
        self._host = (task_vars or {}).get("inventory_hostname", "")
        self._quiet = self._task.no_log or not _output_is_for_people()
        self._began = time.monotonic()
        if parameters["container"]:
            self._enter = f"docker exec {shlex.quote(parameters['container'])}"
            logs = f"docker logs {shlex.quote(parameters['container'])}"
        else:
            directory, service = shlex.quote(parameters["project_dir"]), shlex.quote(parameters["service"])
            self._enter = f"docker compose exec -T {service}"
            logs = f"docker compose --project-directory {directory} logs {service}"

        outcome = self._wait(
            parameters["project_dir"] or "/", parameters["absent_timeout"], parameters["unreachable_timeout"]
        )
        status = outcome["status"] or {}
        ready = outcome["verdict"] == "ready"
        hint = f"All that the container printed: {logs}\nWhen the cause is gone, run the play again."
        return result | {
            "changed": False,
            "failed": not ready,
            "ready": ready,
            "verdict": outcome["verdict"],
            "phase": status.get("phase"),
            "seconds": outcome["seconds"],
            "diagnosis": None if ready else _without_text(status.get("diagnosis")),
            "msg": outcome["message"] if ready else _as_block(f"{outcome['message']}\n\n{hint}"),
        }

    def _wait(self, directory: str, absent_timeout: float, unreachable_timeout: float) -> dict[str, Any]:
        """Poll until there is a verdict; return the last piece of the wait."""
        memory: str | None = None
        trouble = ""
        last_contact = time.monotonic()
        absent_since: float | None = None
        while True:
            try:
                done = self._poll(directory, memory)
            except AnsibleConnectionFailure as failure:
                if time.monotonic() - last_contact > unreachable_timeout:
                    raise
                # Time in which nobody could look is not time without the container.
                absent_since = None
                if not trouble.startswith("out of reach"):
                    trouble = f"out of reach, the start goes on: {failure}"
                    self._say(trouble)
                time.sleep(PAUSE_SECONDS)
                continue
            last_contact = time.monotonic()
            piece = _last_object(done["stdout"])
            if piece is None:
                absent_since = absent_since or last_contact
                why, final = _complaint(done)
                absent = last_contact - absent_since
                if final or absent >= absent_timeout:
                    message = why if final else f"{why}, for {absent:.0f} s"
                    return {"verdict": "nobody", "message": message, "status": None, "seconds": self._elapsed()}
                if trouble != why:
                    trouble = why
                    self._say(why)
                time.sleep(PAUSE_SECONDS)
                continue
            absent_since = None
            memory = piece["memory"]
            if piece["news"] or trouble:
                self._say(piece["line"])
            trouble = ""
            if piece["verdict"] is not None:
                return piece

    def _poll(self, directory: str, memory: str | None) -> dict[str, Any]:
        wait = ["aerie", "wait", "--piece", str(POLL_SECONDS), *(["--memory", memory] if memory else [])]
        environment = self._compute_environment_string()
        # timeout is coreutils': a Docker daemon that hangs must not hold up the play.
        bounded = f"timeout --kill-after=5 {ANSWER_SECONDS} {self._enter} {shlex.join(wait)} </dev/null"
        # All that is said on the host goes to stdout, so that stderr is what ssh or sudo have to say of themselves.
        done: dict[str, Any] = self._low_level_execute_command(
            f"exec 2>&1; cd -- {shlex.quote(directory)} || exit {NOT_THERE[0]}; {environment} {bounded}",
            in_data=NO_TERMINAL,
        )
        return done

    def _elapsed(self) -> float:
        return round(time.monotonic() - self._began, 1)

    def _say(self, text: str) -> None:
        if self._quiet:
            return
        minutes, seconds = divmod(int(self._elapsed()), 60)
        line = " ".join(f"    {self._host} {minutes}:{seconds:02d} {text}".splitlines())
        self._display.display(line[:LONGEST_LINE])


def _as_block(text: str) -> str:
    """Return `text` without what keeps YAML, as Ansible prints a result, from writing it as lines: one with escapes."""
    lines = (line.expandtabs().rstrip() for line in text.splitlines())
    return "\n".join("".join(each if each.isprintable() else "?" for each in line) for line in lines)


def _without_text(diagnosis: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return it without its long forms: the text is in `msg`, and Ansible prints every field of a failure."""
    if diagnosis is None:
        return None
    short = {name: value for name, value in diagnosis.items() if name != "text"}
    if short["root"]:
        short["root"] = {name: value for name, value in short["root"].items() if name != "excerpt"}
    return short


def _output_is_for_people() -> bool:
    """Return whether the stdout callback is `default` or built on it; others, such as `json`, write for programs."""
    name = constants.config.get_config_value("DEFAULT_STDOUT_CALLBACK")
    callback = callback_loader.get(name, class_only=True)
    return callback is not None and issubclass(callback, DefaultCallback)


def _last_object(text: str) -> dict[str, Any] | None:
    """Return the last line of `text` that is a JSON object: a login may print something, too."""
    for line in reversed(text.splitlines()):
        try:
            read = json.loads(line)
        except ValueError:
            continue
        if isinstance(read, dict):
            return read
    return None


def _complaint(done: dict[str, Any]) -> tuple[str, bool]:
    """Return why there was no answer, in one line, and whether it is in vain to ask again."""
    said, aside = ([line.strip() for line in done[each].splitlines() if line.strip()] for each in ("stdout", "stderr"))
    last = said[-1] if said else f"exit status {done['rc']}" + (f" ({aside[-1]})" if aside else "")
    if done["rc"] == USAGE_ERROR and "aerie" in last:
        return (
            f"the aerie in the container is of another version than this play and refuses what it is asked ({last}). "
            "Bring this version's image to the host and recreate the container"
        ), True
    if done["rc"] == TIMED_OUT:
        return f"Docker did not answer in {ANSWER_SECONDS} s", False
    return f"the container does not answer: {last}", done["rc"] in NOT_THERE
