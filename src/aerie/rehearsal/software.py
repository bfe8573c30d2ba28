"""Is the software the one that the pair needs: vLLM with its patches, NCCL, the driver. Nothing heavy is imported.

With an older NCCL, or without a patch, an engine may start and serve wrong text.
"""

import importlib.util
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path

from aerie import patches
from aerie.rehearsal.findings import Finding, failed, passed, skipped
from aerie.rehearsal.static.arguments import Setup
from aerie.supervisor import gpus

_PATCHES, _NCCL, _DRIVER = "patches", "NCCL", "driver"
_OF_THE_STORY = ("0.16.", "0.17.")
"""Releases that end a start with EAGLE-3 for Kimi-K2.5 before any weight is read."""
_LEAST_NCCL = (2, 29, 7)
"""The first with ncclCommSuspend, for which vLLM 0.32.0 asks (pynccl_wrapper.py)."""
_NCCL_WHEELS = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")
_CUDA_WHEELS = ("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu12")
_LEAST_DRIVERS = {12: "525.60.13", 13: "580.65.06"}
"""By CUDA's first number: the driver of its first release, which runs the later ones, too (CUDA Toolkit's release
notes, minor version compatibility). The image's label says it to the host."""


def findings(setup: Setup) -> Iterator[Finding]:
    """Yield what is found of the software that is installed here, for as many ranks as `setup` has."""
    ranks = setup.settings.ranks * setup.settings.data_parallel
    yield patches_are_in(patches.vllm_version(), patches.RECORD, _site_packages())
    yield nccl_serves(_version(_NCCL_WHEELS), ranks)
    yield driver_serves(gpus.driver(), _version(_CUDA_WHEELS))


def patches_are_in(vllm: str | None, record: Path, site_packages: Path | None) -> Finding:
    """Return whether the installed vLLM, of this version, has the patches that are recorded for it."""
    if vllm is None or site_packages is None:
        return skipped(_PATCHES, "vLLM is not installed here")
    release = vllm.partition("+")[0]
    remedy = "use the image as it was built, and mount nothing over its vLLM"
    try:
        series, missing = patches.read(record), patches.not_applied(record, site_packages)
    except OSError:
        told = f"vLLM {release} is installed, and no series of patches is recorded here"
        if release.startswith(_OF_THE_STORY):
            told += ": its start ends with `eagle3 is only supported for [...] models`"
        return failed(_PATCHES, told, "use an image of Aerie", "patches/README.md")
    others = {applies for fields in series.patches.values() if (applies := fields.get("applies_to"))}
    if foreign := others - {f"vllm {release}"}:
        return failed(_PATCHES, f"vLLM {release} is installed, and the patches are for {min(foreign)}", remedy)
    if missing:
        name = missing[0]
        what = series.patches[name].get("subject", "without a subject")
        more = f", nor are {len(missing) - 1} more" if len(missing) > 1 else ""
        bug = series.patches[name].get("bug", "")
        return failed(_PATCHES, f"{name.removesuffix('.patch')} is not in this vLLM{more} ({what})", remedy, bug)
    return passed(_PATCHES, f"vLLM {release} has all {len(series.patches)} ({series.digest[:19]})")


def nccl_serves(version: str | None, ranks: int) -> Finding:
    """Return whether NCCL is new enough for so many ranks; None where none is installed."""
    if version is None:
        return skipped(_NCCL, "it is not installed here")
    least = ".".join(map(str, _LEAST_NCCL))
    if ranks > 1 and tuple(int(part) for part in version.split(".")[:3] if part.isdigit()) < _LEAST_NCCL:
        return failed(
            _NCCL,
            f"NCCL {version} is installed: vLLM needs {least}, silently goes on without its communicators, and what "
            f"{ranks} ranks say is wrong",
            f"use an image of Aerie, which has NCCL {least}",
            "vllm/distributed/device_communicators/pynccl_wrapper.py",
        )
    return passed(_NCCL, f"{version}, for {ranks} rank{'s' * (ranks > 1)}")


def driver_serves(driver: str | None, cuda: str | None) -> Finding:
    """Return whether the GPUs' driver is new enough for the CUDA of this version that vLLM was built with."""
    if cuda is None:
        return skipped(_DRIVER, "this image is not one for GPUs")
    if driver is None:
        return skipped(_DRIVER, "no driver answers here")
    least = least_driver(cuda)
    if least and _numbers(driver) < _numbers(least):
        return failed(
            _DRIVER,
            f"the driver is {driver}, and CUDA {cuda} needs {least} or later",
            f"install driver {least} or later, with its open kernel modules, and restart the host",
            "https://docs.nvidia.com/cuda/cuda-toolkit-release-notes",
        )
    return passed(_DRIVER, f"{driver}, for CUDA {cuda}")


def least_driver(cuda: str) -> str | None:
    """Return the first driver that runs this version of CUDA, None where that is not known."""
    return _LEAST_DRIVERS.get(_numbers(cuda)[0])


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())


def _version(names: Iterable[str]) -> str | None:
    """Return the version of the first distribution that is installed."""
    for name in names:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def _site_packages() -> Path | None:
    """Return where vLLM is imported from, without importing it."""
    spec = importlib.util.find_spec("vllm")
    return Path(spec.origin).parents[1] if spec and spec.origin else None
