"""What stands outside the container: counters of both cgroup versions, and the kernel's lines."""

import re
from datetime import UTC, datetime
from pathlib import Path

import pytest
import yaml

from aerie.diagnosis import Kind
from aerie.supervisor.evidence import KERNEL_LOG, MemoryCgroup, outside, with_ports_above

REPOSITORY = Path(__file__).parents[3]
V2 = ("0::/engine.scope\n", "engine.scope", "memory.events", "memory.max", "low 0\nmax 7\noom 1\noom_kill {}\n", "max")
V1 = (
    "4:memory:/docker/abc\n0::/\n",
    "memory/docker/abc",
    "memory.oom_control",
    "memory.limit_in_bytes",
    "oom_kill_disable 0\nunder_oom 0\noom_kill {}\n",
    "9223372036854771712",
)


def cgroup(tmp_path, version, *, kills, limit=None, in_container):
    membership, path, counters, limit_file, text, unlimited = version
    (tmp_path / "membership").write_text(membership)
    # A container sees its own cgroup at the mount point; the path in /proc is the host's.
    directory = tmp_path / (path.split("/")[0] if version is V1 else "") if in_container else tmp_path / path
    directory.mkdir(parents=True, exist_ok=True)
    (directory / counters).write_text(text.format(kills))
    (directory / limit_file).write_text(f"{limit or unlimited}\n")
    return MemoryCgroup(tmp_path, tmp_path / "membership")


@pytest.mark.parametrize("version", [V1, V2], ids=["v1", "v2"])
@pytest.mark.parametrize("in_container", [True, False], ids=["container", "host"])
def test_a_kill_by_the_kernel_is_told_with_the_limit(tmp_path, version, in_container):
    before = cgroup(tmp_path, version, kills=2, limit=2 << 30, in_container=in_container).oom_kills()
    unchanged = cgroup(tmp_path, version, kills=2, in_container=in_container)
    assert outside(before, 1060.0, unchanged, tmp_path / "no") == []
    after = cgroup(tmp_path, version, kills=3, limit=2 << 30, in_container=in_container)
    (told,) = outside(before, 1060.0, after, tmp_path / "no")
    assert (told.source, told.at, told.kind) == ("cgroup", 1060.0, Kind.MEMORY)
    assert told.text == (
        "the container ran out of memory and the kernel killed 1 of its processes; its limit is 2.0 GiB"
    )


@pytest.mark.parametrize("version", [V1, V2], ids=["v1", "v2"])
def test_without_a_limit_it_was_the_hosts_memory(tmp_path, version):
    after = cgroup(tmp_path, version, kills=1, in_container=True)
    (told,) = outside(0, 1.0, after, tmp_path / "no")
    assert "the host's memory ran out" in told.text


def test_a_machine_that_counts_nothing_says_nothing(tmp_path):
    nothing = MemoryCgroup(tmp_path, tmp_path / "membership")
    assert (nothing.oom_kills(), nothing.limit()) == (None, None)
    assert outside(None, 1.0, nothing, tmp_path / "no") == []


@pytest.mark.parametrize("version", [V1, V2], ids=["v1", "v2"])
def test_a_kill_that_the_kernel_logs_is_another_containers_where_the_engines_own_counts_none(tmp_path, version):
    log = tmp_path / "kernel.log"
    log.write_text("2026-11-29T22:20:00.000001+0000 kernel: Memory cgroup out of memory: Killed process 9 (python3)\n")
    counted = cgroup(tmp_path, version, kills=2, in_container=True)
    (told,) = outside(2, 1.0, counted, log)
    assert told.kind is None
    assert "another container" in told.meaning
    assert [one.kind for one in outside(1, 1.0, counted, log)] == [Kind.MEMORY, Kind.MEMORY]
    nothing = MemoryCgroup(tmp_path / "no", tmp_path / "membership")
    for before, now in ((None, nothing), (2, nothing), (None, counted)):
        assert [one.kind for one in outside(before, 1.0, now, log)] == [Kind.MEMORY], "nobody counts"


def test_the_ports_above_a_gpu_are_found_as_long_as_it_is_there(tmp_path):
    devices = tmp_path / "bus/pci/devices"
    gpu = tmp_path / "devices/pci0000:40/0000:40:01.1/0000:41:00.0/0000:42:10.0/0000:43:00.0"
    gpu.mkdir(parents=True)
    devices.mkdir(parents=True)
    (devices / gpu.name).symlink_to(gpu)
    found = with_ports_above(["00000000:43:00.0", "00000000:C1:00.0"], devices)
    lost = ("00000000:C1:00.0", "0000:c1:00.0")
    assert set(found) == {"00000000:43:00.0", *lost, *(part.name for part in [gpu, *gpu.parents][:4])}


def test_this_machines_own_cgroup_can_be_read():
    assert MemoryCgroup()._counters is not None, "Linux 4.13 and later count in cgroups of either version"


def test_the_kernels_lines_are_told(tmp_path):
    log = tmp_path / "kernel.log"
    log.write_text(
        "2026-11-29T22:20:00.000001+0000 kernel: NVRM: Xid (PCI:0000:41:00): 79, pid=9, GPU has fallen off the bus.\n"
        "2026-11-29T22:20:01.000001+0000 kernel: nvidia-uvm: Loaded the UVM driver\n"
    )
    (told,) = outside(0, 1.0, MemoryCgroup(tmp_path, tmp_path), log)
    assert (told.source, told.pci, told.kind) == ("kernel", "0000:41:00", Kind.HARDWARE)
    assert told.at == pytest.approx(datetime(2026, 11, 29, 22, 20, tzinfo=UTC).timestamp(), abs=0.01)


def test_the_older_half_of_a_log_that_was_cut_is_read_too(tmp_path):
    line = "2026-11-29T22:2{}:00.000001+0000 kernel: NVRM: Xid (PCI:0000:{}:00): 79, GPU has fallen off the bus.\n"
    (tmp_path / "kernel.log.1").write_text(line.format(0, 41))
    (tmp_path / "kernel.log").write_text(line.format(1, 51))
    told = outside(0, 1.0, MemoryCgroup(tmp_path, tmp_path), tmp_path / "kernel.log")
    assert [one.pci for one in told] == ["0000:41:00", "0000:51:00"]


def test_only_whole_lines_of_the_end_of_a_long_log_are_read(tmp_path):
    log = tmp_path / "kernel.log"
    line = "2026-11-29T22:00:00.000001+0000 kernel: pcieport 0000:40:01.1: AER: Corrected error message received\n"
    log.write_text(line * 40_000)
    told = outside(0, 1.0, MemoryCgroup(tmp_path, tmp_path), log)
    assert len(told) == 1_000_000 // len(line)
    assert None not in {one.at for one in told}


def test_the_log_is_where_compose_mounts_what_the_unit_writes():
    for name in ("compose.yaml", "compose.cpu.yaml"):
        text = re.sub(r"!(override|reset)", "", (REPOSITORY / name).read_text())
        mounts = {mount["target"] for mount in yaml.safe_load(text)["services"]["vllm"]["volumes"]}
        assert str(KERNEL_LOG.parent) in mounts
    script = (REPOSITORY / "ansible/roles/vllm/files/kernel-log.sh").read_text()
    assert f"log=$directory/{KERNEL_LOG.name}\n" in script
