"""Runs programs on this machine's GPUs, each in a process of its own, and keeps what they said.

An item that fails or hangs costs its own time and no more; what is known is written after each. `one_gpu.py` and
`two_gpus.py` say which programs. Standard library and patch(1) only: nothing is imported here that could take long.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime as dt
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from table import table

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY / "patches"))

from series import PatchError, changed_files, patch_files, pinned_series, series_digest  # noqa: E402

CONTRACTS = "tests/patches/contracts"
PACKAGES = ("vllm", "torch", "triton", "transformers", "nvidia-nccl-cu13")
# What an engine says of the paths that it took.
TELLING = (
    "Model Runner",
    "attention backend",
    "prefill backend",
    "MoE backend",
    "Using Eagle3",
    "CUDA graphs",
    "cudagraph",
)
LOG_BYTES = 300_000  # of each item's log, from its end


@dataclass(frozen=True, eq=False)
class Item:
    """A program to run, with its arguments, and what it needs.

    A contract program prints a line of JSON for each contract. `unpatched` takes the series out of the engine, and
    names the contracts that must then break, each with a part of what is then said. A measurement writes a JSON file
    instead, whose path stands for `{result}` in its arguments. Items share GPUs; one that is `alone` does not.
    """

    name: str
    program: str
    arguments: tuple[str, ...] = ()
    gpus: int = 1
    alone: bool = False
    seconds: int = 400
    environment: dict[str, str] = field(default_factory=dict)
    unpatched: dict[str, str] = field(default_factory=dict)

    @property
    def command(self) -> list[str]:
        return [sys.executable, str(REPOSITORY / self.program), *self.arguments, *self.unpatched]


@dataclass
class Outcome:
    """What became of an item: `state` is ran, timeout, or why it was skipped."""

    item: Item
    state: str
    seconds: float = 0.0
    verdicts: list[dict[str, object]] = field(default_factory=list)
    measured: object = None
    said: list[str] = field(default_factory=list)
    log: str = ""

    @property
    def summary(self) -> dict[str, object]:
        return {
            "item": self.item.name,
            "state": self.state,
            "seconds": round(self.seconds, 1),
            "engine": "unpatched" if self.item.unpatched else "patched",
            "said": self.said,
        }


class Gpus:
    """Where items run: in their order, several to a GPU, unless one is to be alone on its."""

    SHARES = 4

    def __init__(self, names: list[str]):
        self._free = dict.fromkeys(names, self.SHARES)
        self._turn = 0
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def take(self, place: int, item: Item):
        """Wait for the item's turn and for its GPUs; yield their names."""
        shares = self.SHARES if item.alone else 1

        def fitting() -> list[str]:
            free = sorted(self._free, key=self._free.get, reverse=True)
            return [name for name in free if self._free[name] >= shares][: item.gpus]

        with self._changed:
            self._changed.wait_for(lambda: self._turn == place and len(fitting()) == item.gpus)
            taken = fitting()
            self._turn += 1
            self._give(taken, -shares)
        try:
            yield sorted(taken)
        finally:
            with self._changed:
                self._give(taken, shares)

    def _give(self, names: list[str], shares: int) -> None:
        for name in names:
            self._free[name] += shares
        self._changed.notify_all()


def obstacle(item: Item, gpus: int) -> str | None:
    """Return why an item cannot run here."""
    if not (REPOSITORY / item.program).is_file():
        return f"skipped: there is no {item.program}"
    return f"skipped: needs {item.gpus} GPU(s), there are {gpus}" if item.gpus > gpus else None


def run_item(
    item: Item, place: int, gpus: Gpus, environment: dict[str, str], scratch: Path, deadline: float
) -> Outcome:
    """Run one item, the place-th, when it has its GPUs; never raises for what the program does."""
    with gpus.take(place, item) as taken:
        allowed = min(item.seconds, deadline - time.monotonic())
        if allowed <= 0:
            return Outcome(item, "skipped: no time left")
        result = scratch / f"{item.name}.json"
        log = scratch / f"{item.name}.log"
        began = time.monotonic()
        state = call(
            [part.format(result=result) for part in item.command],
            environment | item.environment | {"CUDA_VISIBLE_DEVICES": ",".join(taken)},
            log,
            allowed,
        )
        seconds = time.monotonic() - began
    text = log.read_text(errors="replace")
    outcome = Outcome(item, state, seconds, read_verdicts(item, text), said=telling(text), log=text[-LOG_BYTES:])
    if result.is_file():
        outcome.measured = json.loads(result.read_text())
    return outcome


