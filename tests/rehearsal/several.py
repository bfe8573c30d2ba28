"""Run `aerie rehearse` once for each list of arguments in a JSON file, in one container; say what each came to.

Prints a line of JSON for each: exit code, seconds, report, and the text that people read.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path


def main() -> None:
    """Rehearse one after the other, so that each has the machine for itself."""
    for arguments in json.loads(Path(sys.argv[1]).read_text()):
        began = time.monotonic()
        done = subprocess.run(
            ["aerie", "rehearse", "--json", "-", *arguments], capture_output=True, text=True, check=False
        )
        seconds = time.monotonic() - began
        try:
            report = json.loads(done.stdout)
        except ValueError:
            report = None
        print(
            json.dumps({"code": done.returncode, "seconds": seconds, "report": report, "said": done.stderr}), flush=True
        )


if __name__ == "__main__":
    main()
