"""Makes an importable vLLM of archives and wheels that were carried to a machine without a package index.

    python tests/gpu/unpack_carried.py SITE FOLDER...

SITE is the directory for PYTHONPATH; each FOLDER holds *.tar.xz, unpacked there, and *.whl, installed there without
what they require. What was unpacked before is left alone, so folders may come one after the other. docs/gpu.md says how
the archives are made.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def main() -> None:
    """Unpack."""
    site, *folders = (Path(each) for each in sys.argv[1:])
    site.mkdir(parents=True, exist_ok=True)
    for folder in folders:
        for archive in sorted(folder.glob("*.tar.xz")):
            done = site / f".{archive.name}"
            if not done.exists():
                subprocess.run(["tar", "xf", str(archive), "-C", str(site)], check=True)
                done.touch()
        done = site / f".{folder.name}.wheels"
        if (wheels := sorted(map(str, folder.glob("*.whl")))) and not done.exists():
            pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile"]
            subprocess.run([*pip, "--no-cache-dir", "--upgrade", "--target", str(site), *wheels], check=True)
            done.touch()


if __name__ == "__main__":
    main()
