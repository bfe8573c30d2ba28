"""What host_check tells as held back from upgrades is what the roles hold."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from aerie_host.machine import held_by
from ansible.parsing.dataloader import DataLoader
from ansible.template import Templar, trust_as_template

ROLES = Path(__file__).parents[3] / "ansible/roles"
# As Debian 13, Ubuntu 24.04 and NVIDIA's repository name them, and some of like names that nobody holds.
PACKAGES = [
    "linux-image-amd64", "linux-image-6.12.48+deb13-amd64", "linux-headers-amd64", "linux-modules-6.8.0-85-generic",
    "linux-generic-hwe-24.04", "linux-kbuild-6.12.48+deb13", "linux-libc-dev", "linux-base", "linux-firmware",
    "nvidia-kernel-open-dkms", "nvidia-driver-cuda", "nvidia-persistenced", "nvidia-dkms-580-open",
    "nvidia-firmware-580", "libnvidia-compute-580", "libnvidia-ml1", "libcuda1", "cuda-drivers",
    "libnvcuvid1", "libcudart-13-0", "libcudnn9-cuda-13", "libnvjpeg-13-0", "libnvvm-13-0", "nvidia-cuda-toolkit",
    "xserver-xorg-video-nvidia", "cuda-toolkit-13-0",
    "nvidia-container-toolkit", "nvidia-container-toolkit-base", "libnvidia-container-tools", "libnvidia-container1",
    "docker.io", "docker-cli", "docker-ce", "docker-ce-cli", "containerd", "containerd.io", "runc", "docker-compose",
    "docker-buildx-plugin", "docker.io-doc", "golang-github-containerd-console-dev",
]  # fmt: skip


def held(role: str) -> set[str]:
    """Return which of the packages a role would hold on a host that has them all."""
    loader = DataLoader()
    known = {
        name: value
        for file in ("defaults/main.yml", "vars/main.yml")
        for name, value in loader.load_from_file(str(ROLES / role / file), trusted_as_template=True).items()
    }
    known["__nvidia_driver_installed"] = dict.fromkeys(PACKAGES, "1")
    named = {
        "docker": lambda: yaml.safe_load((ROLES / role / "vars/main.yml").read_text())["__docker_held"],
        "nvidia_driver": lambda: Templar(loader, known).evaluate_expression(
            trust_as_template("__nvidia_driver_holdable")
        ),
        "nvidia_container_toolkit": lambda: re.findall(
            r"(?<![/-])\b(?:lib)?nvidia-container-?[a-z0-9-]+\b(?![.])", (ROLES / role / "files/probe.sh").read_text()
        ),
    }[role]()
    return set(named) & set(PACKAGES)


@pytest.mark.parametrize("role", ["docker", "nvidia_driver", "nvidia_container_toolkit"])
def test_host_check_looks_at_what_a_role_holds(role: str) -> None:
    names = held(role)
    assert names
    assert {name for name in PACKAGES if held_by(name) == role} == names
