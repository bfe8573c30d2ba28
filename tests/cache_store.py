"""Models of small files, of real bytes on a real file system, for what the store's tests do with them."""

import hashlib
from pathlib import Path

from aerie.cache.hashing import digest
from aerie.cache.manifest import File, Manifest

FIRST, SECOND, THIRD, FOURTH = ("1" * 40, "2" * 40, "3" * 40, "4" * 40)


def described(directory):
    """Return the files below a directory as a manifest lists them."""
    found = []
    for path in sorted(each for each in Path(directory).rglob("*") if each.is_file()):
        with path.open("rb") as file:
            size = path.stat().st_size
            found.append(File(path.relative_to(directory).as_posix(), size, *digest(file.fileno(), size)))
    return tuple(found)


def make_manifest(files, revision=FIRST, name="Model", **changed):
    given = {"source": "adopted", "tool": "aerie 0", "fetched": "2026-12-01T00:00:00Z", **changed}
    return Manifest(name=name, revision=revision, files=tuple(files), **given)


def write_files(directory, content):
    """Write {path: bytes} below a directory."""
    for path, data in content.items():
        target = Path(directory, path)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)


def publish(model, content, revision=FIRST, *, switch=True, **changed):
    """Publish {path: bytes} as a revision of a model, and return its path."""
    with model.lock("test"):
        staging = model.staging(revision)
        write_files(staging / "files", content)
        manifest = make_manifest(described(staging / "files"), revision, model.name, **changed)
        path = model.publish(staging / "files", manifest, switch=switch)
        staging.rmdir()
        return path


CONTENT = {
    "config.json": b'{"architectures": ["KimiK25ForConditionalGeneration"]}',
    "modeling.py": b"print('hello')\n",
    "empty.txt": b"",
    "assets/vocabulary.bin": hashlib.sha512(b"seed").digest() * 1000,
}
