"""Judge a host that is to serve with its GPUs: everything at once, and nothing is changed."""

from __future__ import annotations

from typing import Any

from ansible.module_utils.aerie_host import finding, findings, machine
from ansible.module_utils.basic import AnsibleModule

DOCUMENTATION = """
module: host_check
short_description: Judge a host that is to serve with its GPUs
description:
  - Reads PCI configuration spaces, /proc, the driver and the container engine, measures for a moment how fast the
    models' directory reads, and judges all of it. It writes nothing, also where it does not run in check mode.
  - It never fails for what it finds; C(failed_checks) names what only a person can mend.
options:
  data_dir:
    description: Directory of the models; empty leaves it out.
    type: str
    default: ""
  data_read_seconds:
    description: How long to measure its read rate; 0 leaves the measurement out.
    type: float
    default: 1.0
  wanted:
    description: What the host is to have, as in C(aerie_host.finding.Wanted).
    type: dict
    default: {}
"""

RETURN = """
findings:
  description: The lines, each with check, subject, value, wanted, verdict, role, remedy, and if a failure was accepted.
  returned: always
  type: list
table:
  description: The lines as text.
  returned: always
  type: str
failures:
  description: What only a person can mend and was not accepted, a line each.
  returned: always
  type: str
failed_checks:
  description: Names of the lines that only a person can mend and that were not accepted.
  returned: always
  type: list
report:
  description: All of it for other programs, with the topology's matrix and the machine as it was read.
  returned: always
  type: dict
"""


def _names(accept: list[str] | str) -> tuple[str, ...]:
    """Read a list, or a string with commas, as the command line gives it."""
    names = accept.split(",") if isinstance(accept, str) else accept
    return tuple(name.strip() for name in names if name.strip())


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "data_dir": {"type": "str", "default": ""},
            "data_read_seconds": {"type": "float", "default": 1.0},
            "wanted": {"type": "dict", "default": {}},
        },
        supports_check_mode=True,
    )
    given: dict[str, Any] = module.params["wanted"]
    try:
        wanted = finding.Wanted(**{**given, "accept": _names(given.get("accept", ()))})
        host = machine.read_machine(data=module.params["data_dir"], read_seconds=module.params["data_read_seconds"])
        found = findings.judge(host, wanted)
    except (TypeError, ValueError) as error:
        module.fail_json(msg=str(error))
    report = findings.to_json(host, found)
    module.exit_json(
        changed=False,
        findings=report["findings"],
        table=findings.table(found),
        failures=findings.failures(found),
        failed_checks=[line.name for line in found if line.verdict == "fail"],
        report=report,
    )


if __name__ == "__main__":
    main()
