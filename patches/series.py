# ruff: noqa: INP001 - beside the programs that use it, no part of a package
"""A quilt series: its names, its digest, and what becomes of each patch on the files of another release.

Standard library and patch(1) only: this runs inside the image build, before anything else is there.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Iterator


class PatchError(Exception):
    """The package cannot be patched as asked; the message says what was found and what was expected."""


def patch_names(series: str) -> list[str]:
    """Return the names in a quilt series, in order; PatchError for a line with options, which could weaken it."""
    names = []
    for line in series.splitlines():
        entry = line.split("#", 1)[0].split()
        if len(entry) > 1:
            raise PatchError(f"series: one patch name a line and no options, got {line.strip()!r}")
        names += entry
    return names


def patch_files(series_dir: Path) -> list[Path]:
    """Return the patches of a series, in order; PatchError for one that is named and not there."""
    files = [series_dir / name for name in patch_names((series_dir / "series").read_text())]
    for file in files:
        if not file.is_file():
            raise PatchError(f"{file.name}: named in {series_dir / 'series'}, but there is no such file")
    return files


def pinned_series() -> Path:
    """Return the directory of the series that the Dockerfile's release takes."""
    patches = Path(__file__).resolve().parent
    version = re.search(r"^ARG VLLM_VERSION=(\S+)$", (patches.parent / "Dockerfile").read_text(), re.MULTILINE)
    assert version is not None, "the Dockerfile has no ARG VLLM_VERSION="  # noqa: S101 - not a matter of input
    return patches / version[1]


def changed_files(patch: Path) -> list[str]:
    """Return the files that a patch changes, in its order, relative to site-packages."""
    return re.findall(r"^\+\+\+ b/(\S+)", patch.read_text(), re.MULTILINE)


def series_digest(series_dir: Path) -> str:
    """Return the `sha256:` digest of a series: its names in order and each patch's content, without its comments.

    Raises PatchError for a patch that is named and not there.
    """
    digest = hashlib.sha256()
    for file in patch_files(series_dir):
        digest.update(f"{file.name}\0{hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode())
    return f"sha256:{digest.hexdigest()}"


@dataclass(frozen=True)
class Trial:
    """What became of one patch.

    `upstream`: taking the patch out would work, so its text is there already. `where` lists what was refused of one
    that `conflicts`, and what was found on other lines of one that `applies`.
    """

    patch: str
    outcome: Literal["applies", "upstream", "conflicts"]
    where: list[str]

    def __str__(self) -> str:
        match self.outcome:
            case "applies":
                return f"{self.patch} applies" + (f", moved: {'; '.join(self.where)}" if self.where else "")
            case "upstream":
                return f"{self.patch} is there already"
            case "conflicts":
                return f"{self.patch} does not apply: {'; '.join(self.where)}"


def try_series(tree: Path, series_dir: Path) -> Iterator[Trial]:
    """Try a series on a tree, without fuzz, and leave the tree as it is.

    A patch that does not apply is left out, so that those after it are tried all the same.
    """
    with tempfile.TemporaryDirectory() as scratch:
        for patch in patch_files(series_dir):
            for file in set(re.findall(r"^(?:--- a|\+\+\+ b)/(\S+)", patch.read_text(), re.MULTILINE)):
                copy = Path(scratch, file)
                if (tree / file).is_file() and not copy.exists():
                    copy.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(tree / file, copy)
            tried = _patch(scratch, patch, "--dry-run")
            if tried.returncode == 0:
                _patch(scratch, patch)
                yield Trial(patch.name, "applies", moved(tried.stdout))
            elif _patch(scratch, patch, "--dry-run", "--reverse").returncode == 0:
                yield Trial(patch.name, "upstream", [])
            else:
                yield Trial(patch.name, "conflicts", refused(tried.stdout) or [tried.stdout.strip()])


def _patch(directory: str, patch: Path, *options: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            # --force: ask nothing, and do not take a patch that looks reversed for one.
            [
                "patch",
                "-p1",
                "--fuzz=0",
                "--force",
                "--no-backup-if-mismatch",
                "--input",
                str(patch.resolve()),
                *options,
            ],
            cwd=directory,
            env={"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
    except FileNotFoundError as error:
        raise PatchError("the program patch is not installed here: apt-get install patch") from error


def refused(output: str) -> list[str]:
    """Return what patch(1), alone or under quilt, could not apply: the file, and which hunk at which line of it."""
    found = []
    for file, line in _by_file(output):
        if line == "No file to patch.  Skipping patch.":
            found.append(f"{file} (not there)")
        elif hunk := re.match(r"Hunk #(\d+) FAILED at (\d+)", line):
            found.append(f"{file} (hunk {hunk[1]} at line {hunk[2]})")
    return found


def moved(output: str) -> list[str]:
    """Return what patch(1) found on other lines than the patch says, as `file (hunk 1 by +7 lines)`."""
    return [
        f"{file} (hunk {hunk[1]} by {int(hunk[2]):+} lines)"
        for file, line in _by_file(output)
        if (hunk := re.match(r"Hunk #(\d+) succeeded at \d+ \(offset (-?\d+) lines?\)", line))
    ]


def _by_file(output: str) -> Iterator[tuple[str, str]]:
    """Give each line of patch(1)'s output the file that it speaks of."""
    file = ""
    for line in output.splitlines():
        # The second form: where there is no file, patch(1) shows the lines that should have led it there.
        if begin := re.match(r"(?:patching|checking) file '?(.+?)'?$|\|\+\+\+ b/(\S+)", line):
            file = begin[1] or begin[2]
        yield file, line
