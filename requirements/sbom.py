"""Write the image's SBOM (CycloneDX, JSON) to standard output: the Python environment and Debian's packages.

`sbom.py PYTHON` runs inside the image build, from the build's own environment; PYTHON is the environment described.
"""

import json
import subprocess
import sys

from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packageurl import PackageURL

SCHEMA = SchemaVersion.V1_6


def python_environment(python: str) -> dict:
    command = [sys.executable, "-m", "cyclonedx_py", "environment", "--spec-version", SCHEMA.to_version()]
    done = subprocess.run([*command, "--output-reproducible", python], stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout)


def debian_packages() -> list[dict]:
    command = ["dpkg-query", "--show", "--showformat", "${Package}\t${Version}\t${Architecture}\n"]
    listing = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    components = []
    for line in sorted(listing.splitlines()):
        name, version, architecture = line.split("\t")
        purl = PackageURL("deb", "debian", name, version, {"arch": architecture}).to_string()
        components.append({"type": "library", "name": name, "version": version, "bom-ref": purl, "purl": purl})
    return components


def main() -> None:
    bom = python_environment(sys.argv[1])
    bom["components"] += debian_packages()
    text = json.dumps(bom, indent=1)
    if error := JsonStrictValidator(SCHEMA).validate_str(text):
        sys.exit(f"sbom.py: not valid CycloneDX {SCHEMA.to_version()}: {error}")
    print(text)


if __name__ == "__main__":
    main()
