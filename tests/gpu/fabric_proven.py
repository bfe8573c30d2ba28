"""Runs `aerie fabric` on GPUs whose paths work, and with faults planted in the processes that it starts.

Contracts of `fabric.py`, which says how to run them. A fault is a `sitecustomize.py`, which Python runs at each start:
the program under test knows nothing of it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY / "tests/patches/contracts"))

from verdict import contract, main  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator

# Between GPUs nothing is copied, and everything else is.
LOSES = """
import sys
if "aerie.fabric.copies" in sys.orig_argv:
    import torch
    copy = torch.Tensor.copy_
    torch.Tensor.copy_ = lambda to, of, *rest: to if to.device != of.device else copy(to, of, *rest)
"""
# Of what is copied between GPUs, ten words come otherwise.
GARBLES = (
    LOSES.replace("to if to.device", "garbled(copy(to, of, *rest)) if to.device")
    + """
    def garbled(tensor):
        if tensor.numel() > 1024:
            tensor.view(-1)[100:110] += 1
        return tensor
"""
)
# The copy engine's bytes come, those of kernels do not.
LOSES_IN_KERNELS = """
import sys
if "aerie.fabric.copies" in sys.orig_argv:
    from aerie.fabric import kernel
    copy = kernel.copy
    kernel.copy = lambda sent, arrived: None if sent.device != arrived.device else copy(sent, arrived)
"""
# What copies from GPU 0 to GPU 1 waits on GPU 0 for hours, as behind a path that swallows what it is given.
HANGS = """
import sys
if "aerie.fabric.copies" in sys.orig_argv:
    import torch
    copy = torch.Tensor.copy_
    def hanging(to, of, *rest):
        if (of.device.index, to.device.index) == (0, 1):
            with torch.cuda.device(of.device):
                torch.cuda._sleep(2**45)
        return copy(to, of, *rest)
    torch.Tensor.copy_ = hanging
"""
ABSENT = """
import os, signal
if os.environ.get("RANK") == "1":
    os.kill(os.getpid(), signal.SIGSTOP)
"""
# Once the ranks have found each other, in the middle of the last size.
STOPS = """
import os, signal, sys
if os.environ.get("RANK") == "1":
    from torch import distributed
    reduce, calls = distributed.all_reduce, []
    def stopping(*arguments, **options):
        calls.append(1)
        if len(calls) == 80:
            os.kill(os.getpid(), signal.SIGSTOP)
        return reduce(*arguments, **options)
    distributed.all_reduce = stopping
"""


@dataclass
class Proof:
    """What one came to."""

    code: int
    report: dict[str, Any]
    said: str
    seconds: float


@contextlib.contextmanager
def started(fault: str, *options: str) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """Start `aerie fabric` with a fault; no process of it may be left when it has ended."""
    with tempfile.TemporaryDirectory(prefix="aerie-fabric-test-") as folder:
        Path(folder, "sitecustomize.py").write_text(fault)
        report = Path(folder, "report.json")
        path = os.pathsep.join([folder, str(REPOSITORY / "src"), os.environ.get("PYTHONPATH", "")])
        process = subprocess.Popen(
            [sys.executable, "-m", "aerie.cli", "fabric", "--json", str(report), *options],
            env={**os.environ, "PYTHONPATH": path},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        try:
            yield process, report
        finally:
            process.kill()
            process.wait()
            assert not (left := children_left()), f"left behind: {left}"


def children_left() -> list[str]:
    """Return the command lines of children of `aerie fabric` that still run, whoever their parent is by now."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command = (entry / "cmdline").read_bytes().split(b"\0")
            if {b"aerie.fabric.copies", b"aerie.fabric.rank"} & set(command):
                found.append(b" ".join(command).decode())
    return found


def prove(fault: str, *options: str, within: float = 170) -> Proof:
    """Run it to its end."""
    began = time.monotonic()
    with started(fault, *options) as (process, report):
        said = process.communicate(timeout=within)[0]
        print(said, flush=True)
        found = json.loads(report.read_text()) if report.stat().st_size else {}
        return Proof(process.returncode, found, said, time.monotonic() - began)


@contract("bytes-arrive-and-the-fallback-has-a-price")
def works() -> str:
    """Bytes arrive between all pairs, by the copy engine and by kernels; NCCL reduces with peer traffic and without."""
    proof = prove("", "--compare")
    assert proof.code == 0, proof.said
    report = proof.report
    count = len(report["gpus"])
    assert [pair["state"] for pair in report["pairs"]] == ["works"] * (count * (count - 1))
    assert report["no_kernel"] is None, report["no_kernel"]
    assert report["peer_to_peer"] == "works"
    price = report["price"]
    rates = [pair["gb_per_s"] for pair in report["pairs"]]
    assert min(rates) > 0
    sizes = zip(*(report["all_reduce"][way]["sizes"] for way in ("peer", "fallback")), strict=True)
    times = [f"{with_it['seconds'] * 1e6:.0f} / {without['seconds'] * 1e6:.0f}" for with_it, without in sizes]
    return (
        f"{count} GPUs in {proof.seconds:.0f} s; copies {min(rates)} to {max(rates)} GB/s; all-reduce with and without "
        f"peer traffic {price['peer_gb_per_s']} / {price['fallback_gb_per_s']} GB/s, in us {', '.join(times)}"
    )


