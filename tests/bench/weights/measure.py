"""Measures vLLM's loaders of weights where vLLM is installed, and keeps each figure as soon as it is known.

    python tests/bench/weights/measure.py --plan cpu --data DIR --out FILE.json

`tests/bench/loaders.py` runs it in the CPU image, `tests/gpu/loading.py` on a GPU. DIR holds the checkpoints, which are
written where they are missing. What FILE.json has already is not measured again, where its machine is the same one.
Exit code 0 when all was measured (a loader that fails is a result, too), 1 when the time was up before, 130 after
Ctrl-C.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime as dt
import importlib.metadata
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(REPOSITORY / "src"))

import checkpoint  # noqa: E402
import disk  # noqa: E402
import page_cache  # noqa: E402
import plan  # noqa: E402
import rank  # noqa: E402

PACKAGES = (
    "vllm", "torch", "safetensors", "transformers", "runai-model-streamer", "fastsafetensors", "instanttensor",
)  # fmt: skip
_LEAST_FREE = 2 * 2**30
_SPARE = 60.0  # seconds that a run may take, where the time is limited


class Measurements:
    """What was measured, in a JSON file that is written anew after each run."""

    def __init__(self, path: Path, about: dict[str, Any]) -> None:
        self.path = path
        self.content: dict[str, Any] = {"about": about, "sets": {}, "runs": []}
        with contextlib.suppress(FileNotFoundError):
            there = json.loads(path.read_text())
            if any(there["about"][name] != about[name] for name in ("cpu", "memory", "gpus", "versions")):
                raise SystemExit(f"{path} is of another machine or software: give another file, or remove it")
            self.content = there
            self.content["about"] = about | {"began": there["about"]["began"]}

    @property
    def known(self) -> set[str]:
        """The keys of runs that gave a figure."""
        return {run["key"] for run in self.content["runs"] if not {"error", "unproven"} & run.keys()}

    def add(self, run: dict[str, Any]) -> None:
        """Keep a run, in place of one of the same key."""
        self.content["runs"] = [each for each in self.content["runs"] if each["key"] != run["key"]] + [run]
        self.write()

    def write(self) -> None:
        """Write all of it."""
        beside = self.path.with_name(f".{self.path.name}")
        beside.write_text(json.dumps(self.content, indent=1) + "\n")
        beside.replace(self.path)


def main() -> int:
    """Measure what the plan says and is not known yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", choices=sorted(plan.PLANS), default="quick", help="(default: %(default)s)")
    parser.add_argument("--data", type=Path, required=True, help="directory for the checkpoints")
    parser.add_argument("--out", type=Path, required=True, help="JSON file of the results")
    parser.add_argument("--commit", default="", help="to be written down")
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="begin no run after so many (default: none)"
    )
    parser.add_argument("--only", nargs="*", help="these loaders alone")
    parser.add_argument("--write-only", action="store_true", help="write the checkpoints and measure nothing")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return _measure_all(arguments)
    except KeyboardInterrupt:
        print("interrupted: what was measured is kept, the next run goes on", file=sys.stderr)
        return 130


def _measure_all(arguments: argparse.Namespace) -> int:
    began = time.monotonic()
    arguments.data.mkdir(parents=True, exist_ok=True)
    chosen = plan.PLANS[arguments.plan]
    measurements = Measurements(arguments.out, about(arguments.commit))
    runs = [run for run in chosen.runs if run.key not in measurements.known]
    runs = [run for run in runs if not arguments.only or run.loader in (*arguments.only, plan.DISK)]
    for part in dict.fromkeys(run.set for run in runs):
        measurements.content["sets"][part.name] = _written(part, arguments.data)
    if arguments.write_only:
        measurements.write()
        return 0
    print(f"{len(runs)} runs; importing vLLM", flush=True)
    imported = time.monotonic()
    rank.preload()
    print(f"imported within {time.monotonic() - imported:.1f} s", flush=True)
    log = arguments.out.with_suffix(".log")
    for number, run in enumerate(runs, 1):
        if time.monotonic() - began > arguments.seconds - _SPARE:
            print(f"the time is up: {len(runs) - number + 1} runs are left; the same command goes on", flush=True)
            return 1
        started = time.monotonic()
        result = _measured(run, arguments.data, log)
        measurements.add(result)
        told = (
            result.get("error")
            or result.get("unproven")
            or f"{result['seconds']:.2f} s, {result['bytes'] / result['seconds'] / 1e9:.2f} GB/s"
        )
        print(f"{number}/{len(runs)} {run.key}: {told} ({time.monotonic() - started:.0f} s in all)", flush=True)
    return 0


