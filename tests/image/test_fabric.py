"""What `aerie fabric` needs of the image, and shows in it: NUMA binding, an all-reduce of a CPU's, and the kernel."""

from __future__ import annotations

import json

import pytest

NICE = ["--cap-add", "SYS_NICE"]

# As the service's user may have it: Python looks for this file at each start, and rank 1 stops there.
ABSENT = """
import os, signal
if os.environ.get("RANK") == "1":
    os.kill(os.getpid(), signal.SIGSTOP)
"""

COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from aerie.fabric import kernel
source = ASTSource(kernel._copy, {"arrived": "*i32", "sent": "*i32", "words": "i32"}, {"block": 1024})
print(len(triton.compile(source, target=GPUTarget("cuda", 120, 32)).asm["cubin"]))
"""

COPY = """
import torch
from aerie.fabric import kernel
sent, arrived = torch.arange(3000, dtype=torch.int32), torch.zeros(3000, dtype=torch.int32)
kernel.copy(sent, arrived)
print(bool((sent == arrived).all()))
"""


def test_memory_is_bound_to_every_node_by_a_container_with_sys_nice(in_image):
    done = in_image("aerie", "fabric", "numa", "--json", options=NICE)
    found = json.loads(done.stdout)
    assert found["works"]
    assert found["sys_nice"]
    assert [node["node"] for node in found["nodes"]] == found["allowed"]
    assert {node["detail"] for node in found["nodes"]} == {"64 of 64 pages lie there"}


def test_without_sys_nice_it_is_refused_and_says_what_opens_it(in_image):
    done = in_image("aerie", "fabric", "numa", check=False)
    assert done.returncode == 1
    assert "REFUSED: get_mempolicy: Operation not permitted." in done.stdout
    assert "cap_add: [SYS_NICE]" in done.stdout


@pytest.mark.parametrize(("options", "binds"), [(NICE, True), ([], False)])
def test_vllm_s_way_to_bind_agrees(in_image, options, binds):
    """Its ranks are started by numactl, after it has asked whether that is allowed."""
    ask = "from vllm.utils.numa_utils import _resolve_numactl_args as resolve; print(resolve('--membind=0'))"
    done = in_image("python", "-c", ask, options=options)
    assert done.stdout.splitlines()[-1] == ("--membind=0" if binds else "")
    shown = in_image("numactl", "--membind=0", "cat", "/proc/self/numa_maps", options=options, check=False)
    assert (shown.returncode == 0) == binds
    assert ("bind:0" in shown.stdout) == binds


def test_ranks_of_a_cpu_reduce_and_prove_nothing_about_gpus(in_image):
    done = in_image(
        "aerie", "fabric", "--backend", "gloo", "--ranks", "2", "--deadline", "120", "--json", "-", timeout=600
    )
    report = json.loads(done.stdout)
    assert (report["verdict"], report["peer_to_peer"]) == ("works", "unproven")
    assert [each["bytes"] for each in report["all_reduce"]["peer"]["sizes"]] == [14336, 917504, 117440512]
    assert "which proves nothing about GPUs" in done.stderr


def test_a_rank_that_never_joins_is_named_at_the_deadline(in_image, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(ABSENT)
    tmp_path.chmod(0o755)
    done = in_image(
        "aerie", "fabric", "--backend", "gloo", "--deadline", "10",
        options=["--volume", f"{tmp_path}:/absent:ro", "--env", "PYTHONPATH=/absent"], check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert (
        "FAILED: rank 1 did not get past 'loading torch and reaching the GPUs' within 10 s; the others wait: joining"
        in (done.stdout)
    )


def test_on_a_machine_without_gpus_it_says_so(in_image):
    done = in_image("aerie", "fabric", check=False)
    assert done.returncode == 3
    assert done.stdout.startswith("unproven: no GPU is to be seen here")


def test_the_kernel_compiles_for_the_service_s_chip_and_copies(in_image):
    assert int(in_image("python", "-c", COMPILE).stdout) > 1000
    assert in_image("python", "-c", COPY, options=["--env", "TRITON_INTERPRET=1"]).stdout.strip() == "True"
