"""Tell how a host's GPUs are connected, and what stands in their traffic's way."""

from __future__ import annotations

from ansible.module_utils.aerie_host import fabric
from ansible.module_utils.basic import AnsibleModule

DOCUMENTATION = """
module: fabric_info
short_description: Tell how a host's GPUs are connected, and what stands in their traffic's way
description:
  - Reads sysfs and C(/proc), as root; needs neither a driver nor pciutils. Changes nothing.
"""

EXAMPLES = """
- name: Look at the ways between the GPUs
  fabric_info:
  register: ways
"""

RETURN = """
fabric:
  description:
    - C(topology) and C(environment), of config/nccl-pcie.*.env; C(gpus) by address, C(numa_nodes) that have GPUs.
    - C(redirecting), the ports whose ACS turns peer traffic around, of C(bridges) on the paths.
    - C(cpu_vendor), C(logical_cpus), C(highest_apic_id), C(command_line) of the kernel in words, C(numa_balancing),
      C(governors), C(link_power).
  returned: always
  type: dict
"""


def main() -> None:
    """Run the module."""
    module = AnsibleModule(argument_spec={}, supports_check_mode=True)
    module.exit_json(changed=False, fabric=fabric.read_fabric())


if __name__ == "__main__":
    main()