def call(command: list[str], environment: dict[str, str], log: Path, seconds: float) -> str:
    """Run a command in a process group of its own, which ends with it; its output goes to `log`."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        try:
            return f"exit status {process.wait(seconds)}"
        except subprocess.TimeoutExpired:
            return f"stopped after {seconds:.0f} s"
        finally:
            # Also after a clean exit: a worker that was left behind would keep its GPU.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def read_verdicts(item: Item, log: str) -> list[dict[str, object]]:
    """Return what the program said of its contracts."""
    found = []
    for line in log.splitlines():
        if line.startswith('{"contract"'):
            verdict = json.loads(line) | {"item": item.name}
            if reason := item.unpatched.get(verdict["contract"]):
                verdict["broken_as_expected"] = not verdict["holds"] and reason in log
            found.append(verdict)
    return found


def telling(log: str) -> list[str]:
    """Return the lines that say which paths an engine took, each once and without its prefix."""
    lines = (line.split("] ", 1)[-1] for line in log.splitlines() if any(mark in line for mark in TELLING))
    return list(dict.fromkeys(line[:200] for line in lines))[:20]


def engine_trees(series: Path, scratch: Path) -> dict[bool, Path]:
    """Return directories to import vLLM from: under True with the series applied, under False without.

    All other files than those that the series changes are links to the installed package, which stays as it is and may
    be either. PatchError if it is neither.
    """
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        raise PatchError("vLLM is not installed here: run this where it is, or put its parent directory on PYTHONPATH")
    installed = Path(spec.submodule_search_locations[0])
    patches = patch_files(series)
    changed = sorted({file for patch in patches for file in changed_files(patch)})
    trees = {}
    for number, reverse in enumerate((False, True)):
        files = scratch / f"files-{number}"
        for name in changed:
            (files / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(installed.parent / name, files / name)
        refused = apply(patches, files, reverse=reverse)
        if refused is None:
            trees[not reverse] = files
            break
        shutil.rmtree(files)
    else:
        raise PatchError(f"{installed} is neither vLLM {series.name} nor that with the series applied\n{refused}")
    for patched in (True, False):
        tree = scratch / ("patched" if patched else "unpatched")
        link_package(installed, tree / "vllm")
        if patched in trees:
            for name in changed:
                (tree / name).unlink()
                shutil.copy2(trees[patched] / name, tree / name)
        trees[patched] = tree
    return trees


def apply(patches: list[Path], directory: Path, *, reverse: bool) -> str | None:
    """Apply patches, or take them out; return what patch(1) says if one is refused."""
    for patch in reversed(patches) if reverse else patches:
        done = subprocess.run(
            [
                "patch", "-p1", "--fuzz=0", "--force", *(["--reverse"] if reverse else []),
                "--input", str(patch.resolve()),
            ],
            cwd=directory, capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode != 0:
            return f"{patch.name}: {done.stdout.strip()}"
    return None


def link_package(source: Path, target: Path) -> None:
    """Build a package of links to another one's files."""
    for folder, _, files in os.walk(source):
        below = target / Path(folder).relative_to(source)
        below.mkdir(parents=True)
        for file in files:
            (below / file).symlink_to(Path(folder, file))


