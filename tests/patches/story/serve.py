"""Start `vllm serve` with the arguments given, wait until it is healthy, ask for completions, say what was seen.

Runs where vLLM is installed. The engine's output goes to stderr; the last line on stdout is JSON: seconds to health,
the texts that followed the prompts, and vLLM's counters of drafts. Where the engine ends first, its status is the exit
code.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
import urllib.request

ADDRESS = "http://127.0.0.1:8000"
PROMPTS = ["?", "a", "The quick brown fox"]
TOKENS = 48
HEALTHY = 500  # seconds; 30 where nothing else runs


def get(path: str, body: dict | None = None, timeout: float = 300) -> bytes:
    """Return what the engine answers; an error's status raises."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(ADDRESS + path, data, {"Content-Type": "application/json"})  # noqa: S310
    with urllib.request.urlopen(request, timeout=timeout) as answer:  # noqa: S310
        return answer.read()


def until_healthy(engine: subprocess.Popen) -> float:
    """Return the seconds that it took; exit with the engine where that ends."""
    began = time.monotonic()
    while time.monotonic() - began < HEALTHY:
        if (status := engine.poll()) is not None:
            sys.exit(status or 1)
        try:
            get("/health", timeout=5)
        except OSError:  # no connection yet, or one that is not answered in time
            time.sleep(0.5)
        else:
            return time.monotonic() - began
    sys.exit(f"not healthy within {HEALTHY} s")


def counter(metrics: str, name: str) -> int:
    """Return a counter of speculation; 0 where there is none, as without speculation."""
    found = re.search(rf"^vllm:spec_decode_num_{name}_total{{.*}} (\S+)$", metrics, re.MULTILINE)
    return int(float(found[1])) if found else 0


def main() -> None:
    """Serve, ask, and tell."""
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", *sys.argv[1:]]
    engine = subprocess.Popen(command, stdout=sys.stderr)
    try:
        seconds = until_healthy(engine)
        request = {"model": "tiny", "prompt": PROMPTS, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
        choices = json.loads(get("/v1/completions", request))["choices"]
        metrics = get("/metrics").decode()
        # A request that fails takes this release's engine with it.
        get("/health")
    finally:
        engine.terminate()
        try:
            engine.wait(60)
        except subprocess.TimeoutExpired:
            engine.kill()
    texts = [choice["text"] for choice in sorted(choices, key=lambda choice: choice["index"])]
    counters = {name: counter(metrics, name) for name in ("drafts", "draft_tokens", "accepted_tokens")}
    seen = {"healthy_after_s": round(seconds, 1), "prompts": PROMPTS, "tokens": TOKENS, "texts": texts}
    print(json.dumps(seen | counters))


if __name__ == "__main__":
    main()
