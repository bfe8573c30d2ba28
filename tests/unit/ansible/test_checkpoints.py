"""Role vllm and the checkpoints: where their paths lead, and what it writes for the engine. One play."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from tried_play import outcomes_of

if TYPE_CHECKING:
    from collections.abc import Callable

REPOSITORY = Path(__file__).parents[3]
ROLE = str(REPOSITORY / "ansible/roles/vllm")
TARGET, DRAFTER = "Kimi-K2.5", "kimi-k2.5-eagle3-mla"
OLD, NEW = "a" * 40, "b" * 40


def publish(directory: Path, *revisions: str) -> None:
    for revision in revisions:
        (directory / revision).mkdir(parents=True)
        (directory / revision / "config.json").touch()
    (directory / "current").symlink_to(revisions[-1])


def plain(directory: Path) -> None:
    directory.mkdir(parents=True)
    (directory / "config.json").touch()


def both_published(models: Path) -> None:
    publish(models / TARGET, OLD, NEW)
    publish(models / DRAFTER, OLD)


def target_published(models: Path) -> None:
    publish(models / TARGET, OLD)
    plain(models / DRAFTER)


def both_plain(models: Path) -> None:
    plain(models / TARGET)
    plain(models / DRAFTER)


def dangling(models: Path) -> None:
    both_published(models)
    (models / TARGET / NEW).rename(models / "gone")


# Each: what lies there, the operator's overrides, and the paths that the engine gets or what is told.
CASES: dict[str, tuple[Callable[[Path], None], dict[str, Any], list[str] | str]] = {
    "published": (both_published, {}, [f"/data/models/{TARGET}/{NEW}", f"/data/models/{DRAFTER}/{OLD}"]),
    "a drafter without revisions": (
        target_published,
        {},
        [f"/data/models/{TARGET}/{OLD}", f"/data/models/{DRAFTER}"],
    ),
    "as it was before there were revisions": (both_plain, {}, [f"/data/models/{TARGET}", f"/data/models/{DRAFTER}"]),
    "a plain directory that is named itself": (
        both_plain,
        {"model": f"/data/models/{TARGET}"},
        [f"/data/models/{TARGET}", f"/data/models/{DRAFTER}"],
    ),
    "a revision that is named itself": (
        both_published,
        {"model": f"/data/models/{TARGET}/{OLD}", "speculative-config": None},
        [f"/data/models/{TARGET}/{OLD}"],
    ),
    "a link that leads nowhere": (dangling, {}, rf"{TARGET}/{NEW}/config.json does not exist"),
    "nothing": (Path.mkdir, {}, rf"{TARGET}/current/config.json does not exist.*vllm_models_dir"),
}

Outcome = dict[str, Any]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """What the role makes of each case, by the case's name."""
    directory = tmp_path_factory.mktemp("checkpoints")
    tasks: list[dict[str, Any]] = []
    for number, (name, (build, overrides, _)) in enumerate(CASES.items()):
        models = directory / str(number)
        build(models)
        tasks.append(case(name, {"vllm_models_dir": str(models), "vllm_engine_overrides": overrides}))
    return outcomes_of(tasks, directory)


def case(name: str, variables: dict[str, Any]) -> dict[str, Any]:
    """A block that looks for the checkpoints with these variables, and notes what was said and what the engine gets."""

    def note(said: str | list[str], serve: str) -> dict[str, Any]:
        outcome = {"said": said, "serve": serve}
        return {
            "ansible.builtin.set_fact": {"outcomes": "{{ outcomes | default({}) | combine({name: outcome}) }}"},
            "vars": {"name": name, "outcome": outcome},
        }

    look = {"ansible.builtin.include_role": {"name": "vllm", "tasks_from": "checkpoints.yml", "public": True}}
    told = "{{ ansible_failed_result.results | selectattr('failed') | map(attribute='msg') }}"
    return {
        "block": [look, note([], "{{ __vllm_serve_yaml }}")],
        "rescue": [note(told, "")],
        "vars": variables | {"role_path": ROLE},
    }


@pytest.mark.parametrize("name", CASES)
def test_where_it_lies(outcomes: dict[str, Outcome], name: str) -> None:
    wanted, outcome = CASES[name][2], outcomes[name]
    if isinstance(wanted, str):
        assert re.search(wanted, outcome["said"][0])
        return
    assert outcome["said"] == []
    serve = yaml.safe_load(outcome["serve"])
    speculation = serve.get("speculative-config")
    assert [serve["model"], *([speculation["model"]] if speculation else [])] == wanted
    if speculation:
        assert (speculation["method"], speculation["num_speculative_tokens"]) == ("eagle3", 3)
