"""The two lists of every public variable, and the plays' own variables."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ANSIBLE = Path(__file__).parents[3] / "ansible"
PLAYS: dict[str, dict[str, Any]] = yaml.safe_load((ANSIBLE / "vars/plays.yml").read_text())["aerie_argument_spec"]


def variables(ansible: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, ansible / "variables.py", *arguments]
    return subprocess.run(program, text=True, capture_output=True, check=False)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of what the lists are written from, and of the lists."""
    (tmp_path / "docs").mkdir()
    shutil.copy(ANSIBLE.parent / "docs/variables.md", tmp_path / "docs")
    for file in [*ANSIBLE.glob("*.*"), *ANSIBLE.glob("vars/*"), *ANSIBLE.glob("roles/*/meta/*"),
                 *ANSIBLE.glob("inventory/example/group_vars/*")]:  # fmt: skip
        copy = tmp_path / "ansible" / file.relative_to(ANSIBLE)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, copy)
    return tmp_path / "ansible"


def test_both_lists_are_what_the_specifications_say() -> None:
    done = variables(ANSIBLE, "--check")
    assert done.returncode == 0, done.stderr


def test_a_list_that_is_not_is_named_and_written_anew(tree: Path) -> None:
    assert variables(tree, "--check").returncode == 0
    specification = tree / "roles/docker/meta/argument_specs.yml"
    specification.write_text(specification.read_text().replace("default: 5\n", "default: 6\n"))
    refused = variables(tree, "--check")
    assert refused.returncode == 1
    assert f"{tree}/inventory/example/group_vars/all.yml is not what the argument specifications say" in refused.stderr
    assert f"{tree.parent}/docs/variables.md is not what the argument specifications say" in refused.stderr
    assert variables(tree).returncode == 0
    assert variables(tree, "--check").returncode == 0
    assert "# docker_vendor_timeout: 6\n" in (tree / "inventory/example/group_vars/all.yml").read_text()


def test_the_example_sets_every_variable_to_its_default_once_it_is_no_comment() -> None:
    text = (ANSIBLE / "inventory/example/group_vars/all.yml").read_text()
    assert yaml.safe_load(text) is None
    assignments = [line.removeprefix("# ") for line in text.splitlines() if line.startswith("# ")]
    defaults = {name: option["default"] for name, option in PLAYS.items()}
    for role in sorted(path.name for path in (ANSIBLE / "roles").iterdir()):
        defaults |= yaml.safe_load((ANSIBLE / "roles" / role / "defaults/main.yml").read_text()) or {}
    assert yaml.safe_load("\n".join(assignments)) == defaults


def test_the_plays_variables_have_the_same_default_wherever_one_is_read() -> None:
    found: dict[str, set[str]] = {}
    for file in [*ANSIBLE.rglob("*.yml"), *ANSIBLE.rglob("*.j2")]:
        if "inventory" not in file.parts:
            for name, default in re.findall(r"\b(aerie_\w+) *\| *default\(([^()]*)\)", file.read_text()):
                found.setdefault(name, set()).add(default.strip(" '"))
    told = {name: {str(option["default"]).lower()} for name, option in PLAYS.items() if name in found}
    assert {name: {default.lower() for default in found[name]} for name in told} == told
    assert {"aerie_gpus", "aerie_expose"} <= set(told)


def test_every_variable_of_the_plays_is_read_by_something() -> None:
    texts = [file.read_text() for file in ANSIBLE.rglob("*.yml") if not {"inventory", "vars"} & set(file.parts)]
    assert [name for name in PLAYS if not any(name in text for text in texts)] == []
