"""`aerie diagnose` on a log of 1 GB: how long it takes, in how much memory. Run: python tests/bench/large_log.py [MB]

The log is what a serving engine prints, a crash in its middle, then a second start that serves to the end. Exits with 1
where the diagnosis is wrong, takes more than 30 s of CPU a gigabyte (on a machine that does nothing else, as many
seconds), or needs more than 300 MB.
"""

import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
LOGS = ROOT / "tests/fixtures/logs"
CRASH = LOGS / "vllm-0.17.1-layer2-image-token-index.log"
HEALTHY = LOGS / "vllm-0.32.0-h200-healthy-compiled.log"
SIGNATURE = "image-token-index-missing"

SECONDS = 30.0  # a gigabyte
MEGABYTES = 300

SERVING = """\
(APIServer pid=1815) INFO 11-29 {clock} [loggers.py:302] Engine 000: Avg prompt throughput: {a}.4 tokens/s, \
Avg generation throughput: {b}.1 tokens/s, Running: {c} reqs, Waiting: {d} reqs, GPU KV cache usage: {c}.1%, \
Prefix cache hit rate: {d}.0%
(APIServer pid=1815) INFO 11-29 {clock} [metrics.py:101] SpecDecoding metrics: Mean acceptance length: 2.61, \
Accepted throughput: {b}.11 tokens/s, Drafted throughput: {a}.02 tokens/s, Accepted: {b} tokens, Drafted: {a} tokens, \
Per-position acceptance rate: 0.645, 0.393, 0.240, Avg Draft acceptance rate: 42.6%
(APIServer pid=1815) INFO:     10.0.0.{c}:{a} - "POST /v1/chat/completions HTTP/1.1" 200 OK
(APIServer pid=1815) INFO:     10.0.0.{c}:{b} - "GET /health HTTP/1.1" 200 OK
(APIServer pid=1815) WARNING 11-29 {clock} [protocol.py:119] The following fields were present in the request but \
ignored: {{'field_{d}'}}
""".splitlines(keepends=True)


def serving() -> Iterator[bytes]:
    """One megabyte after the other of a serving engine's lines."""
    chance = random.Random(4)  # noqa: S311 - the same log each time
    while True:
        lines = (
            chance.choice(SERVING).format(
                clock=f"{number % 24:02}:{number % 60:02}:{number % 59:02}",
                a=chance.randrange(1000, 60000),
                b=chance.randrange(100, 1000),
                c=chance.randrange(1, 99),
                d=chance.randrange(10),
            )
            for number in range(7000)
        )
        yield "".join(lines).encode()


def write(log: Path, size: int) -> None:
    """Write about `size` bytes: a start, serving, a crash, a start, serving."""
    pieces = [piece for piece, _ in zip(serving(), range(16), strict=False)]
    with log.open("wb") as file:
        for before, upto in ((HEALTHY, size / 2), (CRASH, size / 2), (HEALTHY, size)):
            file.write(before.read_bytes())
            turn = 0
            while file.tell() < upto:
                file.write(pieces[turn % len(pieces)])
                turn += 1


def main() -> int:
    """Write the log, read it, print the figures."""
    size = int(sys.argv[1] if len(sys.argv) > 1 else 1000) * 10**6
    with tempfile.TemporaryDirectory() as directory:
        log = Path(directory) / "vllm.log"
        write(log, size)
        began = time.monotonic()
        ended = subprocess.run(
            [sys.executable, "-m", "aerie.cli", "diagnose", str(log)],
            cwd=ROOT / "src",
            capture_output=True,
            text=True,
            check=False,
        )
        took = time.monotonic() - began
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds, megabytes = used.ru_utime + used.ru_stime, used.ru_maxrss / 1000
    print(ended.stdout, ended.stderr, sep="")
    print(f"{size / 10**6:.0f} MB: {took:.1f} s, {seconds:.1f} s of CPU, {megabytes:.0f} MB of memory")
    right = SIGNATURE in ended.stdout and ended.returncode == 0
    return 0 if right and seconds <= max(5.0, SECONDS * size / 10**9) and megabytes <= MEGABYTES else 1


if __name__ == "__main__":
    sys.exit(main())
