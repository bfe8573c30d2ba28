"""Unit tests of models that are written, run where torch, transformers and the installed Aerie are: in the image."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
FOLDERS = ("unit/checkpoint", "unit/rehearsal")
SHARED = ("sparse_checkpoint.py", "models")
# The image has no test runner. These are pure Python; what else pytest imports is in vLLM's lock.
RUNNER = ("pytest", "_pytest", "py", "pluggy", "iniconfig")


def mount(path: Path, target: str) -> list[str]:
    return ["--mount", f"type=bind,source={path},target={target},readonly"]


def skipped_elsewhere() -> list[str]:
    """Return the tests that need what only the image has, and what they share; the others may need more than it has."""
    tests = [path for folder in FOLDERS for path in sorted((TESTS / folder).glob("test_*.py"))]
    names = [str(path.relative_to(TESTS)) for path in tests if "importorskip(" in path.read_text()]
    return ["unit/checkpoint/conftest.py", *names]


def test_written_models_in_the_image_keep_their_promises(in_image):
    options = ["--env", "PYTHONPATH=/runner"]
    for name in skipped_elsewhere():
        options += mount(TESTS / name, f"/tests/{name}")
    for name in SHARED:
        options += mount(TESTS / name, f"/runner/{name}")
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
    assert int(re.search(r"(\d+) passed", summary)[1]) > 50, done.stdout
    assert "skipped" not in summary
