"""One rank that loads a checkpoint by vLLM's own worker, in a forked child of a process that has imported vLLM.

It is what each worker of `vllm serve` does until its weights are in; no KV cache, no server. Importing, which takes
longer than loading some of these checkpoints, is left out of every figure that way.
"""

# ruff: noqa: PLC0415 - what takes seconds to import is imported where it is needed
from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import shutil
import signal
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1
_LIMIT = 180.0  # seconds of one load


def free_port() -> int:
    """Return a port of loopback that nobody has."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def preload() -> None:
    """Import what a rank needs, before any is forked; nothing here may touch a GPU or start threads."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        import vllm.v1.worker.cpu_worker
    else:
        import vllm.v1.worker.gpu.model_runner
        import vllm.v1.worker.gpu_worker
    import vllm.engine.arg_utils
    import vllm.model_executor.model_loader
    import vllm.model_executor.models.kimi_k25  # noqa: F401


def load(
    checkpoint: Path, options: dict[str, Any], ranks: int, log: Path, *, anew: bool = False
) -> list[dict[str, Any]]:
    """Load in as many children as there are ranks, and return what each measured, or its error.

    They are forked, unless they are to start and import vLLM `anew`.
    """
    port = free_port()
    children: set[int] = set()
    results = [log.with_name(f".{log.name}.{rank}.json") for rank in range(ranks)]
    for path in results:
        path.unlink(missing_ok=True)
    try:
        for rank in range(ranks):
            sys.stdout.flush()
            sys.stderr.flush()
            given = (checkpoint, options, rank, ranks, port, log, results[rank])
            if anew:
                words = json.dumps([str(each) if isinstance(each, Path) else each for each in given])
                children.add(os.posix_spawn(sys.executable, [sys.executable, __file__, words], os.environ))
            elif pid := os.fork():
                children.add(pid)
            else:
                _child(*given)
        deadline = time.monotonic() + _LIMIT
        while children and time.monotonic() < deadline:
            for pid in list(children):
                done, _ = os.waitpid(pid, os.WNOHANG)
                if done:
                    children.remove(pid)
            time.sleep(0.05)
    finally:
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return [_result(path) for path in results]


def _result(path: Path) -> dict[str, Any]:
    try:
        found = dict(json.loads(path.read_text()))
        path.unlink()
    except FileNotFoundError:
        return {"error": "ended without a word: killed, out of memory, or too slow"}
    return found


def _child(
    checkpoint: Path, options: dict[str, Any], rank: int, ranks: int, port: int, log: Path, result: Path
) -> None:
    code = 1
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        with log.open("ab") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        try:
            measured = _measure(checkpoint, dict(options), rank, ranks, port)
            code = 0
        except BaseException as error:  # noqa: BLE001 - whatever vLLM raises is the measurement's result
            traceback.print_exc()
            measured = {"error": f"{type(error).__name__}: {str(error).partition(chr(10))[0][:300]}"}
        result.write_text(json.dumps(measured))
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _measure(checkpoint: Path, options: dict[str, Any], rank: int, ranks: int, port: int) -> dict[str, Any]:
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform
    from vllm.utils.import_utils import resolve_obj_by_qualname

    save = options.pop("save_sharded", None)
    arguments = EngineArgs(
        model=str(checkpoint), tensor_parallel_size=ranks, enforce_eager=True, max_model_len=512, max_num_seqs=4,
        max_num_batched_tokens=512, disable_log_stats=True, gpu_memory_utilization=0.05, **options,
    )  # fmt: skip
    config = arguments.create_engine_config()
    worker_class = resolve_obj_by_qualname(config.parallel_config.worker_cls)
    with set_current_vllm_config(config):
        worker = worker_class(
            vllm_config=config, local_rank=rank, rank=rank, is_driver_worker=rank == 0,
            distributed_init_method=f"tcp://127.0.0.1:{port}",
        )  # fmt: skip
        worker.init_device()
    took = _time_of_loading()
    if not current_platform.is_cpu():
        import torch

        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    before, began = _used(), time.monotonic()
    with set_current_vllm_config(config):
        worker.load_model()
    if not current_platform.is_cpu():
        torch.cuda.synchronize()
    seconds = time.monotonic() - began
    after = _used()
    measured: dict[str, Any] = {
        "load_seconds": seconds,
        "weights_seconds": took.get("seconds"),
        "began": began,
        "ended": began + seconds,
        **{name: after[name] - before[name] for name in ("read_bytes", "major_faults", "cpu_seconds")},
        **{name: after[name] for name in ("peak_rss", "anonymous")},
    }
    if not current_platform.is_cpu():
        free, total = torch.cuda.mem_get_info()
        measured |= {"gpu_peak_allocated": torch.cuda.max_memory_allocated(), "gpu_used": total - free}
        measured["gpu_peak_reserved"] = torch.cuda.max_memory_reserved()
    if save:
        _save(worker.model_runner.get_model(), checkpoint, Path(save))
    return measured


def _time_of_loading() -> dict[str, float]:
    """Have every loader's load_weights timed: reading, and copying into the model's parameters."""
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
    from vllm.model_executor.model_loader.runai_streamer_loader import RunaiModelStreamerLoader
    from vllm.model_executor.model_loader.sharded_state_loader import ShardedStateLoader

    took: dict[str, float] = {}

    def timed(original):
        def load_weights(*arguments, **named):
            began = time.monotonic()
            try:
                return original(*arguments, **named)
            finally:
                took["seconds"] = time.monotonic() - began

        return load_weights

    for loader in (DefaultModelLoader, RunaiModelStreamerLoader, ShardedStateLoader):
        loader.load_weights = timed(loader.load_weights)
    return took


def _save(model, checkpoint: Path, place: Path) -> None:
    from vllm.model_executor.model_loader.sharded_state_loader import ShardedStateLoader

    place.mkdir(parents=True, exist_ok=True)
    for path in checkpoint.iterdir():
        if path.suffix != ".safetensors" and not path.name.endswith(".index.json"):
            shutil.copy(path, place / path.name)
    ShardedStateLoader.save_model(model, str(place), max_size=2_000_000_000)
    for path in place.glob("*.safetensors"):
        with path.open("rb") as file:
            os.fsync(file.fileno())


def _used() -> dict[str, float]:
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    told = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "read_bytes": int(told["read_bytes"]),
        "major_faults": usage.ru_majflt,
        "cpu_seconds": usage.ru_utime + usage.ru_stime,
        "peak_rss": usage.ru_maxrss * 1024,
        "anonymous": int(status["RssAnon"].split()[0]) * 1024,
    }


if __name__ == "__main__":
    _place, *_given, _log, _written = json.loads(sys.argv[1])
    _child(Path(_place), *_given, Path(_log), Path(_written))
