"""The local connection, cut for as long as a file exists: a network that drops out under a running task."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ansible.errors import AnsibleConnectionFailure
from ansible.plugins.connection.local import Connection as LocalConnection

DOCUMENTATION = """
name: flaky
short_description: local, unless the file of ANSIBLE_FLAKY_CUT exists
description: For tests.
extends_documentation_fragment: [connection_pipelining]
"""


class Connection(LocalConnection):
    """Fails as ssh does when its peer is gone, and has as much to say of itself besides."""

    transport = "flaky"

    def exec_command(self, *args: Any, **options: Any) -> Any:
        if Path(os.environ["ANSIBLE_FLAKY_CUT"]).exists():
            raise AnsibleConnectionFailure("the cable is out")
        code, output, errors = super().exec_command(*args, **options)
        return code, output, b"Warning: the cable is old\n" + errors
