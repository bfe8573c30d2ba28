"""The GPUs through a stand-in for NVML: no machine that runs these tests needs one."""

import pytest

from aerie.diagnosis.evidence import pci_address
from aerie.supervisor import gpus

GIB = 2**30
TOTAL = 97_887 * 2**20


class Nvml:
    class NVMLError(Exception):
        pass

    def __init__(self, used, *, broken=False, lost=(), nameless=()):
        self.used, self.broken, self.starts = used, broken, 0
        self.lost, self.nameless = lost, nameless

    def nvmlInit(self):
        self.starts += 1
        if self.broken:
            raise self.NVMLError

    def nvmlDeviceGetCount(self):
        return len(self.used)

    def nvmlDeviceGetHandleByIndex(self, number):
        if number >= len(self.used):
            raise self.NVMLError
        if number in self.lost:
            raise self.NVMLError("GPU is lost")
        return number

    def nvmlDeviceGetHandleByUUID(self, name):
        return int(name.decode().removeprefix("GPU-"))

    def nvmlDeviceGetPciInfo(self, gpu):
        return type("Pci", (), {"busId": f"0000000{gpu}:4{gpu}:00.0"})

    nvmlMemory_v2 = 2

    def nvmlDeviceGetMemoryInfo(self, gpu, version=None):
        # As an RTX PRO 6000 has it: the first version's figures do not tell what the driver keeps to itself.
        reserved = {"reserved": TOTAL - 101_972_967_424} if version == self.nvmlMemory_v2 else {}
        return type("Memory", (), {"used": self.used[gpu], "free": TOTAL - self.used[gpu], "total": TOTAL, **reserved})

    def nvmlDeviceGetName(self, gpu):
        if gpu in self.nameless:
            raise self.NVMLError("Not Supported")
        return "NVIDIA RTX PRO 6000 Blackwell Server Edition"

    def nvmlDeviceGetCudaComputeCapability(self, _):
        return [12, 0]

    def nvmlDeviceGetNumGpuCores(self, _):
        return 24_064

    def nvmlSystemGetDriverVersion(self):
        return "580.159.04"

    def nvmlDeviceGetUtilizationRates(self, gpu):
        return type("Rates", (), {"gpu": 100 * (self.used[gpu] > 0)})


@pytest.fixture
def nvml(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def install(*used, **options):
        gpus._connect.cache_clear()
        library = Nvml(list(used), **options)
        monkeypatch.setattr(gpus, "pynvml", library)
        return library

    yield install
    gpus._connect.cache_clear()


def test_without_the_library_there_is_no_gpu(monkeypatch):
    monkeypatch.setattr(gpus, "pynvml", None)
    assert gpus.used_bytes() == gpus.busy_percent() == gpus.pci_addresses() == gpus.devices() == ()
    assert gpus.driver() is None
    assert gpus.released((), ())


def test_a_driver_that_comes_late_is_found(nvml):
    library = nvml(GIB, broken=True)
    assert gpus.used_bytes() == ()
    library.broken = False
    assert gpus.used_bytes() == (GIB,)
    assert gpus.busy_percent() == (100,)
    assert library.starts == 2, "starting the library takes long: once is enough"


@pytest.mark.parametrize(
    ("visible", "seen"),
    [("2,0", (3, 1)), ("GPU-1", (2,)), ("", ()), ("1, GPU-0", (2, 1)), ("7", ())],
)
def test_only_what_the_engine_may_use_counts(nvml, monkeypatch, visible, seen):
    nvml(1, 2, 3)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert gpus.used_bytes() == seen


def test_what_is_free_is_what_the_driver_can_still_give(nvml):
    nvml(GIB, 3 * GIB)
    assert gpus.free_bytes() == (TOTAL - GIB, TOTAL - 3 * GIB)


def test_the_addresses_are_those_of_the_kernel_log(nvml, monkeypatch):
    nvml(1, 2, 3)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,1")
    assert tuple(map(pci_address, gpus.pci_addresses())) == ("0002:42:00", "0001:41:00")


def test_released_is_what_was_there_before_and_some_contexts(nvml):
    library = nvml(GIB, 2 * GIB)
    baseline = gpus.used_bytes()
    library.used = [GIB, 80 * GIB]
    assert not gpus.released(baseline, gpus.used_bytes())
    library.used = [GIB + GIB // 4, 2 * GIB]
    assert gpus.released(baseline, gpus.used_bytes())


def test_what_the_gpus_are(nvml):
    nvml(0, 0)
    device = gpus.Device("NVIDIA RTX PRO 6000 Blackwell Server Edition", (12, 0), 101_972_967_424, 24_064)
    assert gpus.devices() == (device, device)
    assert gpus.driver() == "580.159.04"


def test_a_driver_that_does_not_answer(nvml):
    nvml(0, broken=True)
    assert (gpus.devices(), gpus.driver()) == ((), None)


def test_one_gpu_that_cannot_be_asked_is_told_among_the_others(nvml):
    nvml(0, 0, 0, lost=[1], nameless=[2])
    assert gpus.devices() == (), "nobody shall take two GPUs for all"
    first, lost, nameless = gpus.seen()
    assert (first.address, first.device.name, first.fault) == (
        "00000000:40:00.0",
        "NVIDIA RTX PRO 6000 Blackwell Server Edition",
        "",
    )
    assert lost == gpus.Seen("1", "", None, "GPU is lost")
    assert nameless == gpus.Seen("2", "00000002:42:00.0", None, "Not Supported")


def test_without_a_driver_none_is_seen(nvml, monkeypatch):
    nvml(0, broken=True)
    assert gpus.seen() == ()
    monkeypatch.setattr(gpus, "pynvml", None)
    assert gpus.seen() == ()
