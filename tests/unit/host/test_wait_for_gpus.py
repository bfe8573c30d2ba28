"""Whether a host's GPUs can be given to a container, and how that is waited for."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import pytest
from aerie_host import gpus
from aerie_host.gpus import Look, lacks

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

NAMES = frozenset({"nvidia.com/gpu=all", *(f"nvidia.com/gpu={number}" for number in range(8))})
NODES = frozenset({"nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", *(f"nvidia{number}" for number in range(8))})
WHOLE = Look(driver=True, served=8, nodes=NODES, toolkit=True, names=NAMES, specified=NODES)


@pytest.mark.parametrize(
    ("look", "said"),
    [
        (WHOLE, []),
        (Look(), ["no NVIDIA driver is loaded"]),
        (replace(WHOLE, served=7), ["7 of 8 GPUs"]),
        # All the rest follows from it, and is not said.
        (replace(WHOLE, served=7, nodes=NODES - {"nvidia7"}, names=frozenset()), ["7 of 8 GPUs"]),
        (replace(WHOLE, nodes=NODES - {"nvidia3"}), ["7 of 8 nodes /dev/nvidia0 and so on"]),
        (replace(WHOLE, nodes=NODES - {"nvidia-uvm"}), ["no node /dev/nvidia-uvm"]),
        (replace(WHOLE, toolkit=False), ["nvidia-ctk, of the NVIDIA container toolkit, is not installed"]),
        (replace(WHOLE, names=NAMES - {gpus.ALL}), ["no CDI specification names nvidia.com/gpu=all"]),
        (replace(WHOLE, names=NAMES - {"nvidia.com/gpu=5"}), ["the CDI specification names 7 of 8 GPUs"]),
        (replace(WHOLE, specified=NODES - {"nvidia-uvm"}), ["the CDI specification lacks /dev/nvidia-uvm"]),
    ],
)
def test_what_is_missing(look: Look, said: list[str]) -> None:
    assert lacks(look, 8) == said


def test_a_machine_without_gpus_lacks_nothing() -> None:
    assert lacks(Look(), 0) == []


def test_more_gpus_than_are_needed_are_no_fault() -> None:
    assert lacks(WHOLE, 4) == []


class Host:
    """A root directory with GPUs, their nodes and a specification."""

    def __init__(self, root: Path, count: int = 8) -> None:
        self.root = root
        for number in range(count):
            self.write(f"proc/driver/nvidia/gpus/0000:{number:02x}:00.0/information", f"Device Minor: {number}")
            self.write(f"sys/bus/pci/devices/0000:{number:02x}:00.0/config", b"\xde\x10\xb5\x2b")
            self.node(f"nvidia{number}")
        for name in ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools"):
            self.node(name)
        self.write("proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX Open Kernel Module")
        self.write(
            "run/cdi/nvidia.yaml", "kind: nvidia.com/gpu\n" + "".join(f"  - path: /dev/{name}\n" for name in NODES)
        )
        self.listed = "INFO[0000] Found 9 CDI devices\n" + "".join(f"{name}\n" for name in sorted(NAMES))

    def write(self, name: str, content: str | bytes) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())

    def node(self, name: str) -> None:
        """A character node, as everybody may make one: by another's."""
        (self.root / "dev").mkdir(parents=True, exist_ok=True)
        (self.root / "dev" / name).symlink_to("/dev/null")

    def look(self) -> Look:
        def run(arguments: Sequence[str]) -> tuple[int, str]:
            assert list(arguments) == ["nvidia-ctk", "cdi", "list"]
            return 0, self.listed

        return gpus.look_at(self.root, run)


def test_a_whole_host(tmp_path: Path) -> None:
    assert replace(Host(tmp_path).look(), outdated=False) == WHOLE


def test_a_gpu_that_the_driver_lists_and_that_has_fallen_off_the_bus(tmp_path: Path) -> None:
    host = Host(tmp_path)
    host.write("sys/bus/pci/devices/0000:05:00.0/config", b"\xff" * 4)
    assert lacks(host.look(), 8) == ["7 of 8 GPUs"]


def test_a_file_in_the_place_of_a_node(tmp_path: Path) -> None:
    host = Host(tmp_path)
    (tmp_path / "dev/nvidia-uvm").unlink()
    host.write("dev/nvidia-uvm", "")
    assert lacks(host.look(), 8) == ["no node /dev/nvidia-uvm"]


def test_a_node_whose_name_another_begins_with(tmp_path: Path) -> None:
    host = Host(tmp_path)
    host.write("run/cdi/nvidia.yaml", "kind: nvidia.com/gpu\n- path: /dev/nvidiactl\n- path: /dev/nvidia-uvm-tools\n")
    assert lacks(host.look(), 8) == ["the CDI specification lacks /dev/nvidia-uvm"]