@contract("lost-bytes-are-found")
def loses() -> str:
    """A path that says yes and moves nothing is dead, also where NCCL's own works."""
    proof = prove(LOSES, "--deadline", "30")
    assert proof.code == 1, proof.said
    assert (proof.report["verdict"], proof.report["peer_to_peer"]) == ("dead", "dead")
    details = {pair["detail"] for pair in proof.report["pairs"]}
    assert details == {"copy 4 KiB: no byte arrived"}, details
    return proof.report["why"]


@contract("garbled-bytes-are-counted")
def garbles() -> str:
    """A path that changes some bytes is dead, and they are counted."""
    proof = prove(GARBLES, "--deadline", "30")
    assert proof.code == 1, proof.said
    details = {(pair["state"], pair["detail"]) for pair in proof.report["pairs"]}
    assert details == {("wrong", "copy 1 MiB: 40 of 1,048,576 bytes are not what was sent")}, details
    return proof.report["why"]


@contract("kernels-lost-bytes-are-found")
def loses_in_kernels() -> str:
    """A path that the copy engine can take and kernels cannot is dead: NCCL's bytes are moved by kernels."""
    proof = prove(LOSES_IN_KERNELS, "--deadline", "30")
    assert proof.code == 1, proof.said
    details = {pair["detail"] for pair in proof.report["pairs"]}
    assert details == {"kernel writes 1 MiB: no byte arrived"}, details
    return proof.report["why"]


@contract("hung-copy-is-killed-and-named")
def hangs() -> str:
    """A copy that hangs on the GPU is killed at its deadline, its pair is named, and the others are tried."""
    proof = prove(HANGS, "--deadline", "10")
    assert proof.code == 1, proof.said
    states = {(pair["from"], pair["to"]): pair["state"] for pair in proof.report["pairs"]}
    assert states.pop((0, 1)) == "hung", states
    assert set(states.values()) == {"works"}, states
    assert proof.report["all_reduce"]["fallback"]["state"] == "works"
    return f"{proof.seconds:.0f} s: {proof.report['why']}"


@contract("absent-rank-is-named")
def absent() -> str:
    """A rank that never joins is named at the deadline, with peer traffic and without."""
    proof = prove(ABSENT, "--deadline", "10")
    assert proof.code == 1, proof.said
    assert (proof.report["verdict"], proof.report["peer_to_peer"]) == ("failed", "unproven")
    reductions = proof.report["all_reduce"].values()
    assert {each["state"] for each in reductions} == {"hung"}
    assert all(each["detail"].startswith("rank 1 did not get past ") for each in reductions), proof.said
    return f"{proof.seconds:.0f} s: {proof.report['why']}"


@contract("stopped-rank-is-ended")
def stops() -> str:
    """A rank that stops in the middle leaves NCCL's kernel of the others waiting: all end at the deadline."""
    proof = prove(STOPS, "--deadline", "10")
    assert proof.code == 1, proof.said
    assert {each["state"] for each in proof.report["all_reduce"].values()} == {"hung"}, proof.said
    assert "all-reduce of 112 MiB" in proof.report["why"], proof.said
    return f"{proof.seconds:.0f} s: {proof.report['why']}"


@contract("used-gpus-are-left-alone")
def busy() -> str:
    """Where somebody uses a GPU nothing is tried."""
    holder = (
        "import torch, time; held = torch.ones(3 * 2**30, dtype=torch.uint8, device='cuda:1'); print(1, flush=True); "
    )
    with subprocess.Popen([sys.executable, "-c", f"{holder} time.sleep(60)"], stdout=subprocess.PIPE) as process:
        try:
            process.stdout.readline()
            proof = prove("")
        finally:
            process.kill()
    assert proof.code == 3, proof.said
    assert proof.report["pairs"] == []
    assert proof.report["why"].startswith("GPU 1 has "), proof.said
    return f"{proof.seconds:.1f} s: {proof.report['why']}"


@contract("ctrl-c-leaves-nothing")
def interrupted() -> str:
    """Ctrl-C while ranks run ends them all."""
    began = time.monotonic()
    with started("") as (process, _):
        for line in process.stdout:
            if "joining the others" in line:
                break
        assert len(children_left()) > 1
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130
        assert not children_left()
    return f"130 after {time.monotonic() - began:.0f} s"


if __name__ == "__main__":
    main()
