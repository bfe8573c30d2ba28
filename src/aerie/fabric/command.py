"""`aerie fabric`: bytes between all pairs of GPUs, then an all-reduce over all of them, and what it costs without."""

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn

from aerie.fabric.all_reduce import Reduction, State, all_reduce
from aerie.fabric.numa import node_of
from aerie.fabric.pairs import try_pairs
from aerie.fabric.report import P2P_LEVEL, WITHIN_NODES, Gpu, Report, Verdict, lines_of
from aerie.gate.words import clock
from aerie.supervisor import gpus

_TERMINATED = 128 + signal.SIGTERM
_CODES = {Verdict.WORKS: 0, Verdict.LIMITED: 1, Verdict.DEAD: 1, Verdict.FAILED: 1, Verdict.UNPROVEN: 3}
_GIB = 2**30
_IDLE = 2 * _GIB  # bytes in use of a GPU that nobody uses: the driver's own, and a monitor's context
_DISABLE = "NCCL_P2P_DISABLE"
_WITHIN_NODES = ("LOC", "NVL", "PIX", "PXB", WITHIN_NODES)


@dataclass(frozen=True)
class Options:
    """What `aerie fabric` was told."""

    deadline: float
    """Seconds in which nothing moves until something counts as hung."""
    compare: bool
    """Measure the fallback also where peer traffic works."""
    backend: str
    ranks: int | None
    """Processes of gloo; None for one for each GPU."""
    json: str | None
    """A file, or - for stdout."""


class UsageError(Exception):
    """Options that make no sense; the message says which, and what to give."""


def fabric(options: Options) -> int:
    """Prove, print the report, and return 0 where peer traffic works, 1 where not (everywhere), 3 where none was tried.

    Raises UsageError before anything.
    """
    _check(options)
    signal.signal(signal.SIGTERM, _terminated)
    out = sys.stderr if options.json == "-" else sys.stdout
    began = time.monotonic()

    def say(step: str) -> None:
        print(f"  .... {clock(time.monotonic() - began):>5} {step}", file=out, flush=True)

    report = Report(options.backend)
    try:
        if options.backend == "nccl":
            _prove_gpus(options, report, say)
        else:
            report.peer = all_reduce(options.backend, options.ranks or 2, _environment(), options.deadline, say)
    except OSError as error:
        report.untried = f"no process could be started: {error.strerror or error}"
    report.seconds = time.monotonic() - began
    for line in lines_of(report):
        print(line, file=out, flush=True)
    return _CODES[report.verdict] if _write(options, report) else 1


def _check(options: Options) -> None:
    if options.backend == "nccl" and options.ranks is not None:
        raise UsageError("--ranks counts the processes of --backend gloo; NCCL takes one for each GPU")
    if options.json and options.json != "-":
        try:
            Path(options.json).open("a").close()
        except OSError as error:
            raise UsageError(f"--json {options.json} cannot be written: {error.strerror}") from None


def _terminated(_number: int, _frame: FrameType | None) -> NoReturn:
    raise SystemExit(_TERMINATED)  # through every `with`, so that no child is left


def _prove_gpus(options: Options, report: Report, say: Callable[[str], None]) -> None:
    seen = gpus.seen()
    report.gpus = [_gpu(each) for each in seen]
    count = len(report.gpus)
    if why := _silence(seen) or _obstacle(count):
        report.untried = why
        return
    environment = _environment()
    say(f"{count} x {report.gpus[0].name}: {count * (count - 1)} pairs")
    report.tried = try_pairs(count, [gpu.node for gpu in report.gpus], environment, options.deadline, say)
    if report.is_limited and environment.get(P2P_LEVEL) not in _WITHIN_NODES:
        environment[P2P_LEVEL] = WITHIN_NODES
    report.environment = {name: value for name, value in sorted(environment.items()) if name.startswith("NCCL_")}
    if report.survivors:  # whatever touches these GPUs now would hang as well
        report.peer = Reduction("nccl", count, State.FAILED, "not tried: a process before it cannot be ended")
        return
    say("all-reduce with peer traffic")
    report.peer = all_reduce("nccl", count, environment, options.deadline, say)
    if (options.compare or report.verdict is not Verdict.WORKS) and not report.survivors:
        say(f"all-reduce with {_DISABLE}=1")
        report.fallback = all_reduce("nccl", count, {**environment, _DISABLE: "1"}, options.deadline, say)


def _gpu(seen: gpus.Seen) -> Gpu:
    name = seen.device.name if seen.device else "unknown"
    return Gpu(name, seen.address, node_of(seen.address) if seen.address else -1)


def _silence(seen: Sequence[gpus.Seen]) -> str:
    """Return which GPUs cannot be asked, empty where all can."""
    silent = [
        f"GPU {each.name} ({each.address or 'address unknown'}) cannot be asked: NVML says {each.fault}"
        for each in seen
        if each.device is None
    ]
    if not silent:
        return ""
    # Nor can it be told whether somebody works with one.
    return (
        f"{'; '.join(silent)}. A path to one that is lost could hang, so nothing is tried: see the kernel's log for "
        "Xid (journalctl -k), restart the host, or take it out of CUDA_VISIBLE_DEVICES. Parts of a GPU (MIG) are no "
        "pair"
    )


def _obstacle(count: int) -> str:
    """Return why nothing is tried on so many GPUs, empty where nothing is in the way."""
    if count == 0:
        return (
            "no GPU is to be seen here: run this in the image for GPUs, with --device nvidia.com/gpu=all. "
            "`--backend gloo --ranks N` exercises the all-reduce alone, on a CPU"
        )
    if count == 1:
        return "one GPU is to be seen here, and there is no pair of it"
    used = gpus.used_bytes()
    busy = [number for number, taken in enumerate(used) if taken > _IDLE]
    if busy:
        return (
            f"GPU {busy[0]} has {used[busy[0]] / _GIB:.1f} GiB in use, so somebody works with it: figures would be "
            "wrong, and a hung path could take that work with it. Stop what uses the GPUs (the service: docker compose "
            "stop), then run this again"
        )
    return ""


def _environment() -> dict[str, str]:
    """Return this process's own, in which NCCL may take peer traffic, and numbers the GPUs as NVML does."""
    ours = {name: value for name, value in os.environ.items() if name != _DISABLE}
    return ours | {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def _write(options: Options, report: Report) -> bool:
    """Write the JSON; return whether that worked."""
    if options.json is None:
        return True
    content = json.dumps(report.to_json(), indent=1) + "\n"
    if options.json == "-":
        sys.stdout.write(content)
        return True
    try:
        Path(options.json).write_text(content, encoding="utf-8")
    except OSError as error:
        print(f"aerie fabric: --json {options.json} cannot be written: {error.strerror}", file=sys.stderr)
        return False
    return True
