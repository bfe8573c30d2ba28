"""What role nvidia_driver would take, and from where, on each release, those that Molecule does not run among them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ansible.parsing.dataloader import DataLoader
from ansible.template import Templar, trust_as_template

ROLE = Path(__file__).parents[3] / "ansible/roles/nvidia_driver"
VENDOR = "https://developer.download.nvidia.com/compute/cuda/repos"


def plan(distribution: str, version: str, expression: str, **variables: Any) -> Any:
    """Evaluate an expression with the role's variables on a host of this release."""
    loader = DataLoader()
    facts = {
        "distribution": distribution,
        "distribution_version": version,
        "distribution_major_version": version.split(".", maxsplit=1)[0],
    }
    known = {
        **loader.load_from_file(str(ROLE / "defaults/main.yml"), trusted_as_template=True),
        **loader.load_from_file(str(ROLE / "vars/main.yml"), trusted_as_template=True),
        "ansible_facts": facts,
        "__nvidia_driver_installed": {},
        "__nvidia_driver_has": {"loaded": "", "runfile": ""},
        **variables,
    }
    return Templar(loader, known).evaluate_expression(trust_as_template(expression))


@pytest.mark.parametrize(
    ("distribution", "version", "repository", "fingerprint"),
    [
        ("Debian", "12.11", "debian12", "EB693B3035CD5710E231E123A4B469963BF863CC"),
        ("Debian", "13.1", "debian13", "02182E60104FCDC26EAE1B8597A5D4CB8793F200"),
        ("Ubuntu", "22.04", "ubuntu2204", "EB693B3035CD5710E231E123A4B469963BF863CC"),
        ("Ubuntu", "24.04", "ubuntu2404", "EB693B3035CD5710E231E123A4B469963BF863CC"),
    ],
)
def test_each_release_has_its_repository_and_key(
    distribution: str, version: str, repository: str, fingerprint: str
) -> None:
    assert plan(distribution, version, "__nvidia_driver_repository") == f"{VENDOR}/{repository}/x86_64"
    assert plan(distribution, version, "__nvidia_driver_fingerprint") == fingerprint
    key = plan(distribution, version, "__nvidia_driver_platforms[__nvidia_driver_platform].key")
    assert key.upper() == f"{fingerprint[-8:]}.PUB"


@pytest.mark.parametrize(
    ("distribution", "version", "branch", "packages"),
    [
        (
            "Debian",
            "12.11",
            "580",
            ["nvidia-kernel-open-dkms", "nvidia-driver-cuda", "nvidia-persistenced", "nvidia-modprobe"],
        ),
        (
            "Ubuntu",
            "24.04",
            "580",
            [
                "nvidia-dkms-580-open",
                "libnvidia-compute-580",
                "libnvidia-cfg1-580",
                "nvidia-utils-580",
                "nvidia-compute-utils-580",
                "nvidia-modprobe",
            ],
        ),
        ("Ubuntu", "22.04", "595", ["nvidia-dkms-open", "libnvidia-compute", "nvidia-persistenced", "nvidia-modprobe"]),
    ],
)
def test_packages_are_called_as_the_release_and_the_branch_call_them(
    distribution: str, version: str, branch: str, packages: list[str]
) -> None:
    assert plan(distribution, version, "__nvidia_driver_packages", nvidia_driver_branch=branch) == packages
    assert plan(distribution, version, "__nvidia_driver_missing", nvidia_driver_branch=branch) == packages


def test_the_pin_is_the_branchs_or_the_releases() -> None:
    assert plan("Ubuntu", "24.04", "__nvidia_driver_pinning") == "nvidia-driver-pinning-580"
    pinned = plan("Ubuntu", "24.04", "__nvidia_driver_pinning", nvidia_driver_version="580.173.02")
    assert pinned == "nvidia-driver-pinning-580.173.02"


