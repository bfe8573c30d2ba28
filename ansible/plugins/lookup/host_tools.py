"""The package aerie_host as one file that the host's Python runs."""

from __future__ import annotations

import tempfile
import zipfile
from pathlib import Path
from typing import Any

from ansible import constants
from ansible.plugins.lookup import LookupBase

DOCUMENTATION = """
name: host_tools
short_description: The package aerie_host as one file that the host's Python runs
description:
  - Packs plugins/module_utils/aerie_host into a zip archive that C(python3) runs as it is. The same sources give the
    same bytes, so that copying it changes nothing where nothing changed.
  - Runs on the controller. Returns the path of the file, which goes with the playbook's end.
options:
  _terms:
    description: None.
"""

PACKAGE = Path(__file__).parents[1] / "module_utils/aerie_host"
MAIN = "from aerie_host.__main__ import main\n\nraise SystemExit(main())\n"


def pack(package: Path, archive: Path) -> None:
    """Write `archive` from the modules of `package`, without anything that differs from one controller to another."""
    sources = {f"{package.name}/{path.name}": path.read_text() for path in sorted(package.glob("*.py"))}
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as packed:
        for name, text in {"__main__.py": MAIN, **sources}.items():
            packed.writestr(zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0)), text, zipfile.ZIP_DEFLATED)


class LookupModule(LookupBase):
    """Entry point for Ansible."""

    def run(self, terms: list[Any], variables: dict[str, Any] | None = None, **kwargs: Any) -> list[str]:  # noqa: ARG002
        """Return the path as the only element."""
        directory = tempfile.mkdtemp(prefix="aerie-host-tools-", dir=constants.DEFAULT_LOCAL_TMP)
        archive = Path(directory, "aerie_host")
        pack(PACKAGE, archive)
        return [str(archive)]
