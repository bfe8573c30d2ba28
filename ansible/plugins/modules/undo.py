"""Record what is there before a role's first change, and put it back: the way back that undo.yml goes."""

from __future__ import annotations

import contextlib
from typing import Any

from ansible.module_utils.aerie_host import undo, undo_host
from ansible.module_utils.basic import AnsibleModule

DOCUMENTATION = """
module: undo
short_description: Record what is there before a role's first change, and put it back
description:
  - Keeps in C(/var/lib/aerie/undo.json) (mode 0600), for each role, what stood there before it. A record once made is
    never changed, so every run of a role may begin with the same task.
  - Recording is never reported as a change. In check mode it writes nothing and fails on nothing.
  - Putting back leaves alone, and tells, what somebody else changed after the role had written it; that stays recorded.
options:
  record:
    description: The role for which something is recorded.
    type: str
  restore:
    description: The role whose changes are undone. Nothing is done where nothing is recorded.
    type: str
  files:
    description:
      - Files, links and directories that the role will write, as they are now, absent ones and the missing directories
        above them included.
    type: list
    elements: path
    default: []
  units:
    description: systemd units that the role enables, masks, starts or stops.
    type: list
    elements: str
    default: []
  holds:
    description: Packages that the role holds or releases.
    type: list
    elements: str
    default: []
  values:
    description: Runtime values that the role sets, below C(/proc) or C(/sys).
    type: list
    elements: path
    default: []
  packages:
    description: Remember what is installed; just before the role's first installation.
    type: bool
    default: false
  installed:
    description:
      - What came since C(packages) is the role's, and goes with it. Best in an C(always) beside the installation, so
        that also what a broken one left is known. Without an earlier C(packages) it does nothing.
    type: bool
    default: false
  written:
    description:
      - The role is through with all that is recorded for it, and what is there now is its work; at each run's end.
        Without it what somebody else changes cannot be told from what the role wrote, and is undone.
    type: bool
    default: false
  only:
    description: With C(restore), names of what alone is put back, for a role that does not set it any more.
    type: list
    elements: str
  keep_packages:
    description: With C(restore), a reason for which packages, units and holds stay as they are.
    type: str
    default: ""
"""

EXAMPLES = """
- name: Record what is there before
  undo:
    record: nvidia_driver
    files: [/etc/modprobe.d/aerie-nvidia.conf]
    units: [nvidia-persistenced.service]
    holds: [nvidia-open]
    values: [/proc/sys/kernel/numa_balancing]
    packages: true

- name: Record what came
  undo: {record: nvidia_driver, installed: true}

- name: Record what the role has written
  undo: {record: nvidia_driver, written: true}

- name: Put it back
  undo: {restore: nvidia_driver}
"""

RETURN = """
did:
  description: What was put back, one line each; what was newly recorded, with C(record).
  returned: always
  type: list
kept:
  description: What was left alone, and why, one line each.
  returned: always
  type: list
"""


def record(module: AnsibleModule) -> dict[str, Any]:
    """Record what the parameters name."""
    parameters = module.params
    whole = undo_host.load()
    entry = whole.setdefault(parameters["record"], undo.Entry())
    did = [name for kind in undo.KINDS for name in undo_host.record_first(entry, kind, parameters[kind])]
    if parameters["packages"]:
        undo.note_start(entry, undo_host.packages())
    if parameters["installed"] and entry.packages.at_start is not None:
        did += undo.note_installed(entry, undo_host.packages())
    if parameters["written"]:
        undo_host.record_written(entry)
    if not module.check_mode:
        undo_host.save(whole)
    return {"changed": False, "did": did, "kept": []}


def restore(module: AnsibleModule) -> dict[str, Any]:
    """Put back what is recorded for a role."""
    role = module.params["restore"]
    outcome = undo_host.restore(
        undo_host.load(),
        role,
        check=module.check_mode,
        only=module.params["only"],
        keep_packages=module.params["keep_packages"],
    )
    return {
        "changed": bool(outcome.did),
        "did": outcome.did,
        "kept": outcome.kept,
        "msg": "\n".join([*outcome.did, *outcome.kept]) or f"nothing is recorded for {role}",
        "diff": {"prepared": "".join(f"{line}\n" for line in [*outcome.did, *outcome.kept])},
    }


def main() -> None:
    """Run the module."""
    names: dict[str, Any] = {"type": "list", "elements": "str", "default": []}
    paths: dict[str, Any] = {"type": "list", "elements": "path", "default": []}
    switch: dict[str, Any] = {"type": "bool", "default": False}
    module = AnsibleModule(
        argument_spec={
            "record": {"type": "str"},
            "restore": {"type": "str"},
            "files": paths,
            "units": names,
            "holds": names,
            "values": paths,
            "packages": switch,
            "installed": switch,
            "written": switch,
            "only": {"type": "list", "elements": "str"},
            "keep_packages": {"type": "str", "default": ""},
        },
        required_one_of=[("record", "restore")],
        mutually_exclusive=[("record", "restore")],
        supports_check_mode=True,
    )
    try:
        with contextlib.nullcontext() if module.check_mode else undo_host.locked():
            result = record(module) if module.params["record"] else restore(module)
    except (undo.UndoError, OSError) as error:
        if module.check_mode and module.params["record"]:
            module.warn(str(error))
            module.exit_json(changed=False, did=[], kept=[])
        module.fail_json(msg=str(error))
    module.exit_json(**result)


if __name__ == "__main__":
    main()
