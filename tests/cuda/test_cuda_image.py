"""The CUDA image, as far as it goes without a GPU. Not a part of `./run test`: that image takes many minutes to build.

AERIE_TEST_IMAGE names the image. Compiling FlashInfer's module is most of the time that this takes.
"""

from __future__ import annotations

import json
import subprocess
import uuid
from pathlib import Path

import pytest

from aerie.rehearsal.software import least_driver

HERE = Path(__file__).parent
RECORD = HERE.parents[1] / "docs/image.md"


@pytest.fixture(scope="module")
def result(in_image):
    """What compile_without_gpu.py found, on a fresh cache volume."""
    volume = f"aerie-test-{uuid.uuid4().hex[:12]}"
    # The driver's library by name alone, where the container toolkit would put the real one.
    prepare = "mkdir /tmp/driver && ln -s /opt/cuda/lib/stubs/libcuda.so /tmp/driver/libcuda.so.1"
    options = [
        "-v", f"{volume}:/var/cache/aerie", "-v", f"{HERE}:/tests:ro",
        "-e", "LD_LIBRARY_PATH=/tmp/driver", "-e", "FLASHINFER_CUDA_ARCH_LIST=12.0f",
    ]  # fmt: skip
    try:
        done = in_image("sh", "-c", f"{prepare} && python /tests/compile_without_gpu.py", options=options, timeout=1800)
        return json.loads(done.stdout.splitlines()[-1])
    finally:
        subprocess.run(["docker", "volume", "rm", "--force", volume], capture_output=True, check=False)


@pytest.fixture(scope="module")
def labels(image):
    inspected = subprocess.run(["docker", "image", "inspect", image], capture_output=True, check=True)
    return json.loads(inspected.stdout)[0]["Config"]["Labels"]


def test_it_runs_as_the_service_does(result):
    assert result["user"] == 10001
    assert result["root is read-only"]


def test_torch_is_the_cuda_build_that_the_label_names(result, labels):
    """`torch==2.13.0` is satisfied by the CPU build as well, and pip may take it; only the lock's hashes tell."""
    assert result["cuda"] == labels["io.aerie.cuda-version"]
    assert result["vllm"] == labels["io.aerie.vllm-version"]


def test_the_labels_name_the_least_driver(labels):
    assert labels["io.aerie.flavour"] == "cuda"
    assert labels["io.aerie.least-driver"] == least_driver(labels["io.aerie.cuda-version"])


def test_vllm_s_compiled_operators_load(result):
    assert result["operators"] == [True, True]


def test_triton_compiles_its_launcher_and_a_kernel_for_sm_120(result):
    assert result["triton launcher"] == "launch"
    assert result["triton kernel is ELF"]


def test_flashinfer_builds_a_module_for_sm_120_on_the_cache_volume(result):
    library, architectures = result["flashinfer"]
    assert library.startswith("/.cache/flashinfer/")
    assert architectures == ["sm_120"]


def test_nvcc_is_of_torch_s_cuda_release(in_image, labels):
    """Another release's code would ask for another driver, and its headers do not fit the runtime's."""
    said = in_image("nvcc", "--version").stdout
    assert f"release {labels['io.aerie.cuda-version']}," in said


def test_the_kernels_of_the_kimi_path_are_as_the_record_says(in_image):
    table = in_image("python", "/tests/kernel_table.py", options=["-v", f"{HERE}:/tests:ro"], timeout=600).stdout
    assert table in RECORD.read_text()
