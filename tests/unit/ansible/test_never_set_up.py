"""What the roles say where nothing was set up yet, or hangs: their checks, a preflight, and what becomes of a value."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.parsing.dataloader import DataLoader
from ansible.template import Templar, trust_as_template

ANSIBLE = Path(__file__).parents[3] / "ansible"


def play(directory: Path, tasks: list[dict[str, Any]], **variables: Any) -> str:
    """Run tasks on this machine, which fail, with extra variables; return all that was printed, in one line."""
    content = [{"name": "Try", "hosts": "localhost", "gather_facts": False, "tasks": tasks}]
    variables |= {"ansible_python_interpreter": sys.executable}
    (directory / "play.yml").write_text(yaml.safe_dump(content))
    done = subprocess.run(
        [
            sys.executable, "-m", "ansible", "playbook", "-i", "localhost,", "-c", "local", "-e", json.dumps(variables),
            str(directory / "play.yml"),
        ],
        env=os.environ | {
            "ANSIBLE_CONFIG": str(ANSIBLE / "ansible.cfg"),
            "ANSIBLE_NOCOLOR": "1",
            "COLUMNS": "10000",
            "HOME": str(directory),
        },
        text=True, capture_output=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 2, done.stdout + done.stderr
    return " ".join((done.stdout + done.stderr).split())


def role(name: str, tasks_from: str) -> dict[str, Any]:
    return {"ansible.builtin.include_role": {"name": name, "tasks_from": tasks_from}}


def messages(output: str) -> list[str]:
    return re.findall(r"\[ERROR\]: Task failed: (?:Action failed: )?(.*?) Origin: ", output)


def test_nothing_is_served_where_the_service_never_was(tmp_path: Path) -> None:
    facts = {"ansible.builtin.setup": {"gather_subset": ["!all", "!min", "service_mgr"]}}
    directory = str(tmp_path / "none")
    output = play(tmp_path, [facts, role("vllm", "verify.yml")], vllm_project_dir=directory)
    (message,) = messages(output)
    assert message == (
        f"Nothing is served from {directory} on localhost, for there is no compose project: run site.yml, which makes "
        "it, or set vllm_project_dir to the directory that it was given."
    )


def test_an_answer_is_not_waited_for_without_end(tmp_path: Path) -> None:
    (tmp_path / ".env").touch()
    (tmp_path / "docker").write_text("#!/bin/sh\ncase $* in *' aerie ask '*) exec sleep 100 ;; esac\n")
    (tmp_path / "docker").chmod(0o755)
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    output = play(
        tmp_path, [{"block": [role("vllm", "verify.yml")], "environment": path}],
        vllm_project_dir=str(tmp_path), __vllm_has_unit=False, __vllm_answer_seconds=1,
    )  # fmt: skip
    (message,) = messages(output)
    assert message == (
        f"The service in {tmp_path} gives no completion. Nothing came in 1 s, not from the engine, and not from "
        f"Docker: see `docker compose logs` in {tmp_path}, and whether `docker ps` answers."
    )


def test_a_role_that_never_ran_is_named_once(tmp_path: Path) -> None:
    output = play(tmp_path, [role("pcie_fabric", "verify.yml")], __pcie_fabric_json=f"{tmp_path}/fabric.json")
    (message,) = messages(output)
    assert message == (
        f"Role pcie_fabric has not run on localhost, for there is no {tmp_path}/fabric.json, which it writes: "
        "run site.yml."
    )


def test_an_initramfs_that_the_role_cannot_make_is_told(tmp_path: Path) -> None:
    output = play(
        tmp_path, [role("nvidia_driver", "initramfs.yml")], __nvidia_driver_has={"initramfs": ""},
        __nvidia_driver_initramfs={"stdout_lines": ["6.1.0-40-amd64", "6.1.0-41-amd64"]},
    )  # fmt: skip
    (message,) = messages(output)
    assert message == (
        "The initramfs of localhost still loads what /etc/modprobe.d said before, nouveau perhaps, and neither "
        "update-initramfs nor dracut is there to make it anew (6.1.0-40-amd64, 6.1.0-41-amd64): let the program do so "
        "that made it, then run this again."
    )


def test_a_preflight_says_its_reason_and_nothing_else(tmp_path: Path) -> None:
    facts = {"ansible.builtin.setup": {"gather_subset": ["!all", "!min", "service_mgr", "user_id", "architecture"]}}
    output = play(tmp_path, [facts, role("vllm", "preflight.yml")], vllm_api_port="8001", vllm_flavour="cpu")
    assert messages(output) == ["vllm_api_port and vllm_status_port are both 8001. Give them different ports."]
    assert "WARNING" not in output


def evaluated(name: str, expression: str, **variables: Any) -> Any:
    """Evaluate an expression with a role's variables."""
    loader = DataLoader()
    known = loader.load_from_file(str(ANSIBLE / f"roles/{name}/vars/main.yml"), trusted_as_template=True)
    return Templar(loader, known | variables).evaluate_expression(trust_as_template(expression))


@pytest.mark.parametrize(("given", "first"), [("pt", "iommu=pt"), ("off", "iommu=off"), (False, "iommu=off")])
def test_an_iommu_that_is_off_without_quotes_is_off(given: object, first: str) -> None:
    wanted = evaluated(
        "pcie_fabric", "__pcie_fabric_wanted", pcie_fabric_iommu=given, pcie_fabric_link_power="keep",
        __pcie_fabric_ways={"cpu_vendor": "AuthenticAMD"},
    )  # fmt: skip
    assert wanted[0] == first


@pytest.mark.parametrize(
    ("given", "keys"),
    [([], []), (["one", "two"], ["one", "two"]), ("", []), ("one", ["one"]), ("one, two", ["one", "two"])],
)
def test_keys_in_a_string_are_whole_keys(given: object, keys: list[str]) -> None:
    assert evaluated("vllm", "__vllm_api_keys", vllm_api_keys=given) == keys


@pytest.mark.parametrize("given", [["memory", "fit"], "memory,fit"])
def test_checks_in_a_string_are_whole_checks(given: object) -> None:
    arguments = evaluated(
        "vllm", "__vllm_rehearse", vllm_rehearse_accept=given, vllm_rehearse="full", __vllm_has_engine=False
    )
    assert arguments[4:8] == ["--accept", "memory", "--accept", "fit"]
