"""`aerie model`, packed for hosts: complete, without the rest, and the same bytes wherever it is packed."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[3]
SOURCE = REPOSITORY / "src"


def plugin() -> Any:
    path = REPOSITORY / "ansible/plugins/lookup/model_tool.py"
    specification = importlib.util.spec_from_file_location("model_tool", path)
    assert specification
    assert specification.loader
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


model_tool = plugin()


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tool") / "aerie.zip"
    model_tool.pack(SOURCE, path)
    return path


@pytest.fixture(scope="module")
def unpacked(archive: Path) -> Path:
    zipfile.ZipFile(archive).extractall(archive.parent / "lib")
    return archive.parent / "lib"


def run(lib: Path, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a program with the modules in `lib`, and without what this directory and the environment would add."""
    program = f"import sys; sys.path.insert(0, {str(lib)!r})\n{program}"
    return subprocess.run(
        [sys.executable, "-I", "-c", program, *arguments], cwd="/", text=True, capture_output=True, check=False
    )


def test_every_module_in_it_can_be_imported_without_the_others(unpacked: Path) -> None:
    names = [path.relative_to(unpacked).with_suffix("").as_posix() for path in unpacked.rglob("*.py")]
    dotted = [name.removesuffix("/__init__").replace("/", ".") for name in names]
    assert {"aerie", "aerie.cli", "aerie.cache.manifest"} <= set(dotted)
    program = "".join(f"import {name}\n" for name in dotted)
    done = run(unpacked, f"{program}assert aerie.__file__.startswith({str(unpacked)!r}), aerie.__file__\n")
    assert done.returncode == 0, done.stderr


def test_it_answers_and_has_nothing_of_the_service(unpacked: Path) -> None:
    done = run(unpacked, "from aerie.cli import main; sys.exit(main())", "model", "--help")
    assert done.returncode == 0, done.stderr
    assert "usage: aerie model" in done.stdout
    packages = {path.name for path in (unpacked / "aerie").iterdir()}
    assert packages & {"rehearsal", "fabric", "status"} == set()


def test_the_same_sources_give_the_same_bytes_in_another_place(archive: Path, tmp_path: Path) -> None:
    shutil.copytree(SOURCE, tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"), copy_function=shutil.copy)
    model_tool.pack(tmp_path / "src", tmp_path / "again.zip")
    assert (tmp_path / "again.zip").read_bytes() == archive.read_bytes()


def test_what_a_function_of_the_room_imports_comes_along_and_what_one_of_the_commands_imports_does_not(
    tmp_path: Path,
) -> None:
    files = {
        "__init__.py": "",
        "cli.py": "import aerie.port\n\ndef serve():\n    import aerie.supervisor\n",
        "port.py": "",
        "supervisor.py": "",
        "cache/__init__.py": "",
        "cache/verify.py": "def headers():\n    from aerie.checkpoint import safetensors\n",
        "checkpoint/__init__.py": "",
        "checkpoint/safetensors.py": "from aerie.checkpoint.names import SUFFIX\n",
        "checkpoint/names.py": "SUFFIX = ''\n",
        "checkpoint/tiny.py": "",
    }
    for name, text in files.items():
        path = tmp_path / "aerie" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    left_out = {"aerie/supervisor.py", "aerie/checkpoint/tiny.py"}
    assert model_tool.modules(tmp_path) == sorted({f"aerie/{name}" for name in files} - left_out)
