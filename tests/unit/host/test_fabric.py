"""What decides how the GPUs' traffic is set up, read from the stub machines."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from aerie_host import fabric, reading
from aerie_host.topology import Topology

sys.path.insert(0, str(Path(__file__).parents[3] / "ansible/molecule/stub_gpu_host"))
from build import build

CONFIG = Path(__file__).parents[3] / "config"
BASE = "nccl-pcie.env"


def variables(path: Path) -> dict[str, str]:
    return dict(re.findall(r"^([A-Z0-9_]+)=(.*)$", path.read_text(), re.MULTILINE))


def shape(name: str, *, turin: bool = False) -> Topology:
    return Topology(name, ("0000:01:00.0",), {}, {0: ("0000:01:00.0",)}, 0, turin)


def test_one_switch_with_acs_on(tmp_path: Path) -> None:
    build("eight-one-switch", tmp_path)
    found = fabric.read_fabric(tmp_path)
    assert (found["topology"], found["environment"], found["numa_nodes"]) == ("one-switch", "one-switch", [0])
    assert len(found["gpus"]) == 8
    assert len(found["redirecting"]) == 9
    assert found["logical_cpus"] == 128
    assert "quiet" in found["command_line"]


def test_two_sockets_with_acs_off(tmp_path: Path) -> None:
    build("eight-two-sockets", tmp_path)
    found = fabric.read_fabric(tmp_path)
    assert (found["topology"], found["environment"], found["numa_nodes"]) == ("two-sockets", "two-sockets", [0, 1])
    assert found["redirecting"] == []


def test_the_models_are_none_of_its_business(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build("eight-one-switch", tmp_path)
    # A disk or a server that is gone would keep each look waiting.
    monkeypatch.setattr(reading, "within", lambda *_: pytest.fail("it looked at /data"))
    assert len(fabric.read_fabric(tmp_path)["gpus"]) == 8


@pytest.mark.parametrize(
    ("topology", "environment"),
    [
        (shape("one-switch"), "one-switch"),
        (shape("two-sockets"), "two-sockets"),
        (shape("two-sockets", turin=True), "turin"),
        # One socket of Turin has no link between sockets that NCCL could underrate.
        (shape("root-ports", turin=True), "none"),
        (shape("switches"), "none"),
        (shape("single"), "none"),
        (shape("none"), "none"),
    ],
)
def test_the_environment_of_each_shape(topology: Topology, environment: str) -> None:
    assert fabric.environment(topology) == environment
    assert environment == "none" or (CONFIG / f"nccl-pcie.{environment}.env").exists()


def test_the_highest_apic_id_may_pass_the_number_of_cpus() -> None:
    assert fabric.highest_apic_id("processor\t: 0\napicid\t\t: 0\ninitial apicid\t: 0\n\napicid\t\t: 383\n") == 383
    assert fabric.highest_apic_id("") == 0


@pytest.mark.parametrize(
    "path", sorted(set(CONFIG.glob("nccl-pcie.*.env")) - {CONFIG / BASE}), ids=lambda path: path.name
)
def test_a_file_of_differences_holds_differences_with_their_source(path: Path) -> None:
    base, own = variables(CONFIG / BASE), variables(path)
    assert own
    assert not own.items() & base.items()
    for block in path.read_text().split("\n\n"):
        if variables_in := re.findall(r"^[A-Z0-9_]+=", block, re.MULTILINE):
            assert re.search(r"rtx6kpro|https://|NCCL user guide", block), variables_in


def test_no_file_names_ll128() -> None:
    assert not [path.name for path in CONFIG.glob("nccl-pcie*.env") if "NCCL_PROTO" in variables(path)]
