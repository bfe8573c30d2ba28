"""What the plays complain of before they begin: names, types, sizes and tags."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "ansible/plugins/lookup"))
from complaints import ANSIBLE, INTERNAL, of_names, of_sizes, of_tags, of_types, read_options, read_tags

OPTIONS = read_options(ANSIBLE)
DEFAULTS = {
    name: option["default"]
    for name, option in OPTIONS.items()
    if "default" in option and "{{" not in str(option["default"])
}
ROLES = ["host_check", "nvidia_driver", "docker", "nvidia_container_toolkit", "pcie_fabric", "model_cache", "vllm"]


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("aerie_gpu", "aerie_gpus"),
        ("aerie_gpsu", "aerie_gpus"),
        ("aerie_reboot", "aerie_reboot_ok"),
        ("host_chek_accept", "host_check_accept"),
        ("vllm_apiport", "vllm_api_port"),
        ("nvidia_driver_reboot", "nvidia_driver_reboot_ok"),
    ],
)
def test_a_name_that_is_nearly_one_is_told_which(name: str, meant: str) -> None:
    assert of_names([name, "aerie_gpus"], OPTIONS) == [f"{name} is no variable of these plays: did you mean {meant}?"]


def test_other_names_are_the_sites_own() -> None:
    # Of geerlingguy.docker, nvidia.nvidia_driver, Ansible itself, roles' own, and a site's.
    names = ["docker_packages", "docker_packages_state", "docker_daemon_options", "docker_users", "docker_edition"]
    names += ["nvidia_driver_package_version", "nvidia_driver_skip_reboot", "nvidia_driver_package_state"]
    names += ["ansible_aerie_gpu", "__vllm_api_ports", "groups", "inventory_hostname", "aerie_rack", "vllm_owner"]
    names += ["nvidia_container_toolkit_image", "vllm_port"]
    assert of_names([*names, *OPTIONS], OPTIONS) == []


def test_what_roles_and_plays_tell_each_other_is_no_complaint() -> None:
    texts = [path.read_text() for path in [*ANSIBLE.glob("*.yml"), *ANSIBLE.glob("tasks/*")]]
    texts += [path.read_text() for path in ANSIBLE.glob("roles/*/tasks/*.yml")]
    name = rf"(?:aerie|{'|'.join(ROLES)})_\w+"
    written = {found for text in texts for found in re.findall(rf"^ *(?:register: *)?({name})\b", text, re.MULTILINE)}
    assert of_names(written, OPTIONS) == []
    assert {name for name in written if name.startswith("aerie_")} - OPTIONS.keys() <= INTERNAL <= written


@pytest.mark.parametrize(
    ("name", "value", "complaint"),
    [
        ("aerie_gpus", {"a": 1}, "aerie_gpus is a dictionary: give a whole number"),
        ("aerie_gpus", "eight", "aerie_gpus is 'eight': give a whole number"),
        ("aerie_gpus", 2.5, "aerie_gpus is 2.5: give a whole number"),
        ("aerie_gpus", "inf", "aerie_gpus is 'inf': give a whole number"),
        ("aerie_gpus", None, "aerie_gpus is empty: give a whole number"),
        ("host_check_data_read_gb_s", "fast", "host_check_data_read_gb_s is 'fast': give a number"),
        ("aerie_reboot_ok", ["yes"], "aerie_reboot_ok is a list: give true or false"),
        ("aerie_reboot_ok", "perhaps", "aerie_reboot_ok is 'perhaps': give true or false"),
        ("aerie_serial", {"a": 1}, "aerie_serial is a dictionary: give a string"),
        ("vllm_bind_address", {"a": 1}, "vllm_bind_address is a dictionary: give a string"),
        ("vllm_image_ref", ["a"], "vllm_image_ref is a list: give a string"),
        ("vllm_models_dir", ["/data"], "vllm_models_dir is a list: give a path"),
        ("vllm_engine_env", "NCCL_DEBUG=INFO", "vllm_engine_env is a string: give a dictionary"),
        (
            "vllm_engine_env",
            '{"NCCL_DEBUG": "INFO"}',
            "vllm_engine_env is a string: give a dictionary",
        ),
        ("docker_daemon_config", [], "docker_daemon_config is a list: give a dictionary"),
        ("host_check_accept", {"acs": True}, "host_check_accept is a dictionary: give a list"),
        ("host_check_accept", '["acs"]', "host_check_accept is a string: give a list"),
        ("vllm_rehearse_accept", 5, "vllm_rehearse_accept is a number: give a list"),
        ("vllm_api_keys", 5, "vllm_api_keys is a number: give a list"),
        ("host_check_accept", [{"acs": True}], "host_check_accept is a list with a dictionary in it: give a list"),
    ],
)
def test_a_value_of_another_type(name: str, value: Any, complaint: str) -> None:
    assert of_types({name: value}, OPTIONS)[name].startswith(complaint)


def test_what_is_wanted_is_told_as_the_specification_has_it() -> None:
    flag, mapping = of_types({"aerie_expose": {}, "vllm_compose_env": "A=1"}, OPTIONS).values()
    assert flag.startswith("aerie_expose is a dictionary: give true or false. Permits a vllm_bind_address that others ")
    assert """: give a dictionary, on the command line by -e '{"vllm_compose_env": {...}}'. """ in mapping


def test_a_secret_is_not_shown() -> None:
    # Tokens stand in other collections, too.
    assert "secret" not in of_types({"vllm_engine_env": "HF_TOKEN=secret"}, OPTIONS)["vllm_engine_env"]
    (complaint,) = of_types({"vllm_api_keys": '["secret"]'}, OPTIONS).values()
    assert complaint.startswith(
        "vllm_api_keys is a string: give a list, on the command line by -e '{\"vllm_api_keys\": [...]}'."
    )


def test_what_ansible_converts_is_no_complaint() -> None:
    assert of_types(DEFAULTS, OPTIONS) == {}
    values: dict[str, Any] = {
        "aerie_gpus": "8",
        "aerie_reboot_ok": "yes",
        "aerie_undo": 1,
        "aerie_serial": 1,
        "vllm_image_ref": None,
    }
    values |= {"host_check_accept": "acs,memory", "vllm_rehearse_accept": [1], "host_check_data_read_gb_s": "2"}
    values |= {
        "vllm_api_keys": "",
        "pcie_fabric_iommu": False,
        "nvidia_driver_branch": 580,
        "vllm_models_dir": "~/models",
    }
    assert of_types(values, OPTIONS) == {}


def test_the_types_of_all_options_are_known() -> None:
    texts = {name for name, option in OPTIONS.items() if option["type"] in {"str", "path"}}
    assert of_types(dict.fromkeys(OPTIONS, object()), OPTIONS).keys() == OPTIONS.keys() - texts


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"aerie_gpus": -1}, "aerie_gpus is -1: give a number that is not below 0."),
        ({"host_check_vram_gib": "-0.5"}, "host_check_vram_gib is -0.5: give a number that is not below 0."),
        ({"vllm_api_port": -1}, "vllm_api_port is -1: give a port from 1 to 65535."),
        ({"vllm_status_port": "65536"}, "vllm_status_port is 65536: give a port from 1 to 65535."),
        ({"aerie_serial": 0}, "aerie_serial is 0: give a number of hosts from 1 on, or a share such as 25%."),
        ({"aerie_serial": "0%"}, "aerie_serial is 0%: give a number of hosts from 1 on, or a share such as 25%."),
        ({"aerie_serial": "one"}, "aerie_serial is one: give a number of hosts from 1 on, or a share such as 25%."),
    ],
)  # fmt: skip
def test_a_number_out_of_range(values: dict[str, Any], complaint: str) -> None:
    assert of_sizes(values, OPTIONS) == [complaint]


def test_numbers_in_range() -> None:
    assert of_sizes(DEFAULTS, OPTIONS) == []
    assert of_sizes({"vllm_api_port": "65535", "aerie_serial": "1"}, OPTIONS) == []


@pytest.mark.parametrize("play", ["site", "verify", "undo", "check"])
def test_a_tag_that_the_play_does_not_have(play: str) -> None:
    tags = read_tags(ANSIBLE / f"{play}.yml")
    assert sorted(tags) == (["host_check"] if play == "check" else sorted(ROLES))
    assert of_tags(["all", "always", *tags], f"{play}.yml", tags) == []
    (complaint,) = of_tags(["host_chek", tags[0]], f"{play}.yml", tags)
    assert complaint == f"{play}.yml has no tag host_chek; it has {', '.join(tags)}."
