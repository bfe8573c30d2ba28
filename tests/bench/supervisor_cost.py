"""Print what the supervisor costs: time to /health and tokens a second with it, as a share of those without it.

    .venv/bin/python tests/bench/supervisor_cost.py [--pairs N] [--image IMAGE]

Engines with it and without it take turns, each in a container of its own, and only ratios within a pair count: other
work on the machine, which changes from minute to minute, then falls on both. A pair takes a minute and a half.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import tempfile
import time
import urllib.request
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import http.client
    from collections.abc import Iterator

REPOSITORY = Path(__file__).resolve().parents[2]
CONFIG = REPOSITORY / "config" / "tiny.yaml"
KEY = "key-of-the-benchmark"
PORT = 18200
# As compose.cpu.yaml has them.
ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
HEALTHY_WITHIN = 300  # seconds
REQUESTS, TOKENS = 6, 256


class Seen(NamedTuple):
    """Seconds to /health, and tokens a second."""

    seconds: float
    tokens: float


def main() -> None:
    """Measure pairs, and print each and the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=3, help="(default: %(default)s)")
    parser.add_argument("--image", default="aerie:cpu", help="(default: %(default)s)")
    arguments = parser.parse_args()
    print("| | /health, s | tokens/s | /health with it / without | tokens/s with it / without |\n|---|---|---|---|---|")
    starts, rates = [], []
    for pair in range(arguments.pairs):
        # Whoever comes second finds warm caches; each does so in turn.
        order = [True, False] if pair % 2 else [False, True]
        seen = {supervised: measure(arguments.image, supervised=supervised) for supervised in order}
        starts.append(seen[True].seconds / seen[False].seconds)
        rates.append(seen[True].tokens / seen[False].tokens)
        print(f"| without | {seen[False].seconds:.1f} | {seen[False].tokens:.1f} | | |")
        print(f"| with | {seen[True].seconds:.1f} | {seen[True].tokens:.1f} | {starts[-1]:.3f} | {rates[-1]:.3f} |")
    print(f"| median | | | {statistics.median(starts):.3f} | {statistics.median(rates):.3f} |")


def measure(image: str, *, supervised: bool) -> Seen:
    """Start one engine, ask for tokens, and end it."""
    with container(image, supervised=supervised) as began:
        while not healthy():
            if time.monotonic() - began > HEALTHY_WITHIN:
                raise SystemExit(f"not healthy within {HEALTHY_WITHIN} s")
            time.sleep(0.05)
        seconds = time.monotonic() - began
        complete()  # the first request compiles and allocates
        asked = time.monotonic()
        for _ in range(REQUESTS):
            complete()
        return Seen(seconds, REQUESTS * TOKENS / (time.monotonic() - asked))


@contextlib.contextmanager
def container(image: str, *, supervised: bool) -> Iterator[float]:
    """Run `vllm serve` in the image, under the supervisor or alone; yield when it was started."""
    name = f"aerie-bench-{uuid.uuid4().hex[:12]}"
    serve = ["--config", "/etc/aerie/serve.yaml"]
    program = ["aerie", "serve", "--", *serve] if supervised else ["vllm", "serve", *serve]
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder, "api-keys")
        keys.write_text(KEY + "\n")
        for path, mode in ((Path(folder), 0o755), (keys, 0o644)):
            path.chmod(mode)
        command = [
            "docker", "run", "--detach", "--rm", "--no-healthcheck", "--name", name, "--shm-size", "1g",
            "--publish", f"127.0.0.1:{PORT}:8000", "--volume", f"{CONFIG}:/etc/aerie/serve.yaml:ro",
            "--volume", f"{folder}:/etc/aerie/secrets:ro",
            *(word for pair in ENVIRONMENT.items() for word in ("--env", "=".join(pair))),
            "--entrypoint", program[0], image, *program[1:],
        ]  # fmt: skip
        began = time.monotonic()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        try:
            yield began
        finally:
            subprocess.run(["docker", "rm", "--force", "--volumes", name], check=True, stdout=subprocess.DEVNULL)


def healthy() -> bool:
    try:
        return get("/health").status == 200
    except OSError:  # nobody listens yet
        return False


def complete() -> None:
    """Ask for as many tokens as every other request gets."""
    body = {"prompt": "What is Aerie?", "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    answer = json.loads(get("/v1/completions", body).read())
    if answer["usage"]["completion_tokens"] != TOKENS:
        raise SystemExit(f"{answer['usage']} instead of {TOKENS} tokens")


def get(path: str, body: object = None) -> http.client.HTTPResponse:
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
    request = urllib.request.Request(f"http://127.0.0.1:{PORT}{path}", data, headers)
    return urllib.request.urlopen(request, timeout=120)  # noqa: S310 - http, as above


if __name__ == "__main__":
    main()
