"""site.yml, check.yml, verify.yml and undo.yml, run with roles that only note that they ran and do what a host says."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ANSIBLE = Path(__file__).parents[3] / "ansible"
ROLES = ["host_check", "nvidia_driver", "docker", "nvidia_container_toolkit", "pcie_fabric", "model_cache", "vllm"]
"""In the order in which a host needs them."""
# A host's variable `does` is a list of {role, file, and what}.
TASKS = """
- name: Run
  note: {role: NAME, file: FILE, fails: "{{ item }}"}
  loop: "{{ does | default([]) | selectattr('role', 'eq', 'NAME') | selectattr('file', 'eq', 'FILE')
    | map(attribute='fails', default=['']) | first | default(['']) }}"
"""


class Plays:
    """The plays in a tree of their own, with roles in place of the real ones."""

    def __init__(self, root: Path) -> None:
        self.root, self.calls = root, root / "calls"
        for name in ("tasks", "vars"):
            shutil.copytree(ANSIBLE / name, root / name)
        for play in ("site", "check", "verify", "undo"):
            shutil.copy(ANSIBLE / f"{play}.yml", root)
        for role in ROLES:
            (root / "roles" / role / "tasks").mkdir(parents=True)
            for file in ("main", "verify", "undo"):
                text = TASKS.replace("NAME", role).replace("FILE", file)
                (root / "roles" / role / "tasks" / f"{file}.yml").write_text(text)
        # What the plays ask of Docker themselves.
        (root / "bin").mkdir()
        (root / "bin/docker").write_text("#!/bin/sh\nexit ${DOCKER_EXIT:-0}\n")
        (root / "bin/docker").chmod(0o755)

    def play(self, name: str, hosts: dict[str, dict[str, Any]], *arguments: str, **settings: str) -> tuple[int, str]:
        """Run a play; return its exit code and what it printed, in one line."""
        variables = {
            "ansible_connection": "local",
            "ansible_python_interpreter": sys.executable,
            "calls": str(self.calls),
        }
        (self.root / "inventory.yml").write_text(yaml.safe_dump({"aerie": {"hosts": hosts, "vars": variables}}))
        self.calls.write_text("")
        environment = os.environ | {
            "PATH": f"{self.root}/bin:{os.environ['PATH']}",
            "ANSIBLE_CONFIG": str(ANSIBLE / "ansible.cfg"),
            "ANSIBLE_ACTION_PLUGINS": str(Path(__file__).parent / "action_plugins"),
            "ANSIBLE_CONNECTION_PLUGINS": str(Path(__file__).parent / "connection_plugins"),
            "ANSIBLE_FLAKY_CUT": str(self.root / "cut"),
            "ANSIBLE_NOCOLOR": "1",
            "COLUMNS": "10000",
            **settings,
        }
        done = subprocess.run(
            [sys.executable, "-m", "ansible", "playbook", "-i", "inventory.yml", f"{name}.yml", *arguments],
            cwd=self.root, env=environment, text=True, capture_output=True, check=False,
        )  # fmt: skip
        return done.returncode, " ".join((done.stdout + done.stderr).split())

    def ran(self, host: str) -> list[str]:
        """Return which roles ran on a host, with the file of their tasks where it is not main.yml."""
        notes = [line.split() for line in self.calls.read_text().splitlines()]
        roles = [role + (f"/{file}" if file != "main" else "") for name, role, file in notes if name == host]
        return list(dict.fromkeys(roles))


@pytest.fixture(scope="module")
def plays(tmp_path_factory: pytest.TempPathFactory) -> Plays:
    return Plays(tmp_path_factory.mktemp("plays"))


def does(role: str, file: str = "main", **what: Any) -> dict[str, Any]:
    return {"does": [{"role": role, "file": file, **what}]}


def test_site_runs_the_roles_in_order_and_ends_before_the_service_where_something_is_in_the_way(plays: Plays) -> None:
    code, output = plays.play("site", {
        "full": {},
        "laptop": {"aerie_gpus": 0},
        "models": {"aerie_gpus": 0, "model_cache_models": [{"name": "small"}]},
        "broken": does("host_check", fails=["seven of eight GPUs"]),
        "waits": does("nvidia_driver", reboot={"why": "driver 580.1 is installed, 570.2 is loaded", "ok": False})
        | {"ansible_connection": "flaky"},
        "itself": does("pcie_fabric", reboot={"why": "the kernel runs without pcie_aspm=off", "ok": True}),
    })  # fmt: skip
    assert code == 2
    assert plays.ran("full") == ROLES
    assert plays.ran("laptop") == ["docker", "vllm"]
    assert plays.ran("models") == ["docker", "model_cache", "vllm"]
    assert plays.ran("broken") == ["host_check"]
    assert plays.ran("waits") == plays.ran("itself") == ROLES[:-2]
    assert "seven of eight GPUs" in output
    assert "waits needs a reboot: driver 580.1 is installed, 570.2 is loaded. Nothing permits it: reboot it" in output
    assert "or set aerie_reboot_ok: true, then run the play again; the service comes after that." in output
    assert "itself needs a reboot: the kernel runs without pcie_aspm=off. This machine runs the play itself" in output


def test_a_dry_run_reboots_nothing_and_says_what_it_cannot_tell(plays: Plays) -> None:
    bare = plays.play("site", {"bare": {}, "laptop": {"aerie_gpus": 0}}, "--check", DOCKER_EXIT="127")
    assert bare[0] == 0, bare[1]
    assert plays.ran("bare") == ROLES[:-1]
    assert plays.ran("laptop") == ["docker"]
    assert "What it would change on bare can be told once Docker runs there." in bare[1]
    code, output = plays.play("site", {
        "laptop": {"aerie_gpus": 0},
        "weights": {"__model_cache_to_come": ["Kimi-K2.5"]},
        "driver": does("nvidia_driver", reboot={"why": "another driver", "ok": True}) | {"ansible_connection": "flaky"},
    }, "--check")  # fmt: skip
    assert code == 0, output
    assert plays.ran("laptop") == ["docker", "vllm"]
    assert plays.ran("driver") == plays.ran("weights") == ROLES[:-1]
    assert "What it would change on weights can be told once Kimi-K2.5 came." in output
    assert "driver needs a reboot: another driver. The play would reboot it here, and go on." in output
    assert "What it would change on driver can be told once it was rebooted." in output


@pytest.mark.parametrize("play", ["site", "verify", "undo"])
def test_there_is_one_tag_a_role_and_no_other(plays: Plays, play: str) -> None:
    code, output = plays.play(play, {"full": {}}, "--list-tags")
    assert code == 0, output
    assert re.findall(r"TASK TAGS: \[([^]]*)\]", output)[0].split(", ") == sorted([*ROLES, "always"])


def test_a_tag_runs_its_role_alone_and_still_minds_the_reboot(plays: Plays) -> None:
    code, output = plays.play(
        "site", {"a": does("pcie_fabric", reboot={"why": "the arguments", "ok": False})}, "--tags", "pcie_fabric"
    )
    assert code == 0, output
    assert plays.ran("a") == ["pcie_fabric"]
    assert "a needs a reboot: the arguments" in output


def test_hosts_one_after_the_other(plays: Plays) -> None:
    hosts = {"a": {}, "b": does("docker", fails=["no such key"]), "c": {}}
    code, output = plays.play("site", hosts, "-e", "aerie_serial=1")
    assert code == 2, output
    assert plays.ran("a") == ROLES
    assert plays.ran("b") == ROLES[:3]
    assert plays.ran("c") == []


def test_a_value_of_another_type_is_refused_before_anything_runs(plays: Plays) -> None:
    code, output = plays.play("site", {"a": {"aerie_gpus": "eight"}})
    assert code == 2
    assert "aerie_gpus is 'eight': give a whole number. GPUs that the host has" in output
    assert plays.ran("a") == []


@pytest.mark.parametrize("play", ["site", "check", "verify", "undo"])
def test_every_play_refuses_what_it_would_otherwise_take_for_nothing(plays: Plays, play: str) -> None:
    hosts = {"a": {"aerie_gpu": 4, "pcie_fabric_gpu_wait": "{{ -5 }}", "aerie_rack": 7}, "b": {}}
    code, output = plays.play(
        play, hosts, "-e", "vllm_api_port=70000 aerie_undo=true", "--tags", "host_chek,host_check"
    )
    assert code == 2, output
    assert plays.ran("a") == plays.ran("b") == []
    assert "aerie_gpu is no variable of these plays: did you mean aerie_gpus?" in output
    assert "pcie_fabric_gpu_wait is -5: give a number that is not below 0." in output
    assert "vllm_api_port is 70000: give a port from 1 to 65535." in output
    assert f"{play}.yml has no tag host_chek; it has " in output
    assert "aerie_rack" not in output
    code, output = plays.play(play, {"b": {}}, "--skip-tags", "vlm", "-e", "aerie_undo=true")
    assert (code, plays.ran("b")) == (2, [])
    assert f"{play}.yml has no tag vlm; it has" in output


def test_a_playbook_of_the_sites_may_have_tags_of_its_own(plays: Plays) -> None:
    (plays.root / "whole.yml").write_text("- import_playbook: site.yml\n")
    code, output = plays.play("whole", {"a": {}}, "--skip-tags", "webserver")
    assert code == 0, output
    assert plays.ran("a") == ROLES


def test_check_runs_the_one_role_that_changes_nothing(plays: Plays) -> None:
    code, output = plays.play("check", {"full": {}, "laptop": {"aerie_gpus": 0}})
    assert code == 0, output
    assert plays.ran("full") == plays.ran("laptop") == ["host_check"]


def test_verify_tells_every_reason_at_once(plays: Plays) -> None:
    refused = {"does": [
        {"role": "nvidia_driver", "file": "verify", "fails": ["no module for kernel 6.1.0-2"]},
        {"role": "pcie_fabric", "file": "verify", "fails": ["", "ACS redirects on 80:01.1", "81:01.1 too"]},
    ]}  # fmt: skip
    code, output = plays.play("verify", {"good": {}, "bad": refused, "laptop": {"aerie_gpus": 0}})
    assert code == 2
    assert plays.ran("good") == plays.ran("bad") == [f"{role}/verify" for role in ROLES]
    assert plays.ran("laptop") == ["docker/verify", "vllm/verify"]
    assert "bad is refused, for 2 reasons: nvidia_driver: no module for kernel 6.1.0-2" in output
    assert "pcie_fabric: ACS redirects on 80:01.1 81:01.1 too" in output
    assert "good is accepted." in output
    assert "bad is accepted." not in output


def test_undo_wants_a_word_and_goes_backwards(plays: Plays) -> None:
    code, output = plays.play("undo", {"a": {}})
    assert code == 2
    assert plays.ran("a") == []
    assert "This ends the service on a and removes what the play installed there." in output
    assert "-e aerie_undo=true" in output
    code, output = plays.play("undo", {"a": {}}, "--check")
    assert code == 0, output
    assert plays.ran("a") == [f"{role}/undo" for role in reversed(ROLES)]
    assert "reboot needed" not in output
    hosts = {
        "a": does("nvidia_driver", "undo", reboot={"why": "module nvidia is loaded", "ok": False}),
        "laptop": {"aerie_gpus": 0},
    }
    code, output = plays.play("undo", hosts, "-e", "aerie_undo=true")
    assert code == 0, output
    assert plays.ran("a") == [f"{role}/undo" for role in reversed(ROLES)]
    assert plays.ran("laptop") == ["vllm/undo", "model_cache/undo", "docker/undo", "host_check/undo"]
    assert (
        "reboot needed: a still runs with what was taken back, until it is rebooted: module nvidia is loaded." in output
    )


def test_every_role_is_in_the_plays_with_what_they_need() -> None:
    assert sorted(path.name for path in (ANSIBLE / "roles").iterdir()) == sorted(ROLES)
    for role in ROLES:
        for file in ("main", "verify", "undo"):
            assert (ANSIBLE / "roles" / role / "tasks" / f"{file}.yml").exists(), f"{role}/{file}"
