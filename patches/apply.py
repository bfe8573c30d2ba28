# ruff: noqa: INP001 - a program, no part of a package
"""Patch the installed vLLM and prove it: `python3 apply.py --help`.

quilt does the patching. What quilt cannot know is proven here, against the hashes in the wheel's RECORD: before, every
file is as the wheel brought it; after, the files that the patches name differ and no others.

Standard library only: this runs inside the image build, before anything else is there.
"""

from __future__ import annotations

import argparse
import base64
import compileall
import hashlib
import os
import shutil
import subprocess
import sys
from importlib.metadata import Distribution, PackagePath, distributions
from pathlib import Path
from typing import TYPE_CHECKING

from series import PatchError, patch_files, refused, series_digest, try_series

if TYPE_CHECKING:
    from collections.abc import Iterator

PACKAGE = "vllm/"


def find_wheel(site_packages: Path) -> Distribution:
    """Return the installed wheel that brought the package, whatever its flavour calls the distribution."""
    found = [
        dist
        for dist in distributions(path=[str(site_packages)])
        if any(str(file) == f"{PACKAGE}__init__.py" for file in dist.files or ())
    ]
    if len(found) != 1:
        raise PatchError(f"{site_packages}: expected one distribution with {PACKAGE}__init__.py, found {len(found)}")
    return found[0]


def deviations(site_packages: Path, wheel: Distribution) -> set[str]:
    """Return the package's files that RECORD does not describe as they are: changed, missing or added."""
    recorded: dict[str, PackagePath] = {str(f): f for f in wheel.files or () if str(f).startswith(PACKAGE)}
    present = {
        str(path.relative_to(site_packages))
        for path in (site_packages / PACKAGE).rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    changed = {name for name in recorded.keys() & present if not _as_recorded(site_packages / name, recorded[name])}
    missing = {name for name in recorded.keys() - present if not name.endswith(".pyc")}
    return changed | missing | (present - recorded.keys())


def _as_recorded(path: Path, recorded: PackagePath) -> bool:
    if recorded.hash is None:
        return False
    digest = hashlib.new(recorded.hash.mode, path.read_bytes()).digest()
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode() == recorded.hash.value


def push(site_packages: Path, series_dir: Path) -> Iterator[tuple[str, set[str]]]:
    """Apply the series one patch at a time with quilt, without fuzz; yield each name with the files that it changed."""
    for name in (file.name for file in patch_files(series_dir)):
        pushed = _quilt(site_packages, series_dir, "push", "--fuzz=0", name)
        if pushed.returncode != 0:
            problem = "; ".join(refused(pushed.stdout)) or pushed.stdout
            raise PatchError(f"{name} does not apply without fuzz, refresh it (patches/README.md): {problem}")
        files = set(_quilt(site_packages, series_dir, "files", name).stdout.split())
        if foreign := {file for file in files if not (file.startswith(PACKAGE) and file.endswith(".py"))}:
            raise PatchError(f"{name}: only {PACKAGE}**.py of a wheel can be patched, not {', '.join(sorted(foreign))}")
        yield name, files


def _quilt(site_packages: Path, series_dir: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["quilt", "--quiltrc", "-", *arguments],
        cwd=site_packages,
        env=os.environ | {"QUILT_PATCHES": str(series_dir), "QUILT_SERIES": "series", "LC_ALL": "C"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


def _other_release(site_packages: Path, series_dir: Path, wheel: Distribution) -> str:
    """Say that the wheel is of another release, and which patches do not fit it."""
    lines = [f"the series is for vLLM {series_dir.name}, but {wheel.name} {wheel.version} is installed"]
    unfit = [str(trial) for trial in try_series(site_packages, series_dir) if trial.outcome != "applies"]
    return "\n  ".join(lines + (unfit or ["each of its patches would apply, but nobody has tried the result"]))


def apply(site_packages: Path, series_dir: Path) -> set[str]:
    """Patch, prove and compile; return the files that changed."""
    wheel = find_wheel(site_packages)
    if wheel.version.split("+")[0] != series_dir.name:
        raise PatchError(_other_release(site_packages, series_dir, wheel))
    if before := deviations(site_packages, wheel):
        raise PatchError(f"{wheel.name} {wheel.version} is not as its RECORD says: {', '.join(sorted(before))}")

    named: set[str] = set()
    for name, files in push(site_packages, series_dir):
        named |= files
        print(f"patched: {name} ({', '.join(sorted(files))})")
    shutil.rmtree(site_packages / ".pc", ignore_errors=True)

    if (after := deviations(site_packages, wheel)) != named:
        raise PatchError(f"the patches name {sorted(named)}, but what changed is {sorted(after)}")
    for file in sorted(named):
        if not compileall.compile_file(site_packages / file, quiet=1, force=True):
            raise PatchError(f"{file} is no valid Python once patched")
    return named


def hand_over(site_packages: Path, files: set[str], overlay: Path) -> None:
    """Copy files, with their bytecode, below `overlay` as they stand below the root."""
    for file in files:
        source = site_packages / file
        bytecode = source.parent / "__pycache__" / f"{source.stem}.{sys.implementation.cache_tag}.pyc"
        for path in (source, bytecode):
            target = overlay / path.relative_to("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, target)


def write_record(series_dir: Path, record: Path) -> None:
    """Copy a series and its patches into `record`, with the digest in a file of that name."""
    record.mkdir(parents=True)
    for file in (series_dir / "series", *patch_files(series_dir)):
        shutil.copy(file, record)
    (record / "digest").write_text(f"{series_digest(series_dir)}\n")


def require(expected: str, series_dir: Path) -> None:
    """Raise PatchError where a series is not the expected one."""
    if (digest := series_digest(series_dir)) != expected:
        raise PatchError(f"the digest of {series_dir} is {digest}, but the Dockerfile's PATCHES_DIGEST says {expected}")


def main() -> int:
    """Run the command line; 1 and one message where the package cannot be patched as asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("series_dir", type=Path, help="directory of one release: series and patches")
    parser.add_argument("--site-packages", type=Path, help="where vLLM is installed")
    parser.add_argument("--overlay", type=Path, help="copy the changed files below this directory")
    parser.add_argument("--record", type=Path, metavar="DIR", help="copy the series and its digest into this directory")
    parser.add_argument("--expect", metavar="DIGEST", help="refuse any other series than this")
    parser.add_argument("--digest", action="store_true", help="print the series' digest and do nothing else")
    args = parser.parse_args()
    if not args.digest and args.site_packages is None:
        parser.error("--site-packages is required to apply a series")
    series_dir = args.series_dir.resolve()
    try:
        if args.digest:
            print(series_digest(series_dir))
            return 0
        site_packages = args.site_packages.resolve()
        changed = apply(site_packages, series_dir)
        if args.overlay is not None:
            hand_over(site_packages, changed, args.overlay)
        if args.record is not None:
            write_record(series_dir, args.record)
        # Last, so that somebody who is still at work on a patch hears of the patch first.
        if args.expect is not None:
            require(args.expect, series_dir)
    except (PatchError, OSError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
