"""Engine trees: a release's `vllm` package with all patches of its series applied, with some of them, or with none.

A tree is the options of a `docker run` that mount the files of the package that differ from what is there already.
"""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING

from series import changed_files, patch_files

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path


def patches_of(series: Path) -> dict[str, list[str]]:
    """For each patch of a series, in order, by its name without `.patch`: the files that it changes."""
    return {patch.stem: changed_files(patch) for patch in patch_files(series)}


def apply(patch: Path, folder: Path, *options: str) -> None:
    """Apply a patch to the files in a folder, which git must not take for a part of a repository around it."""
    environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(folder.parent)}
    subprocess.run(["git", "apply", *options, str(patch)], cwd=folder, env=environment, check=True)


@dataclass(frozen=True)
class Source:
    """A release's package as it lies somewhere: `root` is where a container sees the folder that holds `vllm/`.

    `patched` says whether the series is applied there; `wheel` holds the files that the series changes, as the wheel
    brought them; `options` are what a container needs besides to see it.
    """

    series: Path
    root: str
    patched: bool
    wheel: Path
    options: tuple[str, ...] = ()

    def tree(self, applied: Iterable[str], folder: Path) -> list[str]:
        """Return the options for a tree with just these patches applied; its files are written below `folder`."""
        patches, applied = patches_of(self.series), set(applied)
        if unknown := applied - patches.keys():
            raise ValueError(f"{self.series}: no such patch: {', '.join(sorted(unknown))}")
        if applied == (set(patches) if self.patched else set()):
            return [*self.options]
        files = sorted({file for changed in patches.values() for file in changed})
        for file in files:
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).write_bytes((self.wheel / file).read_bytes())
        for name in patches:
            if name in applied:
                apply(self.series / f"{name}.patch", folder)
        mounts = [["-v", f"{folder / file}:{self.root}/{file}:ro"] for file in files]
        return [*self.options, *(option for mount in mounts for option in mount)]


def image_source(series: Path, image: str, folder: Path) -> Source:
    """Return the image's own package: its files are read out of the image, and the series is taken out of them."""
    root = "/opt/venv/lib/python3.11/site-packages"
    patches = patches_of(series)
    files = sorted({file for changed in patches.values() for file in changed})
    read = ["docker", "run", "--rm", "--no-healthcheck", "--entrypoint", "tar", image, "-C", root, "-cf", "-", *files]
    archive = subprocess.run(read, capture_output=True, check=True).stdout
    subprocess.run(["tar", "-C", folder, "-xf", "-"], input=archive, check=True)
    for name in reversed(patches):
        apply(series / f"{name}.patch", folder, "--reverse")
    return Source(series, root, patched=True, wheel=folder)
