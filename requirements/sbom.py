# ruff: noqa: INP001 - a program, no part of a package
"""Write the image's SBOM (CycloneDX, JSON) to standard output: the Python environment and Debian's packages.

`sbom.py PYTHON` runs inside the image build, from the build's own environment; PYTHON is the environment described.
"""

import json
import subprocess
import sys
from typing import Any

from packageurl import PackageURL


def python_environment(python: str) -> dict[str, Any]:
    """Return the bill of materials of the environment of an interpreter, as the tool writes it."""
    # Without validation: it takes 20 s, and the tests look at the result.
    command = [sys.executable, "-m", "cyclonedx_py", "environment", "--output-reproducible", "--no-validate", python]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    bom: dict[str, Any] = json.loads(done.stdout)
    return bom


def debian_packages() -> list[dict[str, str]]:
    """Return a component for each installed package, sorted by name."""
    command = ["dpkg-query", "--show", "--showformat", "${Package}\t${Version}\t${Architecture}\n"]
    listing = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    components = []
    for line in sorted(listing.splitlines()):
        name, version, architecture = line.split("\t")
        purl = PackageURL("deb", "debian", name, version, {"arch": architecture}).to_string()
        components.append({"type": "library", "name": name, "version": version, "bom-ref": purl, "purl": purl})
    return components


def main() -> None:
    """Print the bill."""
    bom = python_environment(sys.argv[1])
    bom["components"] += debian_packages()
    json.dump(bom, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
