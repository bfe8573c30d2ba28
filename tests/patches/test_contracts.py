"""Every patch of the series has a contract: a program that passes inside the image, and fails there without the patch.

A contract is `contracts/<name of the patch>.py`. Its counterpart, the reason that it gives without its patch, stands
below, so that it cannot fail for a reason of its own.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
CONTRACTS = Path(__file__).parent / "contracts"
RELEASE = "0.32.0"
WITHOUT = {
    "cpu-attn-block-size-16": "No common block size for 16",
    "cpu-expand-parameters": "not what the model says",
}

PATCHES = sorted((REPOSITORY / "patches" / RELEASE).glob("*.patch"))
SITE_PACKAGES = "/opt/venv/lib/python3.11/site-packages"
ENGINE = [
    "-e", "VLLM_CPU_KVCACHE_SPACE=1", "-e", "VLLM_CPU_OMP_THREADS_BIND=nobind",
    # Waiting OpenMP threads spin: two on a machine that does something else as well are slower than one.
    "-e", "OMP_NUM_THREADS=1",
    "-v", f"{CONTRACTS}:/contracts:ro",
]  # fmt: skip
TIMEOUT = 900  # seconds; two engine starts take 60 where nothing else runs


def test_every_patch_has_a_contract_and_every_contract_a_patch():
    patches = {path.stem for path in PATCHES}
    assert {path.stem for path in CONTRACTS.glob("*.py")} == patches
    assert set(WITHOUT) == patches


@pytest.mark.parametrize("patch", PATCHES, ids=lambda path: path.stem)
def test_the_contract_holds_in_the_image(patch, in_image):
    done = in_image("python", f"/contracts/{patch.stem}.py", options=ENGINE, check=False, timeout=TIMEOUT)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


@pytest.mark.parametrize("patch", PATCHES, ids=lambda path: path.stem)
def test_the_contract_breaks_without_the_patch(patch, image, in_image, tmp_path):
    mounts = [option for file in reverted(patch, image, tmp_path) for option in ("-v", f"{tmp_path / file}:{SITE_PACKAGES}/{file}:ro")]
    done = in_image("python", f"/contracts/{patch.stem}.py", options=[*ENGINE, *mounts], check=False, timeout=TIMEOUT)
    assert done.returncode != 0
    assert WITHOUT[patch.stem] in done.stdout + done.stderr


def reverted(patch: Path, image: str, folder: Path) -> list[str]:
    """Copy the files that a patch changes out of the image and take the patch out of them; their names."""
    text = patch.read_text()
    files = [line.split("\t")[0].removeprefix("+++ b/").strip() for line in text.splitlines() if line.startswith("+++ b/")]
    for file in files:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        source = subprocess.run(
            ["docker", "run", "--rm", "--entrypoint", "cat", image, f"{SITE_PACKAGES}/{file}"], capture_output=True, check=True
        ).stdout
        (folder / file).write_bytes(source)
    subprocess.run(["git", "apply", "--reverse", "-"], cwd=folder, input=text, text=True, check=True)
    return files
