"""Role vllm asks the image which loader to take, and writes what it says. One play; in place of Docker a script."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from tried_play import outcomes_of

REPOSITORY = Path(__file__).parents[3]
ROLE = str(REPOSITORY / "ansible/roles/vllm")
# It keeps what it was asked, and answers as the image does.
DOCKER = """#!/bin/sh
echo "$*" >>{directory}/asked
cat >{directory}/stdin
case "$*" in
  *old*) echo "aerie model: error: argument KIND: invalid choice: 'loader'" >&2; exit 2 ;;
  *--loader\\ auto*)
    echo '{{"loader": "fastsafetensors", "keys": {{"load-format": "fastsafetensors"}}, "reason": "there is room"}}' ;;
  *) echo "aerie model loader: this image does not have the loader instanttensor" >&2; exit 1 ;;
esac
"""
CASES: dict[str, dict[str, Any]] = {
    "auto": {},
    "an operator's own": {"vllm_engine_overrides": {"load-format": "auto"}},
    "one that is not there": {"vllm_loader": "instanttensor"},
    "an older image": {"__vllm_image": "aerie:old"},
}
Outcome = dict[str, Any]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("loader")


@pytest.fixture(scope="module")
def outcomes(place: Path) -> dict[str, Outcome]:
    """What the role makes of each case, by the case's name."""
    docker = place / "bin/docker"
    docker.parent.mkdir()
    docker.write_text(DOCKER.format(directory=place))
    docker.chmod(0o755)
    tasks = [case(name, variables) for name, variables in CASES.items()]
    return outcomes_of(tasks, place, docker.parent)


def case(name: str, variables: dict[str, Any]) -> dict[str, Any]:
    """A block that asks for a loader with these variables, and notes what was said and what the engine gets."""

    def note(said: str, serve: str) -> dict[str, Any]:
        outcome = {"said": said, "serve": serve}
        return {
            "ansible.builtin.set_fact": {"outcomes": "{{ outcomes | default({}) | combine({name: outcome}) }}"},
            "vars": {"name": name, "outcome": outcome},
        }

    forget = {"ansible.builtin.set_fact": {"__vllm_loader": {"keys": {}}}}
    ask = {"ansible.builtin.include_role": {"name": "vllm", "tasks_from": "loader.yml", "public": True}}
    return {
        "block": [forget, ask, note("", "{{ lookup('template', role_path ~ '/templates/serve.yaml.j2') }}")],
        "rescue": [note("{{ ansible_failed_result.msg }}", "")],
        "vars": {"role_path": ROLE, "__vllm_image": "aerie:new", "ansible_managed": "managed"} | variables,
    }


def test_what_the_image_says_is_written_with_its_reason(outcomes: dict[str, Outcome]) -> None:
    written = outcomes["auto"]["serve"]
    assert yaml.safe_load(written)["load-format"] == "fastsafetensors"
    assert "# The loader is fastsafetensors: there is room." in written


def test_it_is_asked_with_what_the_engine_will_see(outcomes: dict[str, Outcome], place: Path) -> None:
    assert outcomes
    asked = (place / "asked").read_text().splitlines()[0]
    assert asked.endswith("aerie:new model loader --json --loader auto --config -")
    assert "--volume /data/models:/data/models:ro --device nvidia.com/gpu=all" in asked
    assert yaml.safe_load((place / "stdin").read_text())["tensor-parallel-size"] == 8


def test_an_operators_own_key_wins(outcomes: dict[str, Outcome]) -> None:
    assert yaml.safe_load(outcomes["an operator's own"]["serve"])["load-format"] == "auto"


def test_one_that_is_not_in_the_image_is_refused(outcomes: dict[str, Outcome]) -> None:
    assert re.search("vllm_loader is instanttensor.*\n.*does not have", outcomes["one that is not there"]["said"])


def test_an_image_that_cannot_say_leaves_it_to_vllm(outcomes: dict[str, Outcome]) -> None:
    assert not {"load-format", "safetensors-load-strategy"} & yaml.safe_load(outcomes["an older image"]["serve"]).keys()
