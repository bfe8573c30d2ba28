"""Makes an importable vLLM of archives and wheels that were carried to a machine without a package index.

    python tests/gpu/unpack_carried.py SITE FOLDER...

SITE is the directory for PYTHONPATH; each FOLDER holds *.whl, installed there without what they require, and pieces of
archives, *.tar.xz.NN: all of them together, in the order of their names, are unpacked there. docs/gpu.md says how
they are made.
"""

from __future__ import annotations

import lzma
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


def main() -> None:
    """Unpack."""
    site, *folders = (Path(each) for each in sys.argv[1:])
    site.mkdir(parents=True, exist_ok=True)
    wheels = sorted(str(path) for folder in folders for path in folder.glob("*.whl"))
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile"]
    installing = subprocess.Popen([*pip, "--no-cache-dir", "--upgrade", "--target", str(site), *wheels])
    pieces = sorted((path for folder in folders for path in folder.glob("*.tar.xz.*")), key=lambda path: path.name)
    with subprocess.Popen(["tar", "xf", "-", "--ignore-zeros", "-C", str(site)], stdin=subprocess.PIPE) as unpacking:
        for block in decompressed(pieces):
            unpacking.stdin.write(block)
        unpacking.stdin.close()
    if installing.wait() or unpacking.returncode:
        raise SystemExit("not all of it was unpacked: are all folders here?")


def decompressed(pieces: list[Path]) -> Iterator[bytes]:
    """Yield what the pieces hold, which may be several archives behind one another; xz(1) may be missing here."""
    decoder = lzma.LZMADecompressor()
    for piece in pieces:
        with piece.open("rb") as file:
            while block := file.read(1 << 20):
                while block:
                    yield decoder.decompress(block)
                    block = decoder.unused_data
                    if decoder.eof:
                        decoder = lzma.LZMADecompressor()


if __name__ == "__main__":
    main()