@pytest.mark.parametrize(
    ("installed", "foreign"),
    [
        ({}, []),
        # Ubuntu's own package of the branch, and NVIDIA's: both are what is wanted, and stay.
        ({"nvidia-dkms-580-open": "580.159.03-0ubuntu0.24.04.1"}, []),
        ({"nvidia-dkms-580-open": "580.173.02-1ubuntu1", "nvidia-kernel-source-580-open": "580.173.02-1ubuntu1"}, []),
        # The proprietary modules of the branch, which do not serve Blackwell.
        ({"nvidia-dkms-580": "580.159.03-0ubuntu0.24.04.1"}, ["nvidia-dkms-580 580.159.03-0ubuntu0.24.04.1"]),
        ({"nvidia-dkms-570-open": "570.86.15-0ubuntu1"}, ["nvidia-dkms-570-open 570.86.15-0ubuntu1"]),
        ({"nvidia-dkms-open": "595.71.05-1ubuntu1"}, ["nvidia-dkms-open 595.71.05-1ubuntu1"]),
        # Canonical's modules, built for one kernel alone.
        (
            {"linux-modules-nvidia-580-open-generic": "6.8.0-90.91"},
            ["linux-modules-nvidia-580-open-generic 6.8.0-90.91"],
        ),
        # No driver: the container toolkit, firmware that is called alike, dkms itself.
        ({"nvidia-container-toolkit": "1.19.1-1", "dkms": "3.2.2", "linux-headers-generic": "6.8.0.90"}, []),
    ],
)
def test_another_driver_is_known_by_its_modules(installed: dict[str, str], foreign: list[str]) -> None:
    assert plan("Ubuntu", "24.04", "__nvidia_driver_foreign", __nvidia_driver_installed=installed) == foreign


@pytest.mark.parametrize(
    ("name", "version"),
    [
        ("nvidia-kernel-dkms", "550.163.01-2"),
        ("nvidia-open-kernel-dkms", "550.163.01-2"),
        ("nvidia-tesla-470-kernel-dkms", "470.256.02-1"),
        ("nvidia-kernel-open-dkms", "595.71.05-1"),
    ],
)
def test_debians_drivers_are_known_too(name: str, version: str) -> None:
    found = plan("Debian", "13.1", "__nvidia_driver_foreign", __nvidia_driver_installed={name: version})
    assert found == [f"{name} {version}"]


def test_a_driver_of_no_package_is_known_by_its_remover_or_by_being_loaded() -> None:
    by_hand = {"loaded": "575.57.08", "runfile": "/usr/bin/nvidia-uninstall"}
    (found,) = plan("Debian", "12.11", "__nvidia_driver_foreign", __nvidia_driver_has=by_hand)
    assert "/usr/bin/nvidia-uninstall" in found
    (found,) = plan("Debian", "12.11", "__nvidia_driver_foreign", __nvidia_driver_has={**by_hand, "runfile": ""})
    assert "575.57.08" in found


def test_a_driver_that_waits_for_its_reboot_is_not_foreign() -> None:
    found = plan(
        "Debian",
        "12.11",
        "__nvidia_driver_foreign",
        __nvidia_driver_has={"loaded": "535.288.01", "runfile": ""},
        __nvidia_driver_installed={"nvidia-kernel-open-dkms": "580.173.02-1"},
    )
    assert found == []


@pytest.mark.parametrize(
    ("package", "version", "wanted"),
    [
        ("580.173.02-1", "", True),
        ("1:580.173.02-1", "", True),
        ("5800.1-1", "", False),
        ("595.71.05-1", "", False),
        ("580.173.02-1", "580.173.02", True),
        ("580.159.03-1", "580.173.02", False),
        ("580.173.020-1", "580.173.02", False),
    ],
)
def test_a_version_is_of_the_branch_or_of_the_release(package: str, version: str, wanted: bool) -> None:  # noqa: FBT001
    there = plan(
        "Debian",
        "13.1",
        "__nvidia_driver_is_there",
        nvidia_driver_version=version,
        __nvidia_driver_installed={"nvidia-kernel-open-dkms": package},
    )
    assert there is wanted


