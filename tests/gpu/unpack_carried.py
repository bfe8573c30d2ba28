"""Makes an importable vLLM of archives and wheels that were carried to a machine without a package index.

    python tests/gpu/unpack_carried.py SITE FOLDER...

SITE is the directory for PYTHONPATH; each FOLDER holds *.whl, installed there without what they require, and pieces of
archives, *.tar.xz.NN: all of them together, in the order of their names, are unpacked there. docs/gpu.md says how
they are made.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path


def main() -> None:
    """Unpack."""
    site, *folders = (Path(each) for each in sys.argv[1:])
    site.mkdir(parents=True, exist_ok=True)
    wheels = sorted(str(path) for folder in folders for path in folder.glob("*.whl"))
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile"]
    installing = subprocess.Popen([*pip, "--no-cache-dir", "--upgrade", "--target", str(site), *wheels])
    pieces = sorted((path for folder in folders for path in folder.glob("*.tar.xz.*")), key=lambda path: path.name)
    with subprocess.Popen(["tar", "xJf", "-", "--ignore-zeros", "-C", str(site)], stdin=subprocess.PIPE) as unpacking:
        for piece in pieces:
            with piece.open("rb") as file:
                shutil.copyfileobj(file, unpacking.stdin)
        unpacking.stdin.close()
    if installing.wait() or unpacking.returncode:
        raise SystemExit("not all of it was unpacked: are all folders here?")


if __name__ == "__main__":
    main()
