"""Run `aerie serve` with the arguments given and `aerie wait` beside it, until that ends; say when what was told.

Runs in the image. The service's output goes to stderr; the last line on stdout is JSON, with times in seconds.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path

FOLDER = Path("/tmp/aerie")  # noqa: S108 - the container's own
KEYS, STATE = (FOLDER / name for name in ("keys", "state"))


def main() -> None:
    """Serve, wait for the gate's verdict, stop, and tell."""
    STATE.mkdir(parents=True)
    KEYS.write_text("a key\n")
    serve = ["aerie", "serve", "--state-dir", STATE, "--cache-dir", STATE, "--api-keys-file", KEYS, "--"]
    service = subprocess.Popen(
        [*serve, *sys.argv[1:]], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    lines: list[tuple[float, str]] = []

    def listen() -> None:
        for line in service.stdout:
            lines.append((time.time(), line.rstrip("\n")))
            print(line, end="", file=sys.stderr, flush=True)

    threading.Thread(target=listen, daemon=True).start()
    gate = subprocess.run(["aerie", "wait"], stderr=subprocess.PIPE, text=True, check=False)
    gate_ended = time.time()
    time.sleep(1)
    state = json.loads((STATE / "state.json").read_text())
    service.terminate()
    service.wait(30)
    verdict = {"exit": gate.returncode, "at": gate_ended, "said": gate.stderr}
    print(json.dumps({"lines": lines, "gate": verdict, "state": state}))


if __name__ == "__main__":
    main()
