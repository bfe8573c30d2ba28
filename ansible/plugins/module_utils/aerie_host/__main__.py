"""What the host itself can do: `python3 /usr/local/lib/aerie/aerie_host COMMAND`, as the units and people call it.

acs      clear, check or put back ACS redirection above the GPUs
gpus     check or wait for the GPUs that a container is to get
report   what is right and wrong with this host, as a table or JSON; changes nothing
service  wait for the GPUs, start the compose project, stay for as long as its container runs; for its unit
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

if not __package__:  # run as a directory: its parent holds the package
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

COMMANDS = ("acs", "gpus", "report", "service")


def report(arguments: Sequence[str]) -> int:
    """Print the findings: 0 where nothing is wrong that a person must mend, else 1."""
    from aerie_host import finding, findings, machine  # noqa: PLC0415  # a unit that clears ACS needs neither

    parser = argparse.ArgumentParser(prog="aerie_host report", description="What is right and wrong with this host.")
    parser.add_argument("--gpus", type=int, default=8, help="GPUs that it is to have (default: 8)")
    parser.add_argument("--data", default="/data", help="directory of the models (default: /data)")
    parser.add_argument(
        "--read-seconds", type=float, default=1.0, help="how long to measure its read rate (default: 1)"
    )
    parser.add_argument("--json", action="store_true", help="everything that was read, too")
    given = parser.parse_args(arguments)
    host = machine.read_machine(data=given.data if given.gpus else "", read_seconds=given.read_seconds)
    found = findings.judge(host, finding.Wanted(gpus=given.gpus, memory_gib=128 if given.gpus else 8))
    text = json.dumps(findings.to_json(host, found), indent=2) if given.json else findings.table(found)
    try:
        print(text, flush=True)
    except BrokenPipeError:  # `| head` has seen enough; what Python flushes at its end must go somewhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return int(any(line.verdict == "fail" for line in found))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    command, *rest = [*(sys.argv[1:] if arguments is None else arguments), ""]
    if command not in COMMANDS:
        print(f"usage: aerie_host {{{','.join(COMMANDS)}}} ...\n\n{__doc__}", file=sys.stderr)
        return 2
    if command == "report":
        return report(rest[:-1])
    status: int = importlib.import_module(f"aerie_host.{command}").main(rest[:-1])
    return status


if __name__ == "__main__":
    raise SystemExit(main())
