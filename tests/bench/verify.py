"""How fast `aerie model verify` is beside `sha256sum` and the disk alone, in one run: `python tests/bench/verify.py`.

Writes a model of random bytes, publishes it, and takes turns: the disk alone (past the page cache, and through it),
SHA-256 of memory on all cores, `sha256sum` on all cores, verify. A round takes all of them, so that what else the
machine does hits them alike; the ratio of a round is verify's rate by the best that the disk (the faster way) and the
cores allow in that round, and the median counts. What a core has to do for a gigabyte is told besides, since it does
not depend on what else the machine does. Cold: the files' pages are dropped before each turn. Warm: they are read
before, so that SHA-256 of memory alone is the limit.
"""

import argparse
import hashlib
import mmap
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path

from aerie.cache.hashing import default_threads, digest
from aerie.cache.inspection import inspect
from aerie.cache.layout import Store
from aerie.cache.manifest import File, Manifest

_CORES = len(os.sched_getaffinity(0))
_PIECE = 4 * 2**20
_REVISION = "0" * 40
_HEAD = " direct through  SHA-256 sha256sum  verify verify/best verify/sha256sum  core s/GB: SHA-256 sha256sum  verify"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gb", type=float, default=4.0, help="size of the model (default: %(default)s)")
    parser.add_argument("--shards", type=int, default=4, help="files (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="(default: %(default)s)")
    parser.add_argument("--directory", type=Path, help="on the disk in question (default: the temporary directory)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.directory) as folder:
        path, manifest = _publish(Path(folder), int(options.gb * 1e9 / options.shards), options.shards)
        files = [path / file.path for file in manifest.files]
        ratios = {}
        for state, prepare in (("cold", _drop), ("warm", _read)):
            print(f"{state}, GB/s  {_HEAD}")
            ratios[state] = [_round(path, manifest, files, prepare, state) for _ in range(options.rounds)]
    for state, found in ratios.items():
        print(f"{state}: median {statistics.median(found):.2f} of the best that disk and cores allow")
    return 0


def _publish(root: Path, size: int, shards: int) -> tuple[Path, Manifest]:
    model = Store(root).model("bench")
    with model.lock("bench"):
        files = model.staging(_REVISION) / "files"
        listed = []
        for number in range(shards):
            shard = files / f"model-{number}.bin"
            with shard.open("w+b") as file:
                for at in range(0, size, _PIECE):
                    file.write(os.urandom(min(_PIECE, size - at)))
                file.flush()
                listed.append(File(shard.name, size, *digest(file.fileno(), size)))
        manifest = Manifest("bench", _REVISION, "adopted", tuple(listed), "bench", "")
        return model.publish(files, manifest), manifest


def _round(path: Path, manifest: Manifest, files: list[Path], prepare: Callable[[Path], None], state: str) -> float:
    rates, work = [], []
    for measured in (_direct, _through, _memory, _sha256sum, lambda _: _verify(path, manifest)):
        if measured in (_direct, _through) and state == "warm":
            rates.append(float("inf"))
            work.append(0.0)
            continue
        for file in files:
            prepare(file)
        began, cores = time.perf_counter(), sum(os.times()[:4])
        measured(files)
        rates.append(manifest.size / (time.perf_counter() - began) / 1e9)
        work.append((sum(os.times()[:4]) - cores) / manifest.size * 1e9)
    direct, through, memory, beside, verified = rates
    best = min(max(direct, through), memory)
    print(
        f"          {direct:7.2f} {through:7.2f} {memory:8.2f} {beside:9.2f} {verified:7.2f} {verified / best:11.2f} "
        f"{verified / beside:16.2f} {work[2]:19.2f} {work[3]:9.2f} {work[4]:7.2f}",
        flush=True,
    )
    return verified / best


def _drop(file: Path) -> None:
    with file.open("rb") as stream:
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _read(file: Path) -> None:
    with file.open("rb", buffering=0) as stream:
        while stream.read(_PIECE):
            pass


def _direct(files: list[Path]) -> None:
    _read_all(files, os.O_DIRECT)


def _through(files: list[Path]) -> None:
    _read_all(files, 0)


def _read_all(files: list[Path], flag: int) -> None:
    work = iter([(file, at) for file in files for at in range(0, file.stat().st_size, 16 * _PIECE)])
    lock = threading.Lock()

    def read() -> None:
        buffer = memoryview(mmap.mmap(-1, _PIECE))  # direct reads want it aligned
        while True:
            with lock:
                item = next(work, None)
            if item is None:
                return
            descriptor = os.open(item[0], os.O_RDONLY | flag)
            for at in range(item[1], item[1] + 16 * _PIECE, _PIECE):
                if os.preadv(descriptor, [buffer], at) < _PIECE:
                    break
            os.close(descriptor)

    _together(read, 8)


def _memory(files: list[Path]) -> None:
    size = sum(file.stat().st_size for file in files)
    piece = bytes(2**20)

    def hash_() -> None:
        whole = hashlib.sha256()
        for _ in range(size // _CORES // len(piece)):
            whole.update(piece)

    _together(hash_, _CORES)


def _together(target: Callable[[], None], count: int) -> None:
    threads = [threading.Thread(target=target) for _ in range(count)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()


def _sha256sum(files: list[Path]) -> None:
    names = "\0".join(map(str, files))
    command = ["xargs", "-0", "-n", "1", "-P", str(_CORES), "sha256sum"]
    subprocess.run(command, input=names, text=True, check=True, stdout=subprocess.DEVNULL)


def _verify(path: Path, manifest: Manifest) -> None:
    with redirect_stderr(StringIO()):
        report = inspect(path, manifest, quick=False, threads=default_threads())
    if not report.is_whole:
        sys.exit(f"not whole: {report.findings}")


if __name__ == "__main__":
    sys.exit(main())
