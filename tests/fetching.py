"""`aerie model fetch` as a child process against tests/hub_server.py, and a look at what it has published."""

import hashlib
import json
import os
import signal
import stat
import subprocess
import sys
import textwrap
import time
from dataclasses import dataclass, field
from pathlib import Path

from aerie.cache.layout import Store, load_manifest

_SOURCES = Path(__file__).resolve().parent.parent / "src"
REPOSITORY = "moonshotai/Kimi-K2.5"
NAME = "Kimi-K2.5"
_SETTINGS = {
    "aerie.cache.fetch.RESERVE": 0,
    "aerie.cache.fetch.FIRST_PAUSE": 0.01,
    "aerie.cache.fetch.LIST_ATTEMPTS": 3,
    "aerie.cache.patience.FIRST_PAUSE": 0.01,
    "aerie.cache.patience.LONGEST_PAUSE": 0.02,
    "aerie.cache.patience.ATTEMPTS": 4,
}
_PROGRAM = """
import importlib, json, sys
for name, value in json.loads(sys.argv[1]).items():
    module, _, attribute = name.rpartition(".")
    setattr(importlib.import_module(module), attribute, value)
{more}
from aerie.cli import main
sys.argv[1:2] = []
sys.exit(main())
"""


@dataclass
class Done:
    """How a child ended."""

    code: int
    out: str
    err: str
    seconds: float


@dataclass
class Fetcher:
    """Fetches one repository from a hub into a models directory."""

    hub: object
    models: Path
    environment: dict[str, str] = field(default_factory=dict)
    settings: dict[str, object] = field(default_factory=dict)
    more: str = ""
    """Python that the child runs first."""

    def command(self, *arguments: str, source: str = REPOSITORY) -> list[str]:
        settings = json.dumps(_SETTINGS | self.settings)
        program = _PROGRAM.replace("{more}", textwrap.dedent(self.more))
        endpoint = ("--endpoint", self.hub.url) if source == REPOSITORY and "--endpoint" not in arguments else ()
        words = ("model", "fetch", source, "--models-dir", str(self.models), *endpoint, *arguments)
        return [sys.executable, "-c", program, settings, *words]

    def environ(self) -> dict[str, str]:
        keep = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
        for name in ("HF_TOKEN", "HF_HUB_OFFLINE", "HF_ENDPOINT"):
            keep.pop(name, None)
        home = {"HF_HOME": str(self.models / ".no-home"), "PYTHONPATH": str(_SOURCES)}
        return keep | home | self.environment

    def start(self, *arguments: str, **options) -> subprocess.Popen:
        return subprocess.Popen(
            self.command(*arguments, **options),
            env=self.environ(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *arguments: str, timeout: float = 120, **options) -> Done:
        began = time.monotonic()
        child = self.start(*arguments, **options)
        try:
            out, err = child.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            child.send_signal(signal.SIGKILL)
            child.communicate()
            raise
        assert "Traceback" not in err, err
        return Done(child.returncode, out, err, time.monotonic() - began)

    @property
    def model(self):
        return Store(self.models).model(NAME)

    def published(self) -> Path | None:
        revision = self.model.current()
        return None if revision is None else self.model.revision_path(revision)


def check_published(fetcher: Fetcher, files: dict[str, bytes | Path]) -> None:
    """Fail unless just these files are published and current, with a right manifest, right modes, and no staging."""
    path = fetcher.published()
    assert path is not None
    manifest = load_manifest(path)
    found = {str(each.relative_to(path)) for each in path.rglob("*") if not each.is_dir()}
    assert found == set(files) | {"aerie-manifest.json"}
    for file in manifest.files:
        content = files[file.path]
        expected = digest(content)
        assert digest(path / file.path) == expected == file.sha256, file.path
        mode = (path / file.path).lstat().st_mode
        assert stat.S_ISREG(mode)
        assert stat.S_IMODE(mode) == 0o444
    assert {file.path for file in manifest.files} == set(files)
    assert fetcher.model.staging_keys() == []


def safetensors(size: int) -> bytes:
    """Return a file of so many bytes, 128 at least, with one tensor of random name and content."""
    data = size - 8 - 120
    header = json.dumps({os.urandom(8).hex(): {"dtype": "U8", "shape": [data], "data_offsets": [0, data]}}).encode()
    return (120).to_bytes(8, "little") + header.ljust(120) + os.urandom(data)


def nothing_published(fetcher: Fetcher) -> bool:
    return fetcher.model.current() is None and fetcher.model.revisions() == []


def digest(content: bytes | Path) -> str:
    if isinstance(content, bytes):
        return hashlib.sha256(content).hexdigest()
    with content.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
