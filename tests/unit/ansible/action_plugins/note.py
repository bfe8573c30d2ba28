"""In place of a role's tasks: notes that they ran, and does what the host's variable `does` says of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ansible.plugins.action import ActionBase


class ActionModule(ActionBase):
    """Arguments: `role`, `file` (of its tasks), `fails` (a message)."""

    def run(self, tmp: Any = None, task_vars: Any = None) -> dict[str, Any]:  # noqa: ARG002  # as Ansible calls it
        role, file, fails = (self._task.args[name] for name in ("role", "file", "fails"))
        with Path(task_vars["calls"]).open("a") as calls:
            calls.write(f"{task_vars['inventory_hostname']} {role} {file}\n")
        facts = {}
        for does in task_vars.get("does", ()):
            if (does["role"], does["file"]) == (role, file) and "reboot" in does:
                reasons = task_vars.get("aerie_reboot_reasons", [])
                facts["aerie_reboot_reasons"] = [*reasons, does["reboot"] | {"role": role}]
        return {"failed": bool(fails), "msg": fails, "ansible_facts": facts}
