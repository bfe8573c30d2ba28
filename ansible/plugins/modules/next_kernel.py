"""Say which kernel runs, and which one the next boot will start."""

from __future__ import annotations

import os
from pathlib import Path

from ansible.module_utils.aerie_host.next_kernel import read_next_kernel
from ansible.module_utils.basic import AnsibleModule

DOCUMENTATION = """
module: next_kernel
short_description: Say which kernel the next boot will start
description:
  - Reads what GRUB (grub.cfg, grubenv) or systemd-boot (its entries, loader.conf, the EFI variables) will choose.
options: {}
"""

EXAMPLES = """
- name: Find the kernel of the next boot
  next_kernel:
  register: kernels
"""

RETURN = """
running:
  description: The running kernel, as C(uname -r) says it.
  returned: always
  type: str
next:
  description: The next boot's.
  returned: always
  type: str
because:
  description: What decided.
  returned: always
  type: str
"""


def main() -> None:
    """Run the module."""
    module = AnsibleModule(argument_spec={}, supports_check_mode=True)
    running = os.uname().release
    found = read_next_kernel(Path("/"), running)
    module.exit_json(changed=False, running=running, next=found.version, because=found.because)


if __name__ == "__main__":
    main()
