"""How much the page cache may take, in the kernel's own words of both versions of cgroups."""

import pytest

from aerie.cache.room import Room, room

GIB = 2**30
MEMINFO = f"MemTotal: {64 * 2**20} kB\nMemFree: 1 kB\nMemAvailable: {40 * 2**20} kB\nHugePages_Total: 0\n"


@pytest.fixture
def look(tmp_path):
    (tmp_path / "meminfo").write_text(MEMINFO)

    def look(membership="", **files):
        (tmp_path / "membership").write_text(membership)
        for name, text in files.items():
            path = tmp_path / "cgroup" / name.replace("__", "/").replace("_DOT_", ".")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{text}\n")
        return room(tmp_path / "meminfo", tmp_path / "cgroup", tmp_path / "membership")

    return look


def test_without_a_limit_it_is_the_machines(look):
    assert look("0::/\n", memory_DOT_max="max", memory_DOT_current="5") == Room(40 * GIB, None, 64 * GIB)
    assert look("0::/\n").available == 40 * GIB


def test_version_2_in_a_container_sees_its_own_cgroup_at_the_mount(look):
    found = look(
        "0::/\n",
        memory_DOT_max=str(10 * GIB),
        memory_DOT_current=str(9 * GIB),
        memory_DOT_stat=f"anon {GIB}\ninactive_file {5 * GIB}\nactive_file {2 * GIB}\n",
    )
    # What is in use is 9 GiB, 7 of which are files that can be dropped for others.
    assert found == Room(40 * GIB, 8 * GIB, 10 * GIB)
    assert found.bound == "this container's memory limit"


def test_version_2_on_the_host_counts_the_limits_around_it(look):
    stat = "inactive_file 0\nactive_file 0\n"
    found = look(
        "0::/system.slice/aerie.service\n",
        **{
            "system.slice__aerie.service__memory_DOT_max": "max",
            "system.slice__memory_DOT_max": str(20 * GIB),
            "system.slice__memory_DOT_current": str(4 * GIB),
            "system.slice__memory_DOT_stat": stat,
        },
    )
    assert found.available == 16 * GIB


def test_version_1(look):
    found = look(
        "8:pids:/\n4:memory:/docker/abc\n",
        memory__memory_DOT_limit_in_bytes=str(12 * GIB),
        memory__memory_DOT_usage_in_bytes=str(6 * GIB),
        memory__memory_DOT_stat=f"inactive_file 0\nactive_file 0\ntotal_inactive_file {GIB}\ntotal_active_file {GIB}\n",
    )
    assert found.available == 8 * GIB


def test_a_limit_above_the_machines_memory_is_none(look):
    unlimited = str(0x7FFFFFFFFFFFF000)
    found = look(
        "4:memory:/\n",
        memory__memory_DOT_limit_in_bytes=unlimited,
        memory__memory_DOT_usage_in_bytes="1",
        memory__memory_DOT_stat="",
    )
    assert found.cgroup is None
    assert found.bound == "this machine"


def test_this_machine_has_some():
    found = room()
    assert 0 < found.available <= found.machine
