"""`aerie model` as one archive, and the digest that names it together with what it imports."""

from __future__ import annotations

import ast
import hashlib
import tempfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ansible import constants
from ansible.errors import AnsibleError
from ansible.plugins.lookup import LookupBase

if TYPE_CHECKING:
    from collections.abc import Iterator

DOCUMENTATION = """
name: model_tool
short_description: C(aerie model) as one archive
description:
  - Packs those modules of src/aerie that C(aerie model) imports into a zip archive, to be unpacked where Python finds
    modules; C(python -m aerie.cli model) runs it. The same sources give the same bytes, on any controller.
  - Runs on the controller. Returns a dictionary with C(archive), the path of the file, which goes with the playbook's
    end; C(lock), the path of the pins of what it imports besides; and C(digest), 12 hexadecimal digits of both.
options:
  _terms:
    description: The repository.
    type: list
    elements: path
    required: true
"""

LOCK = "requirements/models.lock"
COMMANDS = "aerie.cli"
"""Its functions import what each command needs; only `aerie model` is to run, and that is all of ROOM."""
ROOM = "aerie.cache"


def modules(source: Path) -> list[str]:
    """Return the sorted paths of the modules below `source` that `aerie model` imports.

    Raises OSError where one cannot be read, SyntaxError where one is not Python.
    """
    room = source.joinpath(*ROOM.split("."))
    todo = [COMMANDS, *(_name(path, source) for path in room.rglob("*.py"))]
    found: set[str] = set()
    while todo:
        name = todo.pop()
        path = _file(name, source)
        if path is None or name in found:
            continue
        found.add(name)
        tree = ast.parse(path.read_text(), str(path))
        todo += _imported(tree.body if name == COMMANDS else ast.walk(tree))
    return sorted(path.relative_to(source).as_posix() for name in found if (path := _file(name, source)))


def _name(path: Path, source: Path) -> str:
    parts = path.relative_to(source).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _file(name: str, source: Path) -> Path | None:
    base = source.joinpath(*name.split("."))
    return next((path for path in (base / "__init__.py", base.with_suffix(".py")) if path.is_file()), None)


def _imported(nodes: Iterator[ast.AST] | list[ast.stmt]) -> Iterator[str]:
    """Yield the names that may be modules of aerie, and the packages that they lie in."""
    for node in nodes:
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        for name in names:
            parts = name.split(".")
            if parts[0] == "aerie":
                yield from (".".join(parts[:depth]) for depth in range(1, len(parts) + 1))


def pack(source: Path, archive: Path) -> None:
    """Write `archive` from those modules, without anything that differs from one controller to another."""
    # Not deflated: what that makes of the same bytes depends on the controller's zlib.
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_STORED) as packed:
        for name in modules(source):
            packed.writestr(zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0)), (source / name).read_bytes())


class LookupModule(LookupBase):
    """Entry point for Ansible."""

    def run(self, terms: list[str], variables: dict[str, Any] | None = None, **kwargs: Any) -> list[dict[str, str]]:  # noqa: ARG002
        """Return one dictionary for each repository in terms; AnsibleError where one cannot be read."""
        found = []
        for term in terms:
            directory = tempfile.mkdtemp(prefix="aerie-model-tool-", dir=constants.DEFAULT_LOCAL_TMP)
            archive, lock = Path(directory, "aerie.zip"), Path(term, LOCK)
            try:
                pack(Path(term, "src"), archive)
                digest = hashlib.sha256(hashlib.sha256(archive.read_bytes()).digest() + lock.read_bytes())
            except (OSError, SyntaxError) as error:
                raise AnsibleError(f"model_tool: {error}") from error
            found.append({"archive": str(archive), "lock": str(lock), "digest": digest.hexdigest()[:12]})
        return found
