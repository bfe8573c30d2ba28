"""The supervisor around a real engine on GPUs: a start is told, a killed or stopped rank is found, the GPUs are freed.

The contracts of one GPU share one engine, so their order is that of this file. What a stopped rank looks like from
outside is printed before its verdict: one line a second for each process and GPU.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "patches" / "contracts"))

from supervising import Supervisor, gone, serving, tree, used_mib
from verdict import contract, main

MIB_OF_OTHERS = 100  # that a GPU may hold more than before
TOLD_WITHIN = 2.0  # seconds
FOUND_WITHIN = 180.0  # seconds
CLOSING = contextlib.ExitStack()


@functools.cache
def served() -> tuple[Supervisor, list[int], list[dict[str, Any]]]:
    """Start the engine that the contracts of one GPU share; return it, what the GPU held before, and its start."""
    before = used_mib()
    supervisor = CLOSING.enter_context(serving())
    seen: list[dict[str, Any]] = []

    def ready(status: dict[str, Any]) -> bool:
        if start := status.get("start"):
            seen.append(start)
        return status.get("phase") == "ready"

    supervisor.until(ready, 240)
    return supervisor, before, seen


@contract("start-is-told")
def start() -> str:
    """Every phase of a start with CUDA graphs is told, in order, with what moved, and nothing goes backwards."""
    supervisor, _, seen = served()
    phases = [phase for phase in seen[-1]["phases"] if phase["began"]]
    names = [phase["name"] for phase in phases]
    wanted = {"loading target", "loading drafter", "compiling", "capturing graphs (measuring)", "capturing graphs"}
    assert wanted <= set(names), names
    assert all(phase["ended"] for phase in phases), phases
    fractions = [start["fraction"] for start in seen]
    assert fractions == sorted(fractions), "the whole went backwards"
    assert fractions[-1] == 1, fractions[-1]
    for name in names:
        of_phase = [
            phase["fraction"] for start in seen for phase in start["phases"]
            if phase["name"] == name and phase["fraction"] is not None
        ]  # fmt: skip
        assert of_phase == sorted(of_phase), f"{name} went backwards: {of_phase}"
    moved = {start["moved_by"] for start in seen}
    assert "gpu memory" in moved, moved
    # What the next start is compared with.
    starts = json.loads((supervisor.folder / "state" / "starts.json").read_text())
    assert starts, "no start was kept"
    print(json.dumps(seen[-1]), flush=True)
    seconds = {name: round(elapsed(phase), 1) for name, phase in zip(names, phases, strict=True)}
    return f"{seconds}; moved by {sorted(moved)}"


def elapsed(phase: dict[str, Any]) -> float:
    began, ended = (time.mktime(time.strptime(phase[key][:19], "%Y-%m-%dT%H:%M:%S")) for key in ("began", "ended"))
    return ended - began


@contract("killed-engine-frees-its-gpu")
def killed() -> str:
    """SIGKILL of the engine core is told at once; the next engine begins on a GPU that holds what it held before."""
    supervisor, before, _ = served()
    (core,) = supervisor.processes("VLLM::EngineCore")
    serving_mib = used_mib()
    os.kill(core, signal.SIGKILL)
    began = time.monotonic()
    status = supervisor.until(lambda status: status.get("phase") == "failed", 30, pause=0.05)
    told = time.monotonic() - began
    assert status["diagnosis"]["kind"] == "killed", status["diagnosis"]
    supervisor.until(lambda status: status["engine"]["starts"] == 2, 60, pause=0.05)
    # The new one has not come as far as the GPU yet.
    after = used_mib()
    assert after[0] <= before[0] + MIB_OF_OTHERS, (before, serving_mib, after)
    supervisor.ready()
    assert supervisor.complete()["choices"], "it does not serve"
    assert told < TOLD_WITHIN, f"told after {told:.1f} s"
    return f"told after {told:.2f} s; MiB before, serving, before the next start: {before}, {serving_mib}, {after}"


@contract("nothing-outlives-the-supervisor")
def outlived() -> str:
    """SIGKILL of the supervisor ends every process of the engine, and the GPU holds what it held before."""
    supervisor, before, _ = served()
    supervisor.ready()
    engine = tree(supervisor.process.pid)
    serving_mib = used_mib()
    supervisor.process.kill()
    supervisor.process.wait()
    seconds = gone(engine)
    began = time.monotonic()
    while (after := used_mib())[0] > before[0] + MIB_OF_OTHERS:
        assert time.monotonic() - began < 30, (before, serving_mib, after)
    return f"{len(engine)} processes gone after {seconds:.2f} s; MiB {before}, {serving_mib}, {after}"


# Graphs say nothing of a rank that is gone, and take most of a start.
TWO = {"tensor-parallel-size": 2, "enforce-eager": True}


@contract("killed-rank-is-told")
def killed_rank() -> str:
    """SIGKILL of one of two ranks while a request runs is told at once; both GPUs are free before the next start."""
    before = used_mib()
    with serving(TWO) as supervisor:
        supervisor.ready()
        ask_in_vain(supervisor)
        (rank,) = supervisor.processes("VLLM::Worker_TP1")
        serving_mib = used_mib()
        os.kill(rank, signal.SIGKILL)
        began = time.monotonic()
        status = supervisor.until(lambda status: status.get("phase") == "failed", 60, pause=0.05)
        told = time.monotonic() - began
        diagnosis = status["diagnosis"]
        supervisor.until(lambda status: status["engine"]["starts"] == 2, 90, pause=0.05)
        after = used_mib()
    assert all(now <= then + MIB_OF_OTHERS for now, then in zip(after, before, strict=True)), (before, after)
    assert told < TOLD_WITHIN, f"told after {told:.1f} s"
    return (
        f"told after {told:.2f} s: {diagnosis['signature']}, {diagnosis['kind']}; MiB {before}, {serving_mib}, {after}"
    )


@contract("stopped-rank-is-found")
def stopped_rank() -> str:
    """SIGSTOP of one of two ranks while a request runs leaves `/health` at 200, and is found in under three minutes."""
    with serving(TWO) as supervisor:
        supervisor.ready()
        watch(supervisor, 3, "idle")
        ask_in_vain(supervisor)
        watch(supervisor, 3, "a request runs")
        (rank,) = supervisor.processes("VLLM::Worker_TP1")
        os.kill(rank, signal.SIGSTOP)
        began = time.monotonic()
        watch(supervisor, 15, "Worker_TP1 is stopped")
        status = supervisor.until(lambda status: status.get("hangs", 0) > 0, FOUND_WITHIN)
        found = time.monotonic() - began
        diagnosis = status["diagnosis"]
        watch(supervisor, 3, "found")
    assert diagnosis["kind"] == "hung", diagnosis
    assert "Worker_TP1" in json.dumps(diagnosis["evidence"]), diagnosis["evidence"]
    return f"found after {found:.0f} s: {diagnosis['evidence']}"


@contract("ranks-that-never-meet")
def never_meet() -> str:
    """NCCL is given a network interface that does not exist."""
    with serving(TWO, {"NCCL_SOCKET_IFNAME": "none"}, ["--once"]) as supervisor:
        ended = supervisor.process.wait(150)
        diagnosis = json.loads((supervisor.folder / "state" / "state.json").read_text())["diagnosis"]
    assert diagnosis["known"], diagnosis
    return f"exit code {ended}, {diagnosis['signature']}: {diagnosis['root']}"[:300]


def ask_in_vain(supervisor: Supervisor) -> None:
    """Begin a request that takes long, and that nobody waits for."""

    def ask() -> None:
        with contextlib.suppress(OSError, ValueError):
            while supervisor.process.poll() is None:
                supervisor.complete(timeout=FOUND_WITHIN, max_tokens=3900, ignore_eos=True)

    threading.Thread(target=ask, daemon=True).start()
    time.sleep(1)


def watch(supervisor: Supervisor, seconds: int, label: str) -> None:
    """Print once a second what each process of the engine and each GPU does."""
    print(f"--- {label}", flush=True)
    ticks = os.sysconf("SC_CLK_TCK")
    last: dict[int, tuple[float, int]] = {}
    for _ in range(seconds + 1):
        for pid, command in tree(supervisor.process.pid).items():
            with contextlib.suppress(OSError):
                fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
                cpu, faults = (int(fields[11]) + int(fields[12])) / ticks, int(fields[7]) + int(fields[9])
                if pid in last and command.startswith("VLLM"):
                    used, faulted = cpu - last[pid][0], faults - last[pid][1]
                    print(
                        f"{command.split()[0]:24} {fields[0]} {used:5.2f} s of CPU, {faulted:6} page faults", flush=True
                    )
                last[pid] = cpu, faults
        query = ["nvidia-smi", "--query-gpu=index,utilization.gpu,memory.used,power.draw", "--format=csv,noheader"]
        print(subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip(), flush=True)
        time.sleep(1)


if __name__ == "__main__":
    with CLOSING:
        main()
