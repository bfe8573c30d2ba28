"""What the compose files say, as `docker compose config` understands them."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from aerie import cli
from aerie.supervisor import run

from .conftest import FILES, REPOSITORY, Project

both = pytest.mark.parametrize("combination", FILES)
GIB = 2**30


def seconds(duration: str) -> float:
    """Of a Go duration such as 2m0s."""
    return sum(
        float(number) * {"h": 3600, "m": 60, "s": 1}[unit] for number, unit in re.findall(r"([\d.]+)([hms])", duration)
    )


def gibibytes(size: str) -> float:
    number, unit = re.fullmatch(r"(\d+)([gm])b?", size).groups()
    return int(number) * {"g": 1, "m": 1 / 1024}[unit]


def mounts(service: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {mount["target"]: mount for mount in service["volumes"]}


@both
def test_the_container_can_gain_nothing(project: Project, combination: str) -> None:
    service = project.service(combination)
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    # NUMA binding, and nothing else.
    assert service["cap_add"] == ["SYS_NICE"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert not {"privileged", "network_mode", "pid", "ipc", "devices", "user", "userns_mode"} & set(service)
    assert not [source for source in (mount["source"] for mount in service["volumes"]) if "docker.sock" in source]


@both
def test_ports_bind_to_loopback(project: Project, combination: str) -> None:
    ports = {port["target"]: (port["host_ip"], port["published"]) for port in project.service(combination)["ports"]}
    assert ports == {8000: ("127.0.0.1", "8000"), 8001: ("127.0.0.1", "8001")}
    moved = project.service(combination, AERIE_BIND="192.0.2.1", AERIE_API_PORT="18200", AERIE_STATUS_PORT="18201")
    ports = {port["target"]: (port["host_ip"], port["published"]) for port in moved["ports"]}
    assert ports == {8000: ("192.0.2.1", "18200"), 8001: ("192.0.2.1", "18201")}


@both
def test_docker_waits_longer_than_the_supervisor_lets_requests_drain(project: Project, combination: str) -> None:
    """And the values that compose repeats are the supervisor's own."""
    service = project.service(combination)
    own, engine = service["command"][: service["command"].index("--")], service["command"][-2:]
    told, default = cli._parser().parse_args(own), cli._parser().parse_args(["serve"])
    assert told == default
    assert told.drain_timeout + run._TEARDOWN + run._LAST_OUTPUT < seconds(service["stop_grace_period"])
    assert engine == ["--config", "/etc/aerie/serve.yaml"]
    config = yaml.safe_load(Path(mounts(service)["/etc/aerie/serve.yaml"]["source"]).read_text())
    assert "shutdown-timeout" not in config, "the supervisor passes it on"
    longer = project.service(combination, AERIE_DRAIN_TIMEOUT="300", AERIE_STOP_GRACE_PERIOD="330s")
    assert "300" in longer["command"]
    assert seconds(longer["stop_grace_period"]) == 330


@both
def test_the_log_has_an_end(project: Project, combination: str) -> None:
    logging = project.service(combination)["logging"]
    assert logging["driver"] == "local"
    assert set(logging["options"]) == {"max-size", "max-file"}


@both
def test_everything_mounted_from_the_host_is_read_only(project: Project, combination: str) -> None:
    for mount in project.service(combination)["volumes"]:
        assert (mount["type"], mount.get("read_only", False)) in {("bind", True), ("volume", False)}, mount


@both
def test_the_key_is_mounted_as_a_directory_and_stands_in_no_variable(project: Project, combination: str) -> None:
    service = project.service(combination)
    assert mounts(service)["/etc/aerie/secrets"]["source"] == str(project.directory / "secrets")
    assert not [name for name in service["environment"] if "KEY" in name]
    assert not [word for word in service["command"] if "key" in word]


@both
def test_temporary_files_can_be_executed_and_have_a_limit(project: Project, combination: str) -> None:
    (tmp,) = project.service(combination)["tmpfs"]
    _, options = tmp.split(":")
    assert {"exec", "size=8g"} <= set(options.split(","))
    assert "size=2g" in project.service(combination, AERIE_TMP_SIZE="2g")["tmpfs"][0]


