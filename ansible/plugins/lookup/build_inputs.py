"""Which files an image is built from, and the digest that names the image."""

from __future__ import annotations

import fnmatch
import hashlib
from pathlib import Path, PurePosixPath
from typing import Any

from ansible.errors import AnsibleError
from ansible.plugins.lookup import LookupBase

DOCUMENTATION = """
name: build_inputs
short_description: Files and digest of what an image is built from
description:
  - Reads the allowlist in .dockerignore, so that what Docker sees and what is digested are the same files.
  - Of requirements/, only the files of the flavour and of the build itself count.
  - Runs on the controller.
  - Returns a dictionary with C(digest), 12 hexadecimal digits, and C(files), the sorted relative paths.
options:
  _terms:
    description: The repository.
    type: list
    elements: path
    required: true
  flavour:
    description: The target in the Dockerfile.
    type: str
    required: true
  base_image:
    description: Name of the image that the build starts from.
    type: str
    required: true
"""

BUILD_REQUIREMENTS = "build"
"""Stem of the requirements files that every flavour's build reads."""


def build_files(source: Path, flavour: str) -> list[str]:
    """Return the sorted relative paths of all files that the flavour's build reads.

    Raises OSError for a repository without .dockerignore or with a missing entry, ValueError for a pattern other than
    `*`, `!path` and `**/name`.
    """
    allowed = []
    ignored = []
    for line in (source / ".dockerignore").read_text().splitlines():
        pattern = line.strip()
        if not pattern or pattern.startswith("#") or pattern == "*":
            continue
        if pattern.startswith("!") and not set(pattern) & set("*?["):
            allowed.append(pattern[1:].strip("/"))
        elif pattern.startswith("**/") and "/" not in pattern[3:]:
            ignored.append(pattern[3:])
        else:
            raise ValueError(f"{source / '.dockerignore'}: {pattern!r} is none of `*`, `!path` and `**/name`")

    def wanted(name: str) -> bool:
        path = PurePosixPath(name)
        if any(fnmatch.fnmatchcase(part, pattern) for part in path.parts for pattern in ignored):
            return False
        is_requirement = path.parts[0] == "requirements" and path.suffix in {".in", ".overrides", ".lock"}
        return not is_requirement or path.stem in (flavour, BUILD_REQUIREMENTS)

    files = [".dockerignore"]
    for entry in allowed:
        path = source / entry
        if path.is_dir():
            files += [child.relative_to(source).as_posix() for child in path.rglob("*") if child.is_file()]
        elif path.is_file():
            files.append(entry)
        else:
            raise FileNotFoundError(f"{path}, which .dockerignore lets into the build, does not exist")
    return sorted(name for name in files if wanted(name))


def build_digest(source: Path, files: list[str], flavour: str, base_image: str) -> str:
    """Return 12 hexadecimal digits over flavour, base image, and every file's name, executable bit and content."""
    digest = hashlib.sha256(f"{flavour}\0{base_image}\0".encode())
    for name in files:
        path = source / name
        content = path.read_bytes()
        executable = bool(path.stat().st_mode & 0o111)
        # The length separates one file from the next.
        digest.update(f"{name}\0{executable:d}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()[:12]


class LookupModule(LookupBase):
    """See DOCUMENTATION."""

    def run(self, terms: list[str], variables: dict[str, Any] | None = None, **kwargs: Any) -> list[dict[str, Any]]:
        """Return one dictionary for each repository in terms; AnsibleError where one cannot be read."""
        self.set_options(var_options=variables, direct=kwargs)
        flavour = self.get_option("flavour")
        base_image = self.get_option("base_image")
        results = []
        for term in terms:
            source = Path(term)
            try:
                files = build_files(source, flavour)
                results.append({"digest": build_digest(source, files, flavour, base_image), "files": files})
            except (OSError, ValueError) as error:
                raise AnsibleError(f"build_inputs: {error}") from error
        return results
