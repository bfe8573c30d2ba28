"""What the tests of the sources agree on: a model's directory, published and not."""

import hashlib
import os

import pytest

from aerie.cache.manifest import MANIFEST, SEGMENT, File, Manifest

REVISION = "0123456789abcdef0123456789abcdef01234567"
SHARD = 2 * SEGMENT + 4711
"""Bytes: three segments."""


@pytest.fixture
def model(tmp_path):
    """A directory with a small file, one in a folder and a sparse one of three segments, with data about their ends."""
    directory = tmp_path / "model"
    (directory / "code").mkdir(parents=True)
    (directory / "config.json").write_text('{"model_type": "kimi_k25"}\n')
    (directory / "code/a b's [1].py").write_text("pass\n")
    with (directory / "model-1.safetensors").open("wb") as shard:
        for at in (0, SEGMENT - 5, 2 * SEGMENT - 5, SHARD - 9):
            shard.seek(at)
            shard.write(os.urandom(9))
    return directory


@pytest.fixture
def publish():
    """Return a function that writes the manifest of the files that a directory has, with `changes`."""

    def publish_(directory, **changes):
        files = []
        for path in sorted(directory.rglob("*")):
            if path.is_file() and path.name != MANIFEST:
                content = path.read_bytes()
                pieces = [content[at : at + SEGMENT] for at in range(0, len(content), SEGMENT)]
                digests = tuple(hashlib.sha256(piece).hexdigest() for piece in pieces)
                name = path.relative_to(directory).as_posix()
                files.append(File(name, len(content), hashlib.sha256(content).hexdigest(), digests))
        fields = {
            "name": "Kimi-K2.5", "revision": REVISION, "source": "hf:a/b", "files": tuple(files), "tool": "aerie 1",
            "fetched": "2026-11-30T00:00:00Z",
        }  # fmt: skip
        manifest = Manifest(**(fields | changes))
        (directory / MANIFEST).write_text(manifest.to_json())
        return manifest

    return publish_
