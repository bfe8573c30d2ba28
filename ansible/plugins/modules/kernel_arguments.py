"""Tell which boot loader a host has, and what of the wanted kernel arguments it will pass."""

from __future__ import annotations

from pathlib import Path

from ansible.module_utils.aerie_host import boot
from ansible.module_utils.basic import AnsibleModule

DOCUMENTATION = """
module: kernel_arguments
short_description: Tell which boot loader a host has, and what of the wanted kernel arguments it will pass
description:
  - Knows GRUB and systemd-boot. Reads what they themselves read. Changes nothing.
options:
  wanted:
    description: Kernel arguments, C(name=value).
    type: list
    elements: str
    required: true
  loader:
    description: The boot loader that starts this host.
    type: str
    choices: [auto, grub, systemd-boot]
    default: auto
"""

EXAMPLES = """
- name: Look at what the next boot gets
  kernel_arguments:
    wanted: [iommu=pt]
  register: next_boot
"""

RETURN = """
loader:
  description: The boot loader; empty where C(problem) says why none can be used.
  returned: always
  type: str
problem:
  description: What was found instead of one usable boot loader, and what to do.
  returned: always
  type: str
passed:
  description: All arguments that it will pass to any kernel of this system.
  returned: always
  type: list
lacking:
  description: By title, the menu entries that lack some of them, and which.
  returned: always
  type: dict
not_running:
  description: Those that the running kernel was not started with.
  returned: always
  type: list
conflicts:
  description: Arguments of the site, running or of the next boot, that stand against a wanted one; one sentence each.
  returned: always
  type: list
"""


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "wanted": {"type": "list", "elements": "str", "required": True},
            "loader": {"type": "str", "choices": ["auto", "grub", "systemd-boot"], "default": "auto"},
        },
        supports_check_mode=True,
    )
    root, wanted = Path("/"), module.params["wanted"]
    running = (root / "proc/cmdline").read_text().split()
    entries: list[boot.Entry] = []
    loader = problem = ""
    try:
        loader = boot.choose(boot.find_loaders(root), module.params["loader"]).name
        entries = boot.read_entries(root, loader)
    except boot.LoaderError as error:
        problem = str(error)
    passed = list(dict.fromkeys(word for entry in entries for word in entry.arguments))
    module.exit_json(
        changed=False,
        loader=loader,
        problem=problem,
        passed=passed,
        lacking=boot.lacking(entries, wanted),
        not_running=[word for word in wanted if word not in running],
        conflicts=boot.conflicts([*running, *passed], wanted),
    )


if __name__ == "__main__":
    main()
