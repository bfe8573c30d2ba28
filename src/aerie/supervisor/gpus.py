"""What the driver's management library (NVML) shows of the GPUs that the engine may use; all empty without one."""

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

try:
    import pynvml
except ImportError:  # only the image for GPUs has it
    pynvml = None

_Answer = TypeVar("_Answer")

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_CONTEXTS = 512 * 2**20  # bytes a GPU that other programs' contexts may come to hold while an engine runs


@dataclass(frozen=True, slots=True)
class Device:
    """What a GPU is, whatever runs on it."""

    name: str
    capability: tuple[int, int]
    memory: int
    """Bytes that CUDA has: without what the driver keeps to itself, 0.6 GiB of an RTX PRO 6000 or an H200."""
    cores: int


@dataclass(frozen=True, slots=True)
class Seen:
    """A visible GPU, whether it can be asked or not."""

    name: str
    """NVML's number of it or its identifier, as `CUDA_VISIBLE_DEVICES` has it: there may be none of that name."""
    address: str
    """On the PCI bus, as NVML writes it; empty where it does not say."""
    device: Device | None
    fault: str
    """Why there is no device, in NVML's words."""


def seen() -> tuple[Seen, ...]:
    """Return the visible GPUs, those that cannot be asked among them; () where NVML itself does not answer."""
    if pynvml is None:
        return ()
    try:
        _connect()
        names = _visible(os.environ)
    except pynvml.NVMLError:
        return ()
    return tuple(map(_seen, names))


def devices() -> tuple[Device, ...]:
    """Return the visible GPUs; () where one cannot be asked, as a part of a GPU that MIG cut."""
    return _each(_device)


def driver() -> str | None:
    """Return the version of NVIDIA's driver, None where it cannot be asked."""
    if pynvml is None:
        return None
    try:
        _connect()
        return os.fsdecode(pynvml.nvmlSystemGetDriverVersion())
    except pynvml.NVMLError:
        return None


def used_bytes() -> tuple[int, ...]:
    """Return the memory in use on each visible GPU, whoever uses it; () where no GPU can be asked."""
    return _each(lambda gpu: int(pynvml.nvmlDeviceGetMemoryInfo(gpu).used))


def free_bytes() -> tuple[int, ...]:
    """Return the memory that the driver can still give on each visible GPU; () where no GPU can be asked."""
    return _each(lambda gpu: int(pynvml.nvmlDeviceGetMemoryInfo(gpu).free))


def busy_percent() -> tuple[int, ...]:
    """Return the share of the last sampling period (up to a second) in which any kernel ran, on each visible GPU.

    A kernel that waits for another rank counts as running. () where no GPU can be asked, or one that is cut by MIG.
    """
    return _each(lambda gpu: int(pynvml.nvmlDeviceGetUtilizationRates(gpu).gpu))


def pci_addresses() -> tuple[str, ...]:
    """Return where each visible GPU sits on the PCI bus, as NVML writes it; () where no GPU can be asked."""
    return _each(_address)


def released(baseline: Sequence[int], used: Sequence[int]) -> bool:
    """Return whether the GPUs hold no more than in `baseline`, `used_bytes()` from before the engine started.

    GPUs that cannot be asked any more hold nothing that waiting could bring back: True.
    """
    return all(now <= before + _CONTEXTS for before, now in zip(baseline, used, strict=False))


def _seen(name: str) -> Seen:
    address = ""
    try:
        gpu = _handle(name)
        address = _address(gpu)
        return Seen(name, address, _device(gpu), "")
    except pynvml.NVMLError as error:
        return Seen(name, address, None, str(error))


def _address(gpu: Any) -> str:
    return os.fsdecode(pynvml.nvmlDeviceGetPciInfo(gpu).busId)


def _device(gpu: Any) -> Device:
    memory = pynvml.nvmlDeviceGetMemoryInfo(gpu, version=pynvml.nvmlMemory_v2)
    return Device(
        name=os.fsdecode(pynvml.nvmlDeviceGetName(gpu)),
        capability=tuple(pynvml.nvmlDeviceGetCudaComputeCapability(gpu)),
        memory=int(memory.total - memory.reserved),
        cores=int(pynvml.nvmlDeviceGetNumGpuCores(gpu)),
    )


def _each(ask: Callable[[Any], _Answer]) -> tuple[_Answer, ...]:
    if pynvml is None:
        return ()
    try:
        _connect()
        return tuple(ask(_handle(name)) for name in _visible(os.environ))
    except pynvml.NVMLError:
        return ()


@functools.cache
def _connect() -> None:
    """Start the library once: that takes up to seconds a GPU, and a failure, which is not kept, is tried again."""
    pynvml.nvmlInit()


def _visible(environment: Mapping[str, str]) -> list[str]:
    """Return the GPUs that `CUDA_VISIBLE_DEVICES` names by number or identifier; all numbers where it is unset.

    The numbers are NVML's own, in the order of the PCI bus, as vLLM takes them.
    """
    chosen = environment.get(_VISIBLE)
    if chosen is None:
        return [str(number) for number in range(pynvml.nvmlDeviceGetCount())]
    return [name.strip() for name in chosen.split(",") if name.strip()]


def _handle(name: str) -> Any:
    if name.isdigit():
        return pynvml.nvmlDeviceGetHandleByIndex(int(name))
    return pynvml.nvmlDeviceGetHandleByUUID(name.encode())
