"""Reads 100,000 mutated logs, and large monotonous ones. Run: python tests/fuzz/mutated_logs.py [COUNT] [--seed N]

Nothing may raise, and four times the log may take no more than about four times as long. Prints `N passed`, or the
smallest log that fails, and exits with 1.
"""

import argparse
import os
import secrets
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]

from fuzz.mutations import check, logs  # noqa: E402 - the path comes first
from hypothesis import HealthCheck, given, seed, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

_ENOUGH = 128 * 1024  # bytes of a monotonous log; one four times as large is compared with it
_LONG = 15_000  # bytes of a monotonous line, since a much longer one is read as several
_LONG_LINES = 8
_LINEAR = 8.0  # times as long for four times the log: half way, in powers, between linear (4) and quadratic (16)

# Lines that might send a pattern back to its beginning again and again.
MONOTONOUS = {
    "traceback after traceback": b"Traceback (most recent call last):\n",
    "frame after frame": b'  File "/v/site-packages/vllm/a.py", line 1, in f\n    x\n',
    "exception after exception": b"ValueError: again\n",
    "chain without end": b"ValueError: x\nThe above exception was the direct cause of the following exception:\n",
    "group in group": b"  + Exception Group Traceback (most recent call last):\n  | XGroup: x\n  +-+---- 1 ----\n",
    "crash after crash": b"Fatal Python error: Segmentation fault\nCurrent thread 0x1 (most recent call first):\n"
    b'  File "a.py", line 1 in f\n',
    "another process each line": b"(Worker_TP%d pid=%d) ERROR 11-29 13:00:00 [a.py:%d] ValueError: x\n",
    "NCCL's warnings": b"host1:1:2 [0] NCCL WARN Call to connect failed\n",
    "one line": b"x",
    "one line of spaces": b" ",
    "one line of quotes": b'  File "',
    "one line of names": b"a.b.",
    "one line of levels": b"INFO 11-29 13:00:00 [a.py:1] ",
    "one line of processes": b"(EngineCore pid=7) ",
    "one line of prefixes": b"vllm-1  | ",
    "one line of colours": b"\x1b[36m",
    "one line of rules": b"+-",
    "report after report": b"-" * 100 + b"\nDIAGNOSIS: x (crash)\n" + b"-" * 100 + b"\nWhy\n  y\n",
    "report without end": b"-" * 100 + b"\nDIAGNOSIS: x (crash)\n  y\n",
    "supervisor's lines": b"aerie: failed; x; next start 1 UTC\n",
    "kernel's lines": b"Nov 29 13:34:57 host1 kernel: NVRM: Xid (PCI:0000:41:00): 79, x\n",
    "one line of next starts": b"aerie: failed; next start ",
    "lines of nothing": b"\n",
    "bars": b"\rLoading safetensors checkpoint shards:  33% Completed | 2/6 [00:01<00:02, 2it/s]",
}


def fuzz(count: int, number: int) -> int:
    """Check `count` mutated logs, drawn by the seed `number`; return how many were. Raises what fails."""
    checked = 0

    @seed(number)
    @settings(max_examples=count, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(log=logs(), size=st.sampled_from([1_000_000, 4096, 100, 7]))
    def reads(log: bytes, size: int) -> None:
        nonlocal checked
        check(log, size)
        checked += 1

    reads()
    return checked


def growth(line: bytes) -> float:
    """Return how many times as long a log takes that is four times as long: the best of three."""
    return min(_seconds(_monotonous(line, 4)) / _seconds(_monotonous(line, 1)) for _ in range(3))


def _monotonous(line: bytes, times: int) -> bytes:
    if b"\n" not in line and b"\r" not in line:
        return (line * (times * _LONG // len(line)) + b"\n") * _LONG_LINES
    numbers = line.count(b"%d")
    turns = range(times * _ENOUGH // len(line))
    return b"".join(line % ((turn,) * numbers) if numbers else line for turn in turns)


def _seconds(log: bytes) -> float:
    began = time.process_time()
    check(log, len(log))
    return max(time.process_time() - began, 0.001)


def main() -> int:
    """Run both; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("count", nargs="?", type=int, default=100_000, help="mutated logs (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(2**32), help="as an earlier run printed it")
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    jobs = os.cpu_count() or 1
    shares = [options.count // jobs + (job < options.count % jobs) for job in range(jobs)]
    with ProcessPoolExecutor(jobs) as pool:
        checked = sum(pool.map(fuzz, shares, range(options.seed, options.seed + jobs)))
    slow = 0
    for name, line in MONOTONOUS.items():
        times = growth(line)
        slow += times > _LINEAR
        print(f"{name}: 4 times the log takes {times:.1f} times as long{' - too slow' if times > _LINEAR else ''}")
    print(f"{checked} mutated logs and {len(MONOTONOUS) - slow} of {len(MONOTONOUS)} monotonous ones passed")
    return 1 if slow or checked < options.count else 0


if __name__ == "__main__":
    sys.exit(main())
