"""What the engine computes on."""

import pytest

from aerie.rehearsal.static import hardware
from aerie.rehearsal.static.hardware import H200, RTX_PRO_6000, by_name, identity, this_machine
from aerie.supervisor.gpus import Device

BLACKWELL = Device("NVIDIA RTX PRO 6000 Blackwell Server Edition", (12, 0), RTX_PRO_6000.memory, 24_064)


@pytest.fixture
def machine(monkeypatch):
    def with_devices(*devices, driver="580.159.04"):
        monkeypatch.setattr(hardware.gpus, "devices", lambda: devices)
        monkeypatch.setattr(hardware.gpus, "driver", lambda: driver)

    return with_devices


def test_eight_of_the_gpus_that_it_is_made_for(machine):
    machine(*[BLACKWELL] * 8)
    found = this_machine()
    assert (found.chip, found.memory, found.multiprocessors, found.count) == (
        RTX_PRO_6000.chip, RTX_PRO_6000.memory, RTX_PRO_6000.multiprocessors, RTX_PRO_6000.count
    )  # fmt: skip


@pytest.mark.parametrize(
    ("capability", "cores", "multiprocessors"), [((9, 0), 16_896, 132), ((8, 0), 6_912, 108), ((8, 9), 18_176, 142)]
)
def test_multiprocessors_by_cores(machine, capability, cores, multiprocessors):
    machine(Device("NVIDIA H200", capability, H200.memory, cores))
    assert this_machine().multiprocessors == multiprocessors


def test_the_smallest_of_different_gpus(machine):
    machine(BLACKWELL, Device("NVIDIA RTX PRO 5000", (12, 0), 48 * 2**30, 14_080))
    assert (this_machine().memory, this_machine().count) == (48 * 2**30, 2)


def test_without_a_gpu_the_cpu(machine):
    machine()
    found = this_machine()
    assert (found.chip, found.count) == (None, 1)
    assert found.memory > 2**30
    assert identity() == "CPU"


def test_the_identity_changes_with_gpus_and_driver(machine):
    seen = set()
    for count, driver in ((8, "580.159.04"), (7, "580.159.04"), (8, "590.44.01")):
        machine(*[BLACKWELL] * count, driver=driver)
        seen.add(identity())
    assert len(seen) == 3


def test_a_chip_by_its_name():
    assert by_name("sm_120") == RTX_PRO_6000
    assert by_name("sm_90", 2).count == 2
    with pytest.raises(ValueError, match="sm_70 is no chip that is known here: name one of sm_120, sm_90"):
        by_name("sm_70")
