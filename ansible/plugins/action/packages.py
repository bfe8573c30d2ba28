"""Install packages with apt-get, as `watched` runs a command; wait for apt's locks, and tell why it failed.

`ansible.builtin.apt` needs python3-apt on the host, which a bare one lacks, shows nothing for minutes, and leaves a
half-configured package when the connection drops.

The parameters of `watched`, and:
    what           what is installed, as a message about it begins ("The driver")
    lock_timeout   seconds to wait for a lock of apt's or dpkg's; cmd gives them to apt-get, too (DPkg::Lock::Timeout)
    lock_variable  name of the variable that sets those
    meanings       what a kind of failure (KINDS in aerie_host.apt) means here and what helps, where that is special
    others         regular expression; lines in which it is found are of sources that do not matter here (default: none)

A failure is one message, of what it means, what helps, and apt's own complaints; the rest stays in the log.
"""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path
from typing import Any, ClassVar

from ansible.plugins.loader import action_loader

# Only modules find what is in there by themselves.
sys.path.append(str(Path(__file__).parents[1] / "module_utils"))
from aerie_host import apt

LOCK_PAUSE_SECONDS = 3.0

Watched = action_loader.get("watched", class_only=True)


class ActionModule(Watched):
    """See the module's docstring."""

    ARGUMENTS: ClassVar[dict[str, Any]] = {
        **Watched.ARGUMENTS,
        "what": {"type": "str", "required": True},
        "lock_timeout": {"type": "float", "required": True},
        "lock_variable": {"type": "str", "required": True},
        "meanings": {"type": "dict", "default": {}, "options": {kind: {"type": "str"} for kind in apt.KINDS}},
        "others": {"type": "str"},
    }

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Run, wait for a lock as long as there is time, and return the task's result."""
        _, parameters = self.validate_argument_spec(argument_spec=self.ARGUMENTS)
        timeout, variable, others = (parameters[name] for name in ("lock_timeout", "lock_variable", "others"))
        deadline = None
        while True:
            result: dict[str, Any] = super().run(tmp, task_vars)
            if not result.get("failed"):
                return result
            lines = [line for line in result["stdout_lines"] if not (others and re.search(others, line))]
            kind = apt.kind_of(lines)
            if kind not in apt.LOCKED or apt.waited(lines, kind):
                break
            if deadline is None:
                deadline = time.monotonic() + timeout
                self._say(f"waits for {apt.holder(lines, kind)}, {timeout:g} seconds at most")
            left = deadline - time.monotonic()
            if left <= 0:
                break
            time.sleep(min(left, LOCK_PAUSE_SECONDS))

        if kind:
            meaning = parameters["meanings"].get(kind) or apt.meaning(kind, timeout, variable)
        else:
            meaning = f"It {self._ending(result['rc'])}, so see why"
        host = (task_vars or {}).get("inventory_hostname", "")
        return {
            "failed": True,
            "changed": True,
            "rc": result["rc"],
            "log": result["log"],
            "msg": f"{parameters['what']} could not be installed on {host}. {meaning}, then run this again. "
            f"{result['log']}: {' '.join(apt.complaints(lines))}",
        }

    def _compute_environment_string(self, raw_environment_out: dict[str, Any] | None = None) -> str:
        # apt's words are read here; ssh may bring the locale of whoever deploys.
        return f"LC_ALL=C {super()._compute_environment_string(raw_environment_out)}"
