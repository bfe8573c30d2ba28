"""Rehearse with the arguments given, send SIGINT while the engine starts, and say what is left of it then.

Runs in the image. The last line on stdout is JSON: exit code, seconds from the signal to the end, report, text, and
which processes and folders of the rehearsal are there still.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

REPORT = Path("/tmp/report.json")  # noqa: S108 - the container's own
CACHE = Path("/var/cache/aerie")
ENGINE_IS_THERE = "spawning workers"


def main() -> None:
    """Start, interrupt, tell."""
    process = subprocess.Popen(
        ["aerie", "rehearse", "--json", REPORT, *sys.argv[1:]],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    said = []
    for line in process.stdout:
        said.append(line)
        if ENGINE_IS_THERE in line:
            break
    folders, engine = [path.parent for path in CACHE.glob("*/engine.log")], len(processes())
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    said += process.stdout
    code = process.wait()
    told = {"code": code, "seconds": time.monotonic() - began, "report": json.loads(REPORT.read_text()), "said": said}
    left = {"processes": processes(), "folders": [folder.name for folder in folders if folder.exists()]}
    print(json.dumps(told | {"during": {"processes": engine, "folders": len(folders)}, "left": left}))


def processes() -> list[str]:
    """Return the commands of all other processes but the container's first."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        if int(path.name) not in {1, os.getpid()}:
            try:
                found.append((path / "cmdline").read_text().replace("\0", " "))
            except OSError:
                continue
    return found


if __name__ == "__main__":
    main()
