"""Whether memory can be bound: what the kernel says, and what is told of it. The real thing is in tests/image."""

import errno
import json
import os

import pytest

from aerie import cli
from aerie.fabric import numa

STATUS = "Name:\tpython\nMems_allowed_list:\t0-1\nCapBnd:\t{capabilities:016x}\n"
NICE = 1 << 23


@pytest.fixture
def host(tmp_path, monkeypatch):
    """A machine with two nodes, whose kernel does as it is told, and GPUs on both."""
    monkeypatch.setattr(
        numa.gpus, "pci_addresses", lambda: ("00000000:17:00.0", "00000001:A1:00.0", "00000000:18:00.0")
    )
    monkeypatch.setattr(numa.shutil, "which", lambda name: f"/usr/bin/{name}")
    for address, node in (("0000:17:00.0", 0), ("0001:a1:00.0", 1)):
        folder = tmp_path / "sys/bus/pci/devices" / address
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(f"{node}\n")
    (tmp_path / "proc/self").mkdir(parents=True)
    bound = []

    class Host:
        root = tmp_path
        refuses: tuple[str, ...] = ()
        lies_on = None

        def may(self, capabilities):
            (tmp_path / "proc/self/status").write_text(STATUS.format(capabilities=capabilities))

    host = Host()
    host.may(NICE)

    def bind(node):
        if node is not None and "set" in host.refuses:
            raise OSError(errno.EPERM, os.strerror(errno.EPERM))
        bound.append(node)

    def get_mode():
        if "get" in host.refuses:
            raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(numa, "_bind", bind)
    monkeypatch.setattr(numa, "_get_mode", get_mode)
    monkeypatch.setattr(numa, "_node_at", lambda *_: bound[-1] if host.lies_on is None else host.lies_on)
    return host


@pytest.mark.parametrize(
    ("ranges", "numbers"), [("0", [0]), ("0-1", [0, 1]), ("0-2,5\n", [0, 1, 2, 5]), ("", []), ("\n", [])]
)
def test_lists_of_the_kernel_are_read(ranges, numbers):
    assert numa.numbers_of(ranges) == numbers


def test_every_node_that_may_be_used_is_tried(host):
    found = numa.look(host.root)
    assert [(node.number, node.is_bound) for node in found.nodes] == [(0, True), (1, True)]
    assert found.works
    assert list(found.gpu_nodes) == [0, 1, -1]
    lines = list(numa.lines_of(found))
    assert lines[1] == "GPUs on nodes: 0 on 0, 1 on 1, 2 on -1"
    assert lines[-1] == "works: numa-bind can be set; /usr/bin/numactl"


def test_a_policy_that_is_accepted_and_not_followed_does_not_work(host):
    host.lies_on = 0
    found = numa.look(host.root)
    assert [(node.number, node.is_bound) for node in found.nodes] == [(0, True), (1, False)]
    assert not found.works
    assert "  node 1: NOT BOUND, 0 of 64 pages lie there" in list(numa.lines_of(found))


@pytest.mark.parametrize(
    ("capabilities", "remedy"), [(0, "cap_add: [SYS_NICE]"), (NICE, "another seccomp profile than Docker's own")]
)
def test_a_refusal_says_what_opens_it(host, capabilities, remedy):
    host.may(capabilities)
    host.refuses = ("get", "set")
    found = numa.look(host.root)
    assert not found.works
    told = "\n".join(numa.lines_of(found))
    assert "REFUSED: get_mempolicy: Operation not permitted" in told
    assert remedy in told


def test_a_node_that_cannot_be_bound_is_told(host):
    host.refuses = ("set",)
    found = numa.look(host.root)
    assert found.nodes[1].detail == "set_mempolicy: Operation not permitted"
    assert not found.works


def test_without_numactl_vllm_could_not_do_it(host, monkeypatch):
    monkeypatch.setattr(numa.shutil, "which", lambda _: None)
    found = numa.look(host.root)
    assert not found.works
    assert "numactl is not installed" in "\n".join(numa.lines_of(found))


def test_the_command_prints_either_and_ends_with_what_it_found(host, monkeypatch, capsys):
    look = numa.look
    monkeypatch.setattr(numa, "look", lambda _: look(host.root))
    assert cli.main(["fabric", "numa"]) == 0
    assert "works" in capsys.readouterr().out
    host.refuses = ("get",)
    assert cli.main(["fabric", "numa", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["schema"], found["works"], found["refused"]) == (1, False, "Operation not permitted")
