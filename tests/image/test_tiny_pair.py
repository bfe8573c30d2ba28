"""The tiny pair's own unit tests, run where torch, transformers and the installed Aerie are: inside the image."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

CHECKPOINT_TESTS = Path(__file__).resolve().parents[1] / "unit" / "checkpoint"
# The image has no test runner. These are pure Python; what else pytest imports is in vLLM's lock.
RUNNER = ("pytest", "_pytest", "py", "pluggy", "iniconfig")


def mount(path: Path, target: str) -> list[str]:
    return ["--mount", f"type=bind,source={path},target={target},readonly"]


def test_the_tiny_pair_in_the_image_keeps_its_promises(in_image):
    options = [*mount(CHECKPOINT_TESTS, "/tests/checkpoint"), "--env", "PYTHONPATH=/runner"]
    for name in RUNNER:
        file = Path(importlib.import_module(name).__file__)
        place = file.parent if file.name == "__init__.py" else file
        options += mount(place, f"/runner/{place.name}")
    done = in_image(
        *("python", "-m", "pytest", "-c", "/dev/null", "--rootdir", "/tests", "-p", "no:cacheprovider", "-q", "/tests"),
        options=options, check=False, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    # Skipped where torch is missing, these must not be skipped here too.
    summary = done.stdout.strip().splitlines()[-1]
    assert int(re.search(r"(\d+) passed", summary)[1]) > 40, done.stdout
    assert "skipped" not in summary