def test_what_is_held_is_found_by_looking() -> None:
    there = [
        "linux-image-generic-hwe-24.04",
        "linux-image-6.14.0-37-generic",
        "linux-modules-extra-6.14.0-37-generic",
        "linux-headers-generic-hwe-24.04",
        "linux-generic-hwe-24.04",
        "nvidia-dkms-580-open",
        "libnvidia-compute-580",
        "nvidia-driver-pinning-580",
    ]
    others = [
        "linux-libc-dev",
        "linux-base",
        "linux-firmware",
        "nvidia-container-toolkit",
        "libnvidia-container1",
        "docker.io",
    ]
    held = plan(
        "Ubuntu", "24.04", "__nvidia_driver_holdable", __nvidia_driver_installed=dict.fromkeys([*there, *others], "1")
    )
    assert sorted(held) == sorted(there)


@pytest.mark.parametrize(
    ("installed", "version", "present", "missing"),
    [
        ({"nvidia-kernel-open-dkms": "580.159.03-1", "nvidia-driver-cuda": "580.159.03-1"}, "", "580.159.03", 2),
        # Another one is wanted in its place: nothing has to stay.
        ({"nvidia-kernel-open-dkms": "580.159.03-1", "nvidia-driver-cuda": "580.159.03-1"}, "580.173.02", "", 3),
        ({}, "", "", 4),
    ],
)
def test_what_is_missing_comes_in_the_release_that_is_there(
    installed: dict[str, str], version: str, present: str, missing: int
) -> None:
    known = {"__nvidia_driver_installed": installed, "nvidia_driver_version": version}
    assert plan("Debian", "13.1", "__nvidia_driver_present", **known) == present
    assert len(plan("Debian", "13.1", "__nvidia_driver_missing", **known)) == missing


def test_with_secure_boot_the_program_that_enrols_keys_is_wanted_too() -> None:
    secure = {"loaded": "", "runfile": "", "secure_boot": "on"}
    assert plan("Debian", "13.1", "__nvidia_driver_packages", __nvidia_driver_has=secure)[-1] == "mokutil"


def test_only_holds_of_the_role_are_released() -> None:
    holds = {
        "nvidia-driver-cuda": {"before": {"held": False}, "written": {"held": True}},
        # A run that was cut short before its end.
        "libcuda1": {"before": {"held": False}},
        "linux-image-amd64": {"before": {"held": True}, "written": {"held": True}},
        # Held by the site, after the role had left it free.
        "linux-headers-amd64": {"before": {"held": False}, "written": {"held": False}},
        # Released by somebody meanwhile.
        "nvidia-modprobe": {"before": {"held": False}, "written": {"held": True}},
    }
    record = json.dumps({"schema": 1, "roles": {"nvidia_driver": {"holds": holds}}})
    held = [name for name in holds if name != "nvidia-modprobe"]
    known = {"__nvidia_driver_held": {"stdout_lines": held}, "__nvidia_driver_record": {"stdout": record}}
    assert plan("Debian", "13.1", "__nvidia_driver_to_release", **known) == ["nvidia-driver-cuda", "libcuda1"]
    # A dry run on a host without a record.
    for nothing in ({}, {"stdout": ""}):
        found = plan("Debian", "13.1", "__nvidia_driver_to_release", **known | {"__nvidia_driver_record": nothing})
        assert found == []


def test_what_is_not_signed_is_told_with_the_releases_key() -> None:
    found = plan("Debian", "13.1", "__nvidia_driver_meanings.unsigned")
    assert "not signed with the key 02182E60104FCDC26EAE1B8597A5D4CB8793F200: " in found


def test_a_conflict_is_special_where_a_release_stays() -> None:
    installed = {"nvidia-kernel-open-dkms": "580.159.03-1"}
    found = plan("Debian", "13.1", "__nvidia_driver_meanings.conflict", __nvidia_driver_installed=installed)
    assert "no longer have what is missing in release 580.159.03, which is installed and stays" in found
    assert plan("Debian", "13.1", "__nvidia_driver_meanings.conflict") == ""


def test_no_option_at_all_is_a_wish_too() -> None:
    expression = "__nvidia_driver_wanted_options | default('', true) | split"
    assert plan("Debian", "13.1", expression) == ["nvidia_uvm.uvm_disable_hmm=1"]
    assert plan("Debian", "13.1", expression, nvidia_driver_module_options={}) == []
