"""What host_check wants a host to have is what the roles take: one that it lets pass must not be refused by them."""

from __future__ import annotations

import re
from pathlib import Path

import yaml
from aerie_host import check_host
from aerie_host.finding import Wanted

ROLES = Path(__file__).parents[3] / "ansible/roles"


def variables(role: str) -> dict[str, object]:
    known: dict[str, object] = yaml.safe_load((ROLES / role / "vars/main.yml").read_text())
    return known


def test_the_least_toolkit_and_the_one_that_is_refused() -> None:
    role = variables("nvidia_container_toolkit")
    assert role["__nvidia_container_toolkit_least"] == Wanted.least_toolkit
    assert re.match(str(role["__nvidia_container_toolkit_circular"]), ".".join(map(str, check_host._CIRCULAR_TOOLKIT)))


def test_the_least_engine_and_compose() -> None:
    least = variables("docker")["__docker_least"]
    assert isinstance(least, dict)
    assert (least["engine"], least["compose"]) == (Wanted.least_docker, Wanted.least_compose)


def test_the_variables_of_role_nvidia_driver_that_it_reads_are_there() -> None:
    assert {"nvidia_driver_replace", "nvidia_driver_secure_boot"} <= yaml.safe_load(
        (ROLES / "nvidia_driver/defaults/main.yml").read_text()
    ).keys()
