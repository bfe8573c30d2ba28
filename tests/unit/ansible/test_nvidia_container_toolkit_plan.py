"""What role nvidia_container_toolkit takes for a reason to wait, and for a toolkit that it can do nothing with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ansible.parsing.dataloader import DataLoader
from ansible.template import Templar, trust_as_template

ROLE = Path(__file__).parents[3] / "ansible/roles/nvidia_container_toolkit"


def evaluated(expression: str, **variables: Any) -> Any:
    """Evaluate an expression with the role's variables."""
    loader = DataLoader()
    known = {
        **loader.load_from_file(str(ROLE / "defaults/main.yml"), trusted_as_template=True),
        **loader.load_from_file(str(ROLE / "vars/main.yml"), trusted_as_template=True),
        **variables,
    }
    return Templar(loader, known).evaluate_expression(trust_as_template(expression))


@pytest.mark.parametrize(
    ("driver", "roles", "waits"),
    [
        ("580.173.02", [], False),
        ("580.173.02", ["pcie_fabric"], False),
        ("", [], False),
        ("", ["nvidia_driver"], True),
        # Another driver than the installed one is still loaded: its GPUs are there, and its libraries are not.
        ("570.86.15", ["pcie_fabric", "nvidia_driver"], True),
    ],
)
def test_the_proof_waits_for_a_driver_that_waits_for_its_boot(driver: str, roles: list[str], *, waits: bool) -> None:
    reasons = [{"role": role, "why": "", "ok": True} for role in roles]
    found = evaluated(
        "__nvidia_container_toolkit_waits",
        __nvidia_container_toolkit_has={"driver": driver},
        aerie_reboot_reasons=reasons,
    )
    assert found is waits


@pytest.mark.parametrize(
    ("version", "circular"),
    [("1.18.2-1", False), ("1.19.0-1", True), ("1.19.0~rc.7-1", True), ("1.19.0", True), ("1.19.1-1", False)],
)
def test_a_unit_that_starts_after_everything_is_known_by_its_release(version: str, *, circular: bool) -> None:
    expression = f"'{version}' is match(__nvidia_container_toolkit_circular)"
    assert evaluated(expression) is circular
