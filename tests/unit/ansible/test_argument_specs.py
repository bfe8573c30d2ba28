"""Every role's argument specification names exactly its defaults, with the same values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

ROLES = Path(__file__).parents[3] / "ansible/roles"


def read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load(path.read_text())
    return content


@pytest.mark.parametrize("role", sorted(path.name for path in ROLES.iterdir() if path.is_dir()))
def test_argument_specification_and_defaults_are_the_same(role: str) -> None:
    defaults = read(ROLES / role / "defaults/main.yml")
    options = read(ROLES / role / "meta/argument_specs.yml")["argument_specs"]["main"]["options"]
    assert {name: option.get("default") for name, option in options.items()} == defaults


@pytest.mark.parametrize("role", sorted(path.name for path in ROLES.iterdir() if path.is_dir()))
def test_public_variables_begin_with_the_role(role: str) -> None:
    assert [name for name in read(ROLES / role / "defaults/main.yml") if not name.startswith(f"{role}_")] == []


def test_base_image_is_the_dockerfiles_default() -> None:
    dockerfile = (ROLES.parents[1] / "Dockerfile").read_text()
    base_image = read(ROLES / "vllm/defaults/main.yml")["vllm_base_image"]
    assert f"ARG BASE_IMAGE={base_image}\n" in dockerfile


def test_the_key_belongs_to_the_images_user() -> None:
    uid = read(ROLES / "vllm/vars/main.yml")["__vllm_image_uid"]
    assert read(ROLES / "model_cache/vars/main.yml")["__model_cache_reader"] == uid
    assert f"useradd --uid {uid} --gid {uid} " in (ROLES.parents[1] / "Dockerfile").read_text()
    assert f"-o {uid} -g {uid}" in (ROLES.parents[1] / "secrets/README.md").read_text()


def test_models_are_fetched_to_where_they_are_served_from() -> None:
    served = read(ROLES / "vllm/defaults/main.yml")["vllm_models_dir"]
    fetched = read(ROLES / "model_cache/defaults/main.yml")["model_cache_dir"]
    assert fetched == f"{{{{ vllm_models_dir | default('{served}') }}}}"
