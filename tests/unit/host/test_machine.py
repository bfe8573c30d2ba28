"""A host, read: each field from the place where the kernel, the driver and the programs show it."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import pytest
from aerie_host import machine as host
from aerie_host.machine import NOT_THERE, Docker, Limits, Machine, Storage, Toolkit, read_machine
from described import programs

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path


def nobody(_: Sequence[str]) -> tuple[int, str]:
    return NOT_THERE, ""


def test_a_described_machine(machine: Callable[..., Machine]) -> None:
    found = machine("eight-four-switches")
    assert (found.distribution, found.cpu_vendor, found.cpu_family, found.turin) == (
        "Debian 13",
        "AuthenticAMD",
        26,
        True,
    )
    assert (found.sockets, found.logical_cpus, found.memory >> 30) == (2, 256, 1536)
    assert [(node.number, node.cpus, node.distances) for node in found.numa] == [
        (0, "0-63,128-191", (10, 32)),
        (1, "64-127,192-255", (32, 10)),
    ]
    assert (found.uefi, found.secure_boot, found.virtual, found.cgroup) == (True, False, False, 2)
    assert (found.newest_kernel, found.numa_balancing, found.aspm) == ("6.12.48+deb13-amd64", True, "default")
    assert (len(found.gpus), len(found.bridges), len(found.served)) == (8, 16, 8)
    assert found.limits == Limits("the first process", 524288, 8388608, can_raise=True)
    assert (found.board.maker, found.board.firmware) == ("Example Systems", "1.4")
    assert found.iommu_present
    assert found.storage == Storage(
        "/data",
        exists=True,
        mount="/data",
        filesystem="xfs",
        free=found.storage.free,
        rate_of="not measured (host_check_data_read_seconds is 0)",
    )


def test_everything_goes_into_json(machine: Callable[..., Machine]) -> None:
    text = json.dumps(machine("seven-of-eight").to_json())
    again = json.loads(text)
    assert again["devices"]["0000:02:00.0"]["acs"] == {"offset": 0x2A0, "capabilities": 0x7F, "control": 0}
    assert again["events"][1]["xid"] == 79
    assert json.loads(json.dumps(machine("eight-turin").to_json()))["driver_topology"]["0-1"] == "NODE"


def test_an_empty_root_is_a_machine_of_which_nothing_is_known(tmp_path: Path) -> None:
    found = read_machine(tmp_path, run=nobody)
    assert (found.devices, found.driver, found.smi, found.uefi, found.secure_boot, found.cgroup) == (
        {},
        None,
        None,
        None,
        None,
        None,
    )
    assert (found.events, found.limits, found.docker.problem) == (None, None, "not installed")
    assert found.storage == Storage("/data")


def test_this_very_machine_can_be_read() -> None:
    found = read_machine(data="")
    assert found.memory > 1 << 28
    assert found.logical_cpus > 0
    assert found.storage is None


def test_what_is_held_back_from_upgrades(tmp_path: Path) -> None:
    def package(name: str, status: str) -> str:
        return f"Package: {name}\nStatus: {status}\nPriority: optional\nDescription: a package\n with\n .\n words\n\n"

    (tmp_path / "var/lib/dpkg").mkdir(parents=True)
    (tmp_path / "var/lib/dpkg/status").write_text(
        package("linux-image-amd64", "hold ok installed")
        + package("linux-libc-dev", "install ok installed")
        + package("nvidia-open", "install ok installed")
        + package("nvidia-container-toolkit", "hold ok installed")
        + package("libcuda1", "hold ok installed")
        + package("containerd", "install ok config-files")
        + package("docker.io", "install ok installed")
        + package("docker.io-doc", "install ok installed")
    )
    assert read_machine(tmp_path, run=nobody).held == {
        "linux-image-amd64": True,
        "nvidia-open": False,
        "nvidia-container-toolkit": True,
        "libcuda1": True,
        "docker.io": False,
    }
    roles = [host.held_by(name) for name in ("libnvidia-container1", "libnvidia-compute-595", "runc", "bash")]
    assert roles == ["nvidia_container_toolkit", "nvidia_driver", "docker", ""]


def test_the_cpu_flag_of_a_guest(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text(
        "processor\t: 0\nflags\t\t: fpu vme hypervisor lahf_lm\n\nprocessor\t: 1\n\n"
    )
    found = read_machine(tmp_path, run=nobody)
    assert (found.virtual, found.logical_cpus, found.sockets) == (True, 2, 1)


def test_kernels_are_ordered_as_numbers(tmp_path: Path) -> None:
    (tmp_path / "boot").mkdir()
    for version in ("6.1.0-9-amd64", "6.1.0-41-amd64", "6.1.0-10-amd64"):
        (tmp_path / f"boot/vmlinuz-{version}").write_text("")
    assert read_machine(tmp_path, run=nobody).newest_kernel == "6.1.0-41-amd64"


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("/data", ("/data", "xfs", "9:0")),
        ("/data/models", ("/data", "xfs", "9:0")),
        ("/database", ("/", "ext4", "259:2")),
        ("/srv", ("/srv", "nfs4", "0:51")),
    ],
)
def test_the_mount_that_a_directory_is_in(path: str, found: tuple[str, str, str]) -> None:
    mountinfo = (
        "29 1 259:2 / / rw,relatime shared:1 - ext4 /dev/nvme0n1p2 rw\n"
        "40 29 9:0 / /data rw,relatime shared:2 - xfs /dev/md0 rw\n"
        "41 29 0:51 / /srv rw - nfs4 filer:/srv rw,hard\n"
    )
    assert host._mount(mountinfo, path) == found


def test_dockerd_counts_where_it_runs(tree: Callable[..., Path]) -> None:
    place = tree("no-gpu")
    (place / "proc/812").mkdir()
    (place / "proc/812/comm").write_text("dockerd\n")
    (place / "proc/812/limits").write_text(
        "Max open files            1048576              unlimited            files\n"
    )
    (place / "proc/812/status").write_text("CapEff:\t00000000a80425fb\n")
    found = read_machine(place, run=nobody).limits
    assert found == Limits("dockerd", None, None, can_raise=False)


def answers(replies: dict[str, tuple[int, str]]) -> host.Run:
    return lambda arguments: next(
        (reply for start, reply in replies.items() if " ".join(arguments).startswith(start)), (NOT_THERE, "")
    )


def test_docker_that_answers(tmp_path: Path) -> None:
    info = {
        "ServerVersion": "28.3.2",
        "DockerRootDir": "/var/lib/docker",
        "DiscoveredDevices": [{"Source": "cdi", "ID": "nvidia.com/gpu=all"}],
    }
    run = answers(
        {"docker info": (0, f"WARNING: no swap limit\n{json.dumps(info)}\n"), "docker compose": (0, "v2.38.2\n")}
    )
    assert read_machine(tmp_path, run=run).docker == Docker(
        "28.3.2", "2.38.2", "/var/lib/docker", ("nvidia.com/gpu=all",)
    )


@pytest.mark.parametrize(("said", "disabled"), [("disabled\n", True), ("enabled\n", False), ("", False)])
def test_docker_that_no_boot_starts(tmp_path: Path, said: str, disabled: bool) -> None:  # noqa: FBT001
    run = answers({"docker info": (0, '{"ServerVersion": "28.3.2"}'), "systemctl is-enabled docker.service": (1, said)})
    assert read_machine(tmp_path, run=run).docker.disabled is disabled


@pytest.mark.parametrize(
    ("reply", "problem"),
    [
        (
            (1, '{"ServerErrors":["Cannot connect to the Docker daemon at unix:///var/run/docker.sock."]}'),
            "Cannot connect to the Docker daemon",
        ),
        ((1, "permission denied while trying to connect to the docker API"), "permission denied"),
        ((host.DID_NOT_END, "docker did not answer in 20 s"), "docker did not answer in 20 s"),
        ((0, ""), "does not answer"),
    ],
)
def test_docker_that_does_not(reply: tuple[int, str], problem: str, tmp_path: Path) -> None:
    docker = read_machine(tmp_path, run=answers({"docker info": reply})).docker
    assert docker.version == ""
    assert docker.problem.startswith(problem)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "nvidia.yaml",
            'cdiVersion: 0.5.0\nkind: nvidia.com/gpu\ndevices:\n- name: "0"\n  containerEdits: {}\n- name: all\n',
        ),
        (
            "nvidia.json",
            json.dumps(
                {"cdiVersion": "0.5.0", "kind": "nvidia.com/gpu", "devices": [{"name": "0"}, {"name": "all"}]}, indent=2
            ),
        ),
    ],
)
def test_the_toolkit_and_its_specification(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / "var/run/cdi").mkdir(parents=True)
    (tmp_path / "var/run/cdi" / name).write_text(text)
    run = answers({"nvidia-ctk --version": (0, "NVIDIA Container Toolkit CLI version 1.18.1\ncommit: abc\n")})
    expected = Toolkit("1.18.1", ("nvidia.com/gpu=0", "nvidia.com/gpu=all"), f"/var/run/cdi/{name}")
    assert read_machine(tmp_path, run=run).toolkit == expected


def test_without_a_journal_the_kernels_own_buffer_is_read(tmp_path: Path) -> None:
    line = "[  1.2] NVRM: Xid (PCI:0000:06:00): 79, GPU has fallen off the bus."
    run = answers({"journalctl": (1, ""), "dmesg": (0, line)})
    events = read_machine(tmp_path, run=run).events
    assert events is not None
    assert [event.xid for event in events] == [79]


def test_slot_by_the_port_above_and_by_the_bus(machine: Callable[..., Machine]) -> None:
    found = machine("seven-after-reboot")
    assert found.slot("0000:03:00.0") == "PCIE1 slot 1"
    assert found.slot("0000:06:00.0") == "PCIE4 slot 4"  # nothing is there any more
    assert found.slot("0000:7f:00.0") == ""


def test_a_program_that_hangs_is_not_waited_for() -> None:
    code, said = host.run([sys.executable, "-c", "import time; print('x', flush=True); time.sleep(60)"], 0.3)
    assert (code, said) == (host.DID_NOT_END, f"{sys.executable} did not answer in 0.3 s")


def test_a_program_that_is_not_there() -> None:
    assert host.run(["/no/such/program"]) == (NOT_THERE, "")


def test_a_file_system_that_does_not_answer_is_given_up(
    tree: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def hangs(*_: object) -> dict[str, object]:
        raise TimeoutError("no answer in 8 s")

    monkeypatch.setattr(host.reading, "within", hangs)
    place = tree("no-gpu")
    found = read_machine(place, run=programs(place, driver=False)).storage
    assert found == Storage("/data", mount="/data", filesystem="xfs", rate_of="no answer in 8 s")


def test_models_that_are_there_are_counted(tree: Callable[..., Path]) -> None:
    place = tree("no-gpu")
    (place / "data/models/k").mkdir()
    (place / "data/models/k/a.safetensors").write_bytes(b"x" * 1000)
    assert read_machine(place, run=nobody).storage.used_by_models == 1000
