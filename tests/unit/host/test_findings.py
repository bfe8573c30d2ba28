"""Verdicts: of every described machine exactly those that its description asks for, and each check at its edges."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

import pytest
from aerie_host import findings
from aerie_host.finding import Finding, Wanted
from aerie_host.findings import judge, table
from aerie_host.machine import Docker, Limits, Machine, NumaNode, Storage, Toolkit
from aerie_host.nvidia import KernelEvent
from aerie_host.pci import Bar, Link
from aerie_host.smbios import Smbios

if TYPE_CHECKING:
    from collections.abc import Callable

NOW = 1_793_000_000.0
TB = 1000**4
GPUS = ["0", "1", "2", "3", "4", "5", "6", "7", "all"]


def mended(machine: Machine, **changes: Any) -> Machine:
    """The same machine with everything around its GPUs as it should be."""
    around: dict[str, Any] = {
        "kernel": "6.12.48+deb13-amd64",
        "root": True,
        "architecture": "x86_64",
        "aspm": "performance",
        "numa_balancing": False,
        "governors": ("performance",),
        "shm": 400 << 30,
        "time": NOW + 1,
        "time_synchronized": True,
        "storage": Storage(
            "/data", exists=True, mount="/data", filesystem="xfs", free=2 * TB, rate=9.5e9, rate_of="/data/models/a"
        ),
        "docker": Docker("28.3.2", "2.38.2", "/var/lib/docker", ("nvidia.com/gpu=all",)),
        "toolkit": Toolkit("1.18.2", tuple(f"nvidia.com/gpu={name}" for name in GPUS), "/var/run/cdi/nvidia.yaml"),
        "limits": Limits("dockerd", 1048576, None, can_raise=True),
        "held": {"linux-image-amd64": True, "nvidia-open": True, "docker.io": True},
    }
    return dataclasses.replace(machine, **{**around, **changes})


def judged(machine: Machine, **wanted: Any) -> dict[str, Finding]:
    return {finding.name: finding for finding in judge(machine, Wanted(**{"clock": NOW, **wanted}))}


def wrong(machine: Machine, **wanted: Any) -> dict[str, str]:
    return {name: finding.verdict for name, finding in judged(machine, **wanted).items() if finding.verdict != "ok"}


@pytest.mark.parametrize(
    ("name", "verdicts"),
    [
        ("eight-one-switch", {"acs": "role", "iommu": "role"}),
        ("eight-two-sockets", {}),
        ("eight-turin", {"acs": "role"}),
        ("eight-four-switches", {"acs": "role", "iommu": "role"}),
        ("four-root-ports", {"gpus": "fail", "pcie:0000:e1:00.0": "warn", "acs": "role"}),
        ("seven-of-eight", {"gpus": "fail", "gpu_errors": "warn", "vram": "unknown", "iommu": "role"}),
        ("seven-after-reboot", {"gpus": "fail", "iommu": "role"}),
        (
            "eight-small-bars",
            {
                "firmware": "warn",
                **{f"bar1:0000:{bus}:00.0": "fail" for bus in ("01", "21", "41", "61", "81", "a1", "c1", "e1")},
                "above_4g": "fail",
                "iommu": "role",
            },
        ),
        (
            "eight-degraded",
            {
                "driver": "fail",
                "pcie:0000:01:00.0": "warn",
                "pcie:0000:05:00.0": "fail",
                "pcie:0000:08:00.0": "warn",
                "iommu": "role",
            },
        ),
        ("no-gpu", {"gpus": "fail"}),
    ],
)
def test_what_is_wrong_with_a_machine(name: str, verdicts: dict[str, str], machine: Callable[..., Machine]) -> None:
    assert wrong(mended(machine(name))) == verdicts


def test_what_is_wrong_with_a_bare_host(machine: Callable[..., Machine]) -> None:
    bare = machine("eight-one-switch", driver=False)
    assert {name: finding.role for name, finding in judged(bare).items() if finding.verdict == "role"} == {
        "driver": "nvidia_driver",
        "vram": "nvidia_driver",
        "acs": "pcie_fabric",
        "iommu": "pcie_fabric",
        "aspm": "pcie_fabric",
        "docker": "docker",
        "toolkit": "nvidia_container_toolkit",
    }


def test_four_gpus_are_right_where_four_are_wanted(machine: Callable[..., Machine]) -> None:
    four = mended(machine("four-root-ports"))
    assert judged(four, gpus=4)["gpus"].verdict == "ok"
    more = judged(four, gpus=2)["gpus"]
    assert (more.verdict, more.value, "set it to 4" in more.remedy) == ("warn", "4", True)


def test_a_host_without_gpus_that_wants_none_has_nothing_to_mend(machine: Callable[..., Machine]) -> None:
    none = mended(machine("no-gpu", driver=False), storage=None, toolkit=Toolkit())
    assert wrong(none, gpus=0, memory_gib=8) == {}
    assert not {"held", "driver", "toolkit", "acs", "iommu", "vram", "topology", "shm"} & set(judged(none, gpus=0))


def test_the_one_that_fell_off_is_named_with_slot_address_and_xid(machine: Callable[..., Machine]) -> None:
    finding = judged(mended(machine("seven-of-eight")))["gpus"]
    assert finding.value.startswith("7 of 8: 0000:06:00.0 (PCIE4 slot 4, below port 0000:02:03.0)")
    assert "Xid 79: GPU has fallen off the bus." in finding.value
    assert "power the machine off" in finding.remedy


def test_a_link_at_rest_says_so_and_a_link_under_load_does_not_rest(machine: Callable[..., Machine]) -> None:
    found = judged(mended(machine("eight-degraded")))
    assert found["pcie"].value == "6x PCIe 5.0 x16 (now at 2.5 GT/s: idle)"
    assert found["pcie:0000:08:00.0"].value == "8 of 32 GT/s (slot 6), under load"
    assert found["pcie:0000:01:00.0"].value == "16 of 32 GT/s, not by idling"
    assert found["pcie:0000:05:00.0"].value == "x8 of x16 (slot 3), at 2.5 GT/s"


def test_a_slot_that_has_less_than_the_card_is_told_apart_from_a_bad_lane(machine: Callable[..., Machine]) -> None:
    finding = judged(mended(machine("four-root-ports")), gpus=4)["pcie:0000:e1:00.0"]
    assert (finding.value, finding.wanted) == (
        "PCIe 4.0 x8, all that the slot has (slot 4); the card could do PCIe 5.0 x16",
        "PCIe 5.0 x16",
    )


def with_gpu(machine: Machine, address: str, **changes: Any) -> Machine:
    return dataclasses.replace(
        machine, devices={**machine.devices, address: dataclasses.replace(machine.devices[address], **changes)}
    )


def test_before_the_driver_is_there_a_slow_link_is_rest(machine: Callable[..., Machine]) -> None:
    bare = machine("eight-two-sockets", driver=False)
    assert judged(bare)["pcie"].verdict == "ok"
    narrow = with_gpu(bare, "0000:41:00.0", link=Link(2.5, 4, 32.0, 16))
    assert judged(narrow)["pcie:0000:41:00.0"].verdict == "fail"


def test_a_card_without_a_large_bar_is_told_of_its_display_mode(machine: Callable[..., Machine]) -> None:
    host = mended(machine("eight-two-sockets"))
    small = with_gpu(host, "0000:01:00.0", bars=(Bar(1, 256 << 20, 0x28060000000, prefetchable=True),), resizable=())
    finding = judged(small)["bar1:0000:01:00.0"]
    assert (finding.verdict, finding.wanted) == ("fail", "128 GiB")
    assert "physical_display_disabled" in finding.remedy
    assert judged(small)["above_4g"].verdict == "ok"


def test_without_root_nothing_is_claimed(machine: Callable[..., Machine]) -> None:
    host = machine("eight-one-switch", driver=False)
    hidden = {
        address: dataclasses.replace(device, whole=False, link=None, acs=None, slot=None, resizable=())
        for address, device in host.devices.items()
    }
    found = judged(dataclasses.replace(host, devices=hidden, events=None))
    assert (found["acs"].verdict, found["gpu_errors"].verdict) == ("unknown", "unknown")
    assert {finding.verdict for name, finding in found.items() if name.startswith(("pcie:", "bar1:"))} == {"unknown"}


@pytest.mark.parametrize(
    ("changes", "check", "verdict", "value"),
    [
        ({"distribution": "Fedora 44"}, "distribution", "fail", "Fedora 44"),
        ({"distribution": "Ubuntu 22.04"}, "distribution", "ok", "Ubuntu 22.04"),
        ({"architecture": "aarch64"}, "architecture", "fail", "aarch64"),
        (
            {"kernel": "5.10.0-32-amd64"},
            "kernel",
            "fail",
            "5.10.0-32-amd64; 6.12.48+deb13-amd64 is installed too, and may be the next boot's",
        ),
        ({"virtual": True}, "virtualisation", "warn", "a virtual machine"),
        ({"uefi": False, "secure_boot": None}, "secure_boot", "ok", "none without UEFI"),
        ({"secure_boot": True}, "secure_boot", "ok", "on, and NVIDIA's module is loaded"),
        ({"secure_boot": True, "driver": None}, "secure_boot", "fail", "on"),
        ({"secure_boot": None}, "secure_boot", "unknown", "not known (needs root)"),
        ({"cgroup": 1}, "cgroup", "warn", "version 1"),
        ({"cgroup": None}, "cgroup", "unknown", "not known"),
        ({"time_synchronized": False}, "time_sync", "warn", "not synchronized"),
        ({"time_synchronized": None}, "time_sync", "unknown", "not known (timedatectl does not answer)"),
        ({"time": NOW + 3600}, "clock", "fail", "3600 s ahead of the controller's"),
        ({"time": NOW - 61}, "clock", "fail", "61 s behind the controller's"),
        ({"time": NOW - 60}, "clock", "ok", "with the controller's"),
        ({"memory": 121 << 30}, "memory", "ok", "121 GiB"),  # 128 built in
        ({"memory": 96 << 30}, "memory", "warn", "96 GiB"),
        ({"memory": 24 << 30}, "shm", "warn", None),
        ({"limits": Limits("dockerd", 20000, 8388608, can_raise=False)}, "nofile", "warn", "20000, of dockerd"),
        ({"limits": Limits("dockerd", 20000, 8388608, can_raise=False)}, "memlock", "warn", "8388608, of dockerd"),
        ({"limits": Limits("dockerd", None, None, can_raise=False)}, "memlock", "ok", "unlimited, of dockerd"),
        (
            {"limits": Limits("the first process", 1024, 1, can_raise=True)},
            "memlock",
            "ok",
            "1, of the first process, which may raise it",
        ),
        ({"limits": None}, "memlock", "unknown", "not known"),
        ({"iommu_present": False, "devices": None}, "iommu", "ok", "off"),
        ({"iommu_present": False, "devices": None, "logical_cpus": 256}, "iommu", "warn", "off"),
        ({"numa_balancing": True}, "numa_balancing", "role", "on"),
        ({"governors": ("performance", "schedutil")}, "cpu_governor", "role", "performance, schedutil"),
        # Role pcie_fabric's verify.yml refuses it, too: the policy then has no effect.
        (
            {"aspm": "performance", "command_line": "ro pcie_aspm=off"},
            "aspm",
            "warn",
            "left to the firmware (pcie_aspm=off)",
        ),
        (
            {"smi": None, "served": ()},
            "vram",
            "unknown",
            "nvidia-smi, which tells it, is not installed",
        ),
        ({"held": None}, "held", "unknown", "not known: no dpkg"),
        ({"held": {}}, "held", "ok", "none is installed"),
        (
            {"held": {"linux-image-amd64": False, "nvidia-open": True, "runc": False}},
            "held",
            "role",
            "1 of 3 packages; not linux-image-amd64, runc",
        ),
        ({"docker": Docker(problem="not installed")}, "docker", "role", "not installed"),
        (
            {"docker": Docker("28.3.2", "", "/var/lib/docker")},
            "docker",
            "role",
            "28.3.2, compose none, data in /var/lib/docker",
        ),
        (
            {"docker": Docker("28.3.2", "2.38.2", "/var/lib/docker", disabled=True)},
            "docker",
            "warn",
            "28.3.2, compose 2.38.2, data in /var/lib/docker, disabled",
        ),
        # What works no role replaces.
        (
            {"docker": Docker("20.10.24", "", "/var/lib/docker")},
            "docker",
            "fail",
            "20.10.24, compose none, data in /var/lib/docker",
        ),
        ({"toolkit": Toolkit("1.17.9")}, "toolkit", "fail", "1.17.9, no CDI specification"),
        ({"toolkit": Toolkit("1.19.0")}, "toolkit", "fail", "1.19.0, no CDI specification"),
        ({"toolkit": Toolkit("1.19.1")}, "toolkit", "role", "1.19.1, no CDI specification"),
        ({"toolkit": Toolkit("1.18.2")}, "toolkit", "role", "1.18.2, no CDI specification"),
        (
            {
                "toolkit": Toolkit(
                    "1.18.2", tuple(f"nvidia.com/gpu={n}" for n in [*range(7), "all"]), "/etc/cdi/nvidia.yaml"
                )
            },
            "toolkit",
            "role",
            "1.18.2, /etc/cdi/nvidia.yaml names 7 GPUs",
        ),
        ({"events": None}, "gpu_errors", "unknown", "the kernel's log is not readable"),
        ({"events": (KernelEvent("", "0000:21:00.0", "MMU Fault", 31),)}, "gpu_errors", "ok", "none"),
        (
            {"events": (KernelEvent("", "0000:21:00.0", "Uncorrectable ECC", 48),) * 3},
            "gpu_errors",
            "warn",
            "0000:21:00.0 (slot 2): Xid 48, Uncorrectable ECC (3 times)",
        ),
        (
            {"events": (KernelEvent("", "0000:00:07.1", "AER: Corrected error"),)},  # of another device's port
            "gpu_errors",
            "ok",
            "none",
        ),
        (
            {"board": Smbios("A", "B", "C", "1.0", "01/02/2026")},
            "firmware",
            "ok",
            "A B, firmware 1.0 of 01/02/2026, UEFI",
        ),
        ({"sockets": 1}, "numa", "warn", "2 nodes, 1 socket, GPUs 4 + 4"),
        (  # the third one is a memory expander
            {"numa": (*(NumaNode(n, str(n), 1 << 38) for n in range(2)), NumaNode(2, "", 1 << 38))},
            "numa",
            "ok",
            "3 nodes, 2 sockets, GPUs 4 + 4 + 0",
        ),
        (
            {"numa": (NumaNode(0, "0-31", 0), NumaNode(1, "32-63", 1 << 38))},
            "numa",
            "warn",
            "2 nodes, 2 sockets, GPUs 4 + 4",
        ),
        ({"driver_topology": {(0, 1): "SYS"}}, "topology", "warn", None),
        ({"driver_topology": {(0, 1): "PHB", (0, 2): "NV18"}}, "topology", "ok", "two-sockets (12x NODE, 16x SYS)"),
    ],
)
def test_a_check_at_its_edge(
    changes: dict[str, Any], check: str, verdict: str, value: str | None, machine: Callable[..., Machine]
) -> None:
    host = mended(machine("eight-two-sockets"))
    if changes.get("devices", ...) is None:  # no IOMMU, so no groups
        changes = {
            **changes,
            "devices": {at: dataclasses.replace(device, iommu_type=None) for at, device in host.devices.items()},
        }
    finding = judged(dataclasses.replace(host, **changes))[check]
    assert finding.verdict == verdict
    assert value is None or finding.value == value
    assert finding.wanted
    assert verdict in ("ok", "unknown") or finding.remedy


@pytest.mark.parametrize(
    ("storage", "verdicts"),
    [
        (Storage("/data"), {"data": "fail"}),
        (Storage("/data", rate_of="no answer in 9 s", filesystem="nfs4", mount="/data"), {"data": "fail"}),
        (
            Storage("/data", exists=True, filesystem="nfs4", mount="/data", free=2 * TB, rate=3e9, rate_of="x"),
            {"data": "warn"},
        ),
        (
            Storage("/data", exists=True, filesystem="overlay", mount="/", free=2 * TB, rate=3e9, rate_of="x"),
            {"data": "warn"},
        ),
        (
            Storage("/data", exists=True, filesystem="xfs", mount="/data", free=int(0.2 * TB), rate=3e9, rate_of="x"),
            {"data_space": "fail"},
        ),
        (
            Storage(
                "/data",
                exists=True,
                filesystem="xfs",
                mount="/data",
                free=int(0.2 * TB),
                used_by_models=int(0.6 * TB),
                rate=3e9,
                rate_of="x",
            ),
            {},
        ),
        (
            Storage("/data", exists=True, filesystem="xfs", mount="/data", free=2 * TB, rate=0.4e9, rate_of="x"),
            {"data_rate": "warn"},
        ),
        (
            Storage(
                "/data",
                exists=True,
                filesystem="zfs",
                mount="/data",
                free=2 * TB,
                rate_of="ZFS answers from its own cache",
            ),
            {"data_rate": "unknown"},
        ),
    ],
)
def test_the_models_disk(storage: Storage, verdicts: dict[str, str], machine: Callable[..., Machine]) -> None:
    assert wrong(mended(machine("eight-two-sockets"), storage=storage)) == verdicts


def test_a_slow_disk_is_told_in_minutes(machine: Callable[..., Machine]) -> None:
    storage = Storage(
        "/data", exists=True, filesystem="xfs", mount="/data", free=2 * TB, rate=0.4e9, rate_of="/data/models/a"
    )
    finding = judged(mended(machine("eight-two-sockets"), storage=storage))["data_rate"]
    assert finding.value == "0.40 GB/s (/data/models/a): 595 GB in 25 min"


def test_module_and_tools_of_two_releases(machine: Callable[..., Machine]) -> None:
    host = mended(machine("eight-two-sockets"))
    assert host.smi is not None
    finding = judged(dataclasses.replace(host, smi=dataclasses.replace(host.smi, driver="595.80.01")))["driver"]
    assert (finding.verdict, finding.remedy) == ("fail", "module and libraries differ, as after an upgrade: reboot")


def test_another_driver_goes_only_where_that_is_wanted(machine: Callable[..., Machine]) -> None:
    host = machine("eight-one-switch")
    assert host.driver
    old = dataclasses.replace(host, driver=dataclasses.replace(host.driver, version="535.288.01"), smi=None)
    closed = dataclasses.replace(host, driver=dataclasses.replace(host.driver, open=False))
    for other in (old, closed):
        assert judged(other)["driver"].verdict == "fail"
        assert "nvidia_driver_replace" in judged(other)["driver"].remedy
        assert judged(other, driver_replace=True)["driver"].verdict == "role"


def test_a_key_of_the_machines_own_is_for_the_role_to_see_to(machine: Callable[..., Machine]) -> None:
    host = mended(machine("eight-one-switch", driver=False), secure_boot=True)
    assert "nvidia_driver_secure_boot: mok" in judged(host)["secure_boot"].remedy
    finding = judged(host, mok=True)["secure_boot"]
    assert (finding.verdict, finding.role) == ("role", "nvidia_driver")


def test_nouveau_is_named_and_goes_by_itself(machine: Callable[..., Machine]) -> None:
    host = with_gpu(machine("eight-two-sockets", driver=False), "0000:01:00.0", driver="nouveau")
    assert judged(host)["driver"].verdict == "role"
    assert judged(host)["driver"].value == "not loaded, nouveau holds 1 of the GPUs"


def test_mixed_gpus(machine: Callable[..., Machine]) -> None:
    host = mended(with_gpu(machine("eight-two-sockets", driver=False), "0000:01:00.0", device=0x2684))
    finding = judged(host)["gpu_model"]
    assert finding.value == "7x NVIDIA RTX PRO 6000 Blackwell Server Edition, 1x NVIDIA [10de:2684]"
    assert finding.verdict == "warn"


def test_what_is_accepted_no_longer_fails(machine: Callable[..., Machine]) -> None:
    host = mended(machine("eight-degraded"))
    one = judged(host, accept=("pcie:0000:05:00.0",))["pcie:0000:05:00.0"]
    assert (one.verdict, one.accepted) == ("warn", True)
    assert judged(host, accept=("pcie",))["pcie:0000:05:00.0"].accepted
    assert judged(host, accept=("pcie:0000:03:00.0",))["pcie:0000:05:00.0"].verdict == "fail"
    assert "accepted pcie" in table(judge(host, Wanted(clock=NOW, accept=("pcie",))))


@pytest.mark.parametrize("argument", ["systemd.unified_cgroup_hierarchy=0", "systemd.unified_cgroup_hierarchy=false"])
def test_the_remedy_for_old_cgroups_names_the_argument_that_is_there(
    argument: str, machine: Callable[..., Machine]
) -> None:
    host = mended(machine("eight-two-sockets"), cgroup=1, command_line=f"ro {argument} quiet")
    assert judged(host)["cgroup"].remedy.startswith(f"remove {argument} from the kernel's arguments")
    unasked = judged(dataclasses.replace(host, command_line="ro quiet"))["cgroup"].remedy
    assert "remove" not in unasked
    assert "add systemd.unified_cgroup_hierarchy=1 to them" in unasked


def test_a_clock_of_which_nothing_is_known_has_a_remedy(machine: Callable[..., Machine]) -> None:
    host = mended(machine("eight-two-sockets"), time_synchronized=None)
    assert "chronyc tracking" in judged(host)["time_sync"].remedy
    assert "chronyc tracking" in table(judge(host, Wanted(clock=NOW)))


def test_accepting_what_is_no_check_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"no such check: acss. There are: distribution, .*, toolkit$"):
        judge(Machine(), Wanted(accept=("acss",)))


def test_a_machine_of_which_nothing_is_known_is_judged_without_a_crash() -> None:
    verdicts = {finding.check: finding.verdict for finding in judge(Machine(), Wanted())}
    assert verdicts["gpus"] == "fail"
    assert verdicts["clock"] == "unknown"


def test_the_table(machine: Callable[..., Machine]) -> None:
    text = table(judge(mended(machine("eight-small-bars")), Wanted(clock=NOW)))
    lines = text.splitlines()
    assert max(map(len, lines)) <= findings.WIDTH
    assert lines[0].split() == ["VERDICT", "CHECK", "VALUE", "WANTED"]
    # As host_check_accept wants it.
    assert any(line.startswith("FAIL     above_4g ") for line in lines)
    # Eight cards with the same fault share a line.
    assert sum(line.startswith("FAIL     bar1") for line in lines) == 1
    assert lines[-1] == "9 fail, 1 role (pcie_fabric), 1 warn, 30 ok"
    assert "0000:81:00.0  SYS  SYS  SYS  SYS  X    NODE NODE NODE  node 1" in text


def test_what_fails_in_words(machine: Callable[..., Machine]) -> None:
    found = judge(mended(machine("eight-small-bars")), Wanted(clock=NOW))
    text = findings.failures(found)
    assert [line.partition(":")[0] for line in text.splitlines()] == ["bar1", "above_4g"]
    bars = text.splitlines()[0]
    assert bars.startswith("bar1: 0000:01:00.0, 0000:21:00.0, ")
    assert " (wanted: 128 GiB). -> " in bars


def test_the_whole_goes_into_json(machine: Callable[..., Machine]) -> None:
    host = mended(machine("seven-of-eight"))
    report = json.loads(json.dumps(findings.to_json(host, judge(host, Wanted(clock=NOW)))))
    assert (report["schema"], report["verdict"], report["topology"]["name"]) == (1, "fail", "one-switch")
    assert set(report["findings"][0]) == {
        "check", "subject", "value", "wanted", "verdict", "remedy", "role", "accepted", "detail",
    }  # fmt: skip
