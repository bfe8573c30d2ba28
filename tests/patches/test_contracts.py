"""Every patch of the series has a contract: a program that passes inside the image, and fails there without the patch.

A contract is `contracts/<name of the patch>.py`. Its counterpart, the reason that it gives without its patch, stands
below, so that it cannot fail for a reason of its own.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

CONTRACTS = Path(__file__).parent / "contracts"
WITHOUT = {
    "cpu-attn-block-size-16": "No common block size for 16",
    "cpu-expand-parameters": "not what the model says",
}

SITE_PACKAGES = "/opt/venv/lib/python3.11/site-packages"
ENGINE = [
    "-e", "VLLM_CPU_KVCACHE_SPACE=1", "-e", "VLLM_CPU_OMP_THREADS_BIND=nobind",
    # Waiting OpenMP threads spin: two on a machine that does something else as well are slower than one.
    "-e", "OMP_NUM_THREADS=1",
    "-v", f"{CONTRACTS}:/contracts:ro",
]  # fmt: skip
TIMEOUT = 900  # seconds; two engine starts take 60 where nothing else runs


def test_the_series_names_every_patch_and_every_patch_has_a_contract(series, patched_files):
    patches = {path.stem for path in series.glob("*.patch")}
    assert {Path(name).stem for name in patched_files} == patches
    assert {path.stem for path in CONTRACTS.glob("*.py")} == patches
    assert set(WITHOUT) == patches


def test_the_contract_holds_in_the_image(patch_file, in_image):
    done = in_image("python", f"/contracts/{patch_file.stem}.py", options=ENGINE, check=False, timeout=TIMEOUT)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


def test_the_contract_breaks_without_the_patch(patch_file, image, in_image, patched_files, tmp_path):
    options = [*ENGINE]
    for file in reverted(patch_file, patched_files[patch_file.name], image, tmp_path):
        options += ["-v", f"{file}:{SITE_PACKAGES}/{file.relative_to(tmp_path)}:ro"]
    done = in_image("python", f"/contracts/{patch_file.stem}.py", options=options, check=False, timeout=TIMEOUT)
    assert done.returncode != 0
    assert WITHOUT[patch_file.stem] in done.stdout + done.stderr


def reverted(patch_file: Path, files: list[str], image: str, folder: Path) -> list[Path]:
    """Copy the files that a patch changes out of the image and take the patch out of them."""
    for file in files:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        read = ["docker", "run", "--rm", "--no-healthcheck", "--entrypoint", "cat", image, f"{SITE_PACKAGES}/{file}"]
        (folder / file).write_bytes(subprocess.run(read, capture_output=True, check=True).stdout)
    subprocess.run(["git", "apply", "--reverse", str(patch_file)], cwd=folder, check=True)
    return [folder / file for file in files]