def gpu_names() -> list[dict[str, str]]:
    """Ask the driver what there is; nothing if there is no driver."""
    fields = ("name", "memory.total", "driver_version", "compute_cap")
    query = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
    try:
        listed = subprocess.run(query, capture_output=True, text=True, check=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [dict(zip(fields, line.split(", "), strict=True)) for line in listed.strip().splitlines()]


def machine(gpus: list[dict[str, str]], series: Path) -> dict[str, object]:
    """Describe where the results are from."""
    versions = {}
    for package in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            versions[package] = version(package)
    commit = subprocess.run(
        ["git", "-C", str(REPOSITORY), "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    )
    return {
        "gpu": gpus[0]["name"] if gpus else "none",
        "gpus": len(gpus),
        **{key: gpus[0][key] for key in ("memory.total", "driver_version", "compute_cap") if gpus},
        "python": sys.version.split()[0],
        "packages": versions,
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
        "commit": commit.stdout.strip() or "unknown",
        "series": series_digest(series),
        "help": ["tests/gpu/older_nccl"] if older_nccl() else [],
    }


def older_nccl() -> bool:
    """Say whether NCCL's wheel is older than the one that vLLM 0.32.0 is built for; `older_nccl/` says what then."""
    try:
        return tuple(map(int, version("nvidia-nccl-cu13").split("."))) < (2, 29, 7)
    except PackageNotFoundError:
        return False


def read_environment(path: Path) -> dict[str, str]:
    """Read NAME=VALUE lines, as docker's --env-file does."""
    lines = (line.strip() for line in path.read_text().splitlines())
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def program_environment(tree: Path, given: dict[str, str], tiny: Path) -> dict[str, str]:
    """Return the environment of a program that imports vLLM from a tree."""
    python_path = [str(tree), str(REPOSITORY / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    if older_nccl():
        python_path.insert(0, str(REPOSITORY / "tests/gpu/older_nccl"))
    offline = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "PYTHONUNBUFFERED": "1"}
    if importlib.util.find_spec("flashinfer") is None:
        offline["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
    return os.environ | offline | given | {"PYTHONPATH": os.pathsep.join(python_path), "AERIE_TINY": str(tiny)}


def tiny_pair(scratch: Path) -> Path:
    """Return where the tiny pair is: where AERIE_TINY says, in the image, or written here."""
    for path in filter(None, (os.environ.get("AERIE_TINY"), "/usr/share/aerie/tiny")):
        if (Path(path) / "target").is_dir():
            return Path(path)
    environment = os.environ | {"PYTHONPATH": f"{REPOSITORY / 'src'}:{os.environ.get('PYTHONPATH', '')}"}
    write = [sys.executable, "-m", "aerie.cli", "model", "tiny", "--out", str(scratch / "tiny")]
    subprocess.run(write, env=environment, check=True, stdout=sys.stderr)
    return scratch / "tiny"


def visible_gpus(count: int) -> list[str]:
    """Return the GPUs that programs may be given: those that this process may use."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    return [name for name in chosen.split(",") if name] if chosen is not None else [str(n) for n in range(count)]


def run(description: str, items: list[Item], *, engine: bool = True) -> int:
    """Run the command line of a program that has these items; 1 if something is not as it must be.

    Without `engine` no item needs vLLM, and none has to be installed.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu-results"), help="directory for NAME.json and NAME.log")
    parser.add_argument("--name", default=Path(sys.argv[0]).stem, help="of the files (default: %(default)s)")
    parser.add_argument("--series", type=Path, default=pinned_series(), help="patches to prove")
    parser.add_argument("--only", nargs="+", metavar="ITEM", default=[item.name for item in items])
    parser.add_argument("--within", type=float, default=570, metavar="SECONDS", help="for everything (%(default)s)")
    parser.add_argument("--env-file", type=Path, help="variables for every program, as config/nccl-pcie.env")
    parser.add_argument("--commit", help="what is tested, where git cannot say")
    parser.add_argument("--list", action="store_true", help="print the items and do nothing else")
    args = parser.parse_args()
    if args.list:
        for item in items:
            print(f"{item.name}: {item.program} {' '.join([*item.arguments, *item.unpatched])}".rstrip())
        return 0
    if unknown := set(args.only) - {item.name for item in items}:
        parser.error(f"no such item: {', '.join(sorted(unknown))} (there are {', '.join(i.name for i in items)})")
    deadline = time.monotonic() + args.within
    args.out.mkdir(parents=True, exist_ok=True)
    gpus = gpu_names()
    with tempfile.TemporaryDirectory(prefix="aerie-gpu-", ignore_cleanup_errors=True) as folder:
        scratch = Path(folder)
        try:
            about = machine(gpus, args.series)
            trees = engine_trees(args.series, scratch) if engine else dict.fromkeys((True, False), REPOSITORY / "src")
            given = read_environment(args.env_file) if args.env_file else {}
        except (PatchError, OSError) as error:
            print(f"{parser.prog}: {error}", file=sys.stderr)
            return 1
        if args.commit:
            about["commit"] = args.commit
        tiny = tiny_pair(scratch) if engine else scratch
        environments = {patched: program_environment(tree, given, tiny) for patched, tree in trees.items()}
        names = visible_gpus(len(gpus))
        chosen = [item for item in items if item.name in args.only]
        obstacles = {item: obstacle(item, len(names)) for item in chosen}
        outcomes = [Outcome(item, why) for item, why in obstacles.items() if why]
        pool = Gpus(names)
        with ThreadPoolExecutor(len(items)) as threads:
            running = [
                threads.submit(run_item, item, place, pool, environments[not item.unpatched], scratch, deadline)
                for place, item in enumerate(item for item in chosen if not obstacles[item])
            ]
            for done in as_completed(running):
                outcome = done.result()
                outcomes.append(outcome)
                print(f"{outcome.item.name}: {outcome.state}, {outcome.seconds:.0f} s", flush=True)
                write(args.out / args.name, about, outcomes)
    write(args.out / args.name, about, outcomes)
    result = results(about, outcomes)
    print(f"\n{table(result)}")
    return int(failed(result, outcomes))


def results(about: dict[str, object], outcomes: list[Outcome]) -> dict[str, object]:
    """Return what was found, as it is written."""
    return about | {
        "items": [outcome.summary for outcome in outcomes],
        "contracts": [v for o in outcomes if not o.item.unpatched for v in o.verdicts],
        "unpatched": [v for o in outcomes if o.item.unpatched for v in o.verdicts],
        "measurements": {o.item.name: o.measured for o in outcomes if o.measured is not None},
    }


def write(path: Path, about: dict[str, object], outcomes: list[Outcome]) -> None:
    """Write what is known so far, and the logs."""
    path.with_name(f"{path.name}.json").write_text(json.dumps(results(about, outcomes), indent=1) + "\n")
    path.with_name(f"{path.name}.log").write_text("".join(f"=== {o.item.name}: {o.state}\n{o.log}\n" for o in outcomes))


def failed(result: dict[str, list[dict[str, object]]], outcomes: list[Outcome]) -> bool:
    """Say whether an item did not come to its end, or gave a verdict that it must not give."""
    for outcome in outcomes:
        if missing := outcome.item.unpatched.keys() - {str(verdict["contract"]) for verdict in outcome.verdicts}:
            return bool(missing)
        if not outcome.item.unpatched and outcome.state != "exit status 0":
            return True
    broken = any(not verdict["holds"] for verdict in result["contracts"])
    return broken or not all(verdict["broken_as_expected"] for verdict in result["unpatched"])
