"""Run the module host_check, and show its table: an unchanged task is otherwise not shown at all."""

from __future__ import annotations

from typing import Any

from ansible.plugins.action import ActionBase


class ActionModule(ActionBase):
    """Entry point for Ansible."""

    _supports_check_mode = True

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return what the module returns."""
        result: dict[str, Any] = super().run(tmp, task_vars)
        result |= self._execute_module("host_check", self._task.args, task_vars=task_vars)
        if "table" in result:
            host = (task_vars or {}).get("inventory_hostname", "")
            self._display.display(f"\n{host}\n{result['table']}\n")
        return result