def about(commit: str) -> dict[str, Any]:
    """Say what this machine is, and what runs on it."""
    cpus = [
        line.split(":", 1)[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    memory = int(Path("/proc/meminfo").read_text().split()[1]) * 1024
    versions = {}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return {
        "began": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "commit": commit,
        "cpu": f"{os.cpu_count()} x {cpus[0] if cpus else platform.machine()}",
        "memory": round(memory / 2**30),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "gpus": _gpus(),
        "versions": versions,
    }


def _gpus() -> list[str]:
    if not shutil.which("nvidia-smi"):
        return []
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines()


def _written(wanted: plan.Set, data: Path) -> dict[str, Any]:
    began = time.monotonic()
    if shutil.disk_usage(data).free < wanted.size + _LEAST_FREE and not (data / wanted.name / "finished.json").exists():
        raise SystemExit(f"{data}: {wanted.name} takes {wanted.size / 1e9:.0f} GB, and they are not free there")
    size = checkpoint.write(data / wanted.name, wanted.size, wanted.widths, int4=wanted.int4)
    seconds = time.monotonic() - began
    print(f"{wanted.name}: {size / 1e9:.2f} GB are there after {seconds:.1f} s", flush=True)
    finished = json.loads((data / wanted.name / "finished.json").read_text())
    return {
        "bytes": size,
        "tensors": finished["tensors"],
        "shards": len(_files(data / wanted.name)),
        "int4": wanted.int4,
    }


def _files(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.safetensors"))


def _measured(run: plan.Run, data: Path, log: Path) -> dict[str, Any]:
    directory = data / run.set.name
    kept = {
        "key": run.key, "set": run.set.name, "loader": run.loader, "state": run.state, "ranks": run.ranks,
        "repeat": run.repeat, "load_average": os.getloadavg()[0],
    }  # fmt: skip
    try:
        return kept | _figures(run, directory, data, log)
    except OSError as error:
        return kept | {"error": f"{error.filename}: {error.strerror}"}


def _figures(  # noqa: C901 - one step after the other
    run: plan.Run, directory: Path, data: Path, log: Path
) -> dict[str, Any]:
    options = dict(plan.LOADERS.get(run.loader, {}))
    if run.loader == plan.SAVED:
        place = data / f"{run.set.name}-saved-tp{run.ranks}"
        if not _files(place):
            said = _loaded(directory, {"save_sharded": str(place)}, run.ranks, log)
            if any("error" in each for each in said):
                return {"error": f"not saved: {said}"}
        directory = place
    files = _files(directory)
    size = sum(path.stat().st_size for path in files)
    left = page_cache.evict(files) if run.state == "cold" else size - page_cache.fill(files)
    if left > size // 100 and run.state == "warm":  # others' work may have pushed pages out
        left = size - page_cache.fill(files)
    proven = {"bytes": size, "resident_before": page_cache.resident(files)}
    if left > size // 100:
        # The figure counts for nothing, but what it came to may say why.
        proven["unproven"] = f"{left:,} bytes of {size:,} could not be brought into the state {run.state}"
    if run.loader == plan.DISK:
        return proven | _disk(files)
    with log.open("a") as file:
        file.write(f"=== {run.key}\n")
    began = time.monotonic()
    warm = None
    if run.loader in plan.WARMED:
        warm = _warm(directory, log)
        if run.loader == "warm first":
            warm.wait()
            proven["warm_seconds"] = time.monotonic() - began
            proven["resident_after_warm"] = page_cache.resident(files)
    try:
        ranks = _loaded(directory, options, run.ranks, log)
    finally:
        if warm:
            proven["warm_exit"] = _ended(warm)
    if errors := [each["error"] for each in ranks if "error" in each]:
        return proven | {"error": errors[0]}
    if warm:
        proven["head_start"] = min(each["began"] for each in ranks) - began
    seconds = max(each["ended"] for each in ranks) - min(each["began"] for each in ranks)
    return proven | {
        "resident_after": page_cache.resident(files),
        "seconds": seconds + (proven.get("warm_seconds", 0.0)),
        "ranks_measured": ranks,
    }


_anew = False
"""Whether ranks import vLLM themselves: where the parent has touched a GPU, a forked one cannot."""


def _loaded(directory: Path, options: dict[str, Any], ranks: int, log: Path) -> list[dict[str, Any]]:
    global _anew  # noqa: PLW0603 - found out once
    result = rank.load(directory, options, ranks, log, anew=_anew)
    errors = " ".join(each.get("error", "") for each in result)
    if not _anew and "CUDA" in errors and ("initializ" in errors or "fork" in errors):
        print("ranks cannot be forked here: each imports vLLM itself, which takes longer", flush=True)
        _anew = True
        result = rank.load(directory, options, ranks, log, anew=True)
    return result


def _disk(files: list[Path]) -> dict[str, Any]:
    shapes = {}
    for threads, block in disk.SHAPES:  # each reads all of it
        shapes[f"{threads} x {block // 2**20} MiB"] = disk.read_direct(files, threads, block)
    best = min(shapes, key=lambda name: shapes[name])
    return {"seconds": shapes[best], "shape": best, "shapes": shapes}


def _warm(directory: Path, log: Path) -> subprocess.Popen[bytes]:
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY / "src")}
    command = [sys.executable, "-m", "aerie.cli", "model", "warm", str(directory), "--json"]
    with log.open("ab") as output:
        return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output)


def _ended(process: subprocess.Popen[bytes]) -> int:
    try:
        return process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


if __name__ == "__main__":
    sys.exit(main())