def test_shared_memory_holds_what_its_comment_adds_up(project: Project) -> None:
    queues = 10 * 16 / 1024 + 8 * 10 * 24 / 1024 + 6 * 4 / 1024
    communicator = 8 * 16 * 2 * 4 / 1024
    needed = queues + 3 * communicator + 4
    assert needed == pytest.approx(9.1, abs=0.05)
    assert int(project.service("gpu")["shm_size"]) / GIB > needed
    assert int(project.service("gpu", AERIE_SHM_SIZE="32gb")["shm_size"]) / GIB == 32


def test_limits_come_from_variables(project: Project) -> None:
    assert project.service("gpu")["ulimits"] == {"memlock": -1, "nofile": 65536}
    lowered = project.service("gpu", AERIE_MEMLOCK="8388608", AERIE_NOFILE="20000")
    assert lowered["ulimits"] == {"memlock": 8388608, "nofile": 20000}
    # A daemon that may not raise limits starts the CPU flavour all the same.
    assert "ulimits" not in project.service("cpu")


def test_gpus_come_by_cdi_all_of_them(project: Project) -> None:
    (device,) = project.service("gpu")["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "cdi", "device_ids": ["nvidia.com/gpu=all"], "capabilities": ["gpu"]}


@both
def test_docker_restarts_the_container_unless_something_else_does(project: Project, combination: str) -> None:
    assert project.service(combination)["restart"] == "unless-stopped"
    assert project.service(combination, AERIE_RESTART="no")["restart"] == "no"


@both
def test_the_sites_own_variables_reach_the_engine_and_win(project: Project, combination: str) -> None:
    before = project.service(combination)["environment"]
    (project.directory / "engine.env").write_text("NCCL_P2P_LEVEL=PHB\nVLLM_LOGGING_LEVEL=DEBUG\n")
    after = project.service(combination)["environment"]
    assert {name: after[name] for name in after if before.get(name) != after[name]} == {
        "NCCL_P2P_LEVEL": "PHB",
        "VLLM_LOGGING_LEVEL": "DEBUG",
    }
    assert ("NCCL_P2P_LEVEL" in before) == (combination == "gpu")


def test_what_differs_by_the_gpus_connection_is_read_after_the_base_and_before_the_site(project: Project) -> None:
    base = project.service("gpu")["environment"]
    assert project.service("gpu", AERIE_FABRIC="peer-dead")["environment"] == base | {"NCCL_P2P_DISABLE": "1"}
    assert project.service("gpu", AERIE_FABRIC="one-switch")["environment"] == base | {"NCCL_P2P_LEVEL": "PXB"}
    # A host whose connection has nothing of its own gets the base alone.
    assert project.service("gpu", AERIE_FABRIC="switches")["environment"] == base
    (project.directory / "engine.env").write_text("NCCL_P2P_LEVEL=PHB\n")
    site = project.service("gpu", AERIE_FABRIC="one-switch")["environment"]
    assert site == base | {"NCCL_P2P_LEVEL": "PHB"}


def test_cpu_flavour_needs_no_gpu_no_models_and_no_nccl(project: Project) -> None:
    gpu, cpu = project.service("gpu"), project.service("cpu")
    assert "deploy" not in cpu
    assert set(mounts(gpu)) - set(mounts(cpu)) == {"/data/models"}
    for target, mount in mounts(cpu).items():
        expected = {**mounts(gpu)[target]}
        if target == "/etc/aerie/serve.yaml":
            expected["source"] = str(project.directory / "config/tiny.yaml")
        assert mount == expected
    assert gpu["environment"]["NCCL_P2P_LEVEL"] == "SYS"
    assert not [name for name in cpu["environment"] if name.startswith(("NCCL_", "CUDA_"))]
    assert cpu["environment"]["OMP_NUM_THREADS"] == "1"
    assert cpu["environment"]["VLLM_CPU_KVCACHE_SPACE"] == "1"
    assert (gpu["build"]["target"], cpu["build"]["target"]) == ("cuda", "cpu")


@both
def test_redirects_of_media_are_off(project: Project, combination: str) -> None:
    assert project.service(combination)["environment"]["VLLM_MEDIA_URL_ALLOW_REDIRECTS"] == "0"


@both
def test_an_image_is_built_and_never_looked_up_in_a_registry(project: Project, combination: str) -> None:
    service = project.service(combination)
    assert service["pull_policy"] == "never"
    assert service["build"]["context"] == str(project.directory)


@both
def test_health_is_the_images_own(project: Project, combination: str, image: str) -> None:
    assert "healthcheck" not in project.service(combination)
    inspected = json.loads(
        subprocess.run(["docker", "image", "inspect", image], check=True, capture_output=True, text=True).stdout
    )
    health = inspected[0]["Config"]["Healthcheck"]
    assert health["Test"][0] == "CMD"
    # Nanoseconds. `starting` however long the load takes, and healthy within 2 s of the first success.
    assert health["StartPeriod"] == 24 * 3600 * 10**9
    assert health["StartInterval"] == 2 * 10**9
    assert health["Interval"] == 10 * 10**9


@both
def test_the_configurations_digest_is_a_label(project: Project, combination: str) -> None:
    assert project.service(combination, AERIE_CONFIG_DIGEST="abc")["labels"]["io.aerie.config-digest"] == "abc"


def env_blocks() -> dict[str, str]:
    """.env.example's two blocks, each as a .env file with its lines made active."""
    gpu, cpu = re.split(r"^# --- ", (REPOSITORY / ".env.example").read_text(), flags=re.MULTILINE)[1:3]
    return {"gpu": gpu, "cpu": re.sub(r"^#(?=[A-Z_]+=)", "", cpu, flags=re.MULTILINE)}


@both
def test_env_selects_the_files(project: Project, combination: str) -> None:
    lines = [line for line in env_blocks()[combination].splitlines() if re.match(r"[A-Z_]+=", line)]
    (project.directory / ".env").write_text("\n".join(lines))
    done = project.compose("config", "--format", "json")
    assert done.returncode == 0, done.stderr
    service = json.loads(done.stdout)["services"]["vllm"]
    assert service["build"]["target"] == {"gpu": "cuda", "cpu": "cpu"}[combination]
    assert service["image"] == f"aerie:{service['build']['target']}"


def test_env_example_as_it_stands_is_the_eight_gpu_host(project: Project) -> None:
    (project.directory / ".env.example").rename(project.directory / ".env")
    done = project.compose("config", "--format", "json")
    assert done.returncode == 0, done.stderr
    assert "deploy" in json.loads(done.stdout)["services"]["vllm"]


def test_env_example_lists_every_variable_and_no_version() -> None:
    example = (REPOSITORY / ".env.example").read_text()
    named = set(re.findall(r"^#?(AERIE_[A-Z_]+)=", example, flags=re.MULTILINE))
    texts = [(REPOSITORY / name).read_text() for name in ("compose.yaml", "compose.cpu.yaml")]
    used = {name for text in texts for name in re.findall(r"\$\{(AERIE_[A-Z_]+)", text)}
    # Set by the role, and only of use to it.
    assert named == used - {"AERIE_CONFIG_DIGEST", "AERIE_SOURCE"}
    assert not re.findall(r"(?<![\d.])\d+\.\d+\.\d+(?![\d.])", example)


def test_env_example_shows_the_defaults(project: Project) -> None:
    commented = re.findall(r"^#(AERIE_[A-Z_]+)=(.*)$", (REPOSITORY / ".env.example").read_text(), flags=re.MULTILINE)
    shown = {name: value for name, value in commented if name not in {"AERIE_IMAGE", "AERIE_CONFIG"}}
    assert len(shown) >= 8
    assert project.service("gpu", **shown) == project.service("gpu")


@both
def test_a_missing_image_name_stops_with_the_remedy(project: Project, combination: str) -> None:
    done = project.compose("config", "--quiet", COMPOSE_FILE=FILES[combination])
    assert done.returncode != 0
    (line,) = done.stderr.strip().splitlines()
    assert "AERIE_IMAGE" in line
    assert "copy .env.example to .env" in line