def test_other_vendors_specifications_do_not_count(tmp_path: Path) -> None:
    host = Host(tmp_path)
    (tmp_path / "run/cdi/nvidia.yaml").rename(tmp_path / "run/cdi/other.yaml")
    host.write("run/cdi/other.yaml", "kind: example.com/nic\n- path: /dev/nvidia-uvm\n")
    assert host.look().specified == frozenset()


def test_a_specification_older_than_the_nodes_number(tmp_path: Path) -> None:
    host = Host(tmp_path)
    os.utime(tmp_path / "run/cdi/nvidia.yaml", (2**31, 2**31))
    assert not host.look().outdated
    os.utime(tmp_path / "run/cdi/nvidia.yaml", (0, 0))
    assert host.look().outdated


class Time:
    """A clock that moves only while somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def waited(
    look: Callable[[float], Look],
    deadline: float = 600,
    expected: int = 8,
    help_along: Callable[..., None] | None = None,
) -> tuple[list[str], list[str], float]:
    """What is missing in the end, what was said, and how long it took."""
    time, said = Time(), []
    missing = gpus.wait(
        expected, deadline, said.append, look=lambda: look(time.now), help_along=help_along or (lambda *_: None),
        explain=lambda _: ["0000:0a:00.0 (slot 8) is gone from the bus"], clock=time.clock, sleep=time.sleep,
    )  # fmt: skip
    return missing, said, time.now


def test_nothing_is_said_where_all_is_there() -> None:
    assert waited(lambda _: WHOLE) == ([], [], 0)


def test_no_gpu_is_waited_for_where_none_is_expected() -> None:
    assert waited(lambda _: Look(), expected=0) == ([], [], 0)


def test_it_waits_and_says_each_change_once() -> None:
    def look(now: float) -> Look:
        return Look() if now < 10 else replace(WHOLE, served=7) if now < 20 else WHOLE

    missing, said, took = waited(look)
    assert (missing, took) == ([], 20)
    assert said == [
        "waiting for the GPUs: no NVIDIA driver is loaded; 600 s left",
        "waiting for the GPUs: 7 of 8 GPUs; 590 s left",
    ]


def test_at_the_deadline_it_names_the_gpu() -> None:
    missing, _, took = waited(lambda _: replace(WHOLE, served=7), deadline=61)
    assert took == 61
    assert gpus.refusal(missing, 8) == (
        "this host cannot give 8 GPUs to a container: 7 of 8 GPUs; 0000:0a:00.0 (slot 8) is gone from the bus"
    )


def test_a_deadline_of_nothing_looks_once() -> None:
    assert waited(lambda _: Look(), deadline=0) == (
        ["no NVIDIA driver is loaded", "0000:0a:00.0 (slot 8) is gone from the bus"], [], 0
    )  # fmt: skip


def helped(look: Look, seconds: Sequence[float] = (0,)) -> list[list[str]]:
    """What is run for it, asked at these moments."""
    done: list[list[str]] = []
    time = Time()

    def run(arguments: Sequence[str]) -> tuple[int, str]:
        done.append(list(arguments))
        return 0, ""

    help_along = gpus.Help(run, time.clock)
    for now in seconds:
        time.now = now
        help_along(look, 8)
    return done


REFRESH = ["systemctl", "restart", "nvidia-cdi-refresh.service"]


@pytest.mark.parametrize(
    ("look", "done"),
    [
        (Look(), []),
        (replace(WHOLE, served=7, names=frozenset()), []),
        (replace(WHOLE, nodes=NODES - {"nvidia-uvm"}), [["nvidia-modprobe", "-u", "-c", "0"]]),
        (replace(WHOLE, names=frozenset()), [REFRESH]),
        (replace(WHOLE, outdated=True), [REFRESH]),
        (replace(WHOLE, toolkit=False), []),
    ],
)
def test_what_is_done_about_it(look: Look, done: list[list[str]]) -> None:
    assert helped(look) == done


@pytest.mark.parametrize(("action", "done"), [("look", []), ("check", [REFRESH])])
def test_a_look_brings_nothing_about(action: str, done: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[list[str]] = []
    lost = replace(WHOLE, names=frozenset())
    monkeypatch.setattr(gpus.Help, "run", lambda _, arguments: ran.append(list(arguments)), raising=False)
    monkeypatch.setattr(gpus.Help, "__init__", lambda self: vars(self).update(clock=lambda: 0, refreshed=None))
    monkeypatch.setattr(gpus, "wait", partial(gpus.wait, look=lambda: lost, explain=lambda _: []))
    assert gpus.main([action, "--expected", "8"]) == 1
    assert ran == done


def test_a_refresh_that_brings_nothing_is_not_repeated_all_the_time() -> None:
    assert helped(replace(WHOLE, names=frozenset()), range(0, 31, 3)) == [REFRESH] * 3
    # A clock that was set back would make it outdated for ever.
    assert helped(replace(WHOLE, outdated=True), range(0, 31, 3)) == [REFRESH]
