"""Measures the loaders of vLLM in the CPU image, from a cold and from a warm page cache, with one rank and with two.

    .venv/bin/python tests/bench/loaders.py [--quick] [--data DIR] [--image IMAGE]

Needs Docker, the image of `./run build`, 24 GiB of memory and 30 GB of disk (3 GB for a trial: --quick), and a machine
on which nothing else runs. It may be stopped and started again: what was measured is kept. Checkpoints are written
where they are missing, into a directory that stays; remove it afterwards. Results are JSON, which
tests/bench/plot_loaders.py draws.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
# As compose.cpu.yaml has them.
ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}


def main() -> int:
    """Run the measurement in a container, and remove that whatever happens."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="1 GB, each once: a trial, whose figures mean nothing")
    parser.add_argument("--plan", help="another plan of tests/bench/weights/plan.py")
    parser.add_argument("--image", default="aerie:cpu", help="(default: %(default)s)")
    parser.add_argument("--data", type=Path, default=REPOSITORY / ".aerie/loaders", help="(default: %(default)s)")
    parser.add_argument("--out", type=Path, help="(default: tests/bench/results/loaders-PLAN.json)")
    parser.add_argument("--site", type=Path, help="packages that the image lacks, as `pip install --target` puts them")
    arguments, others = parser.parse_known_args()
    plan = arguments.plan or ("quick" if arguments.quick else "cpu")
    out = (arguments.out or REPOSITORY / f"tests/bench/results/loaders-{plan}.json").resolve()
    data = arguments.data.resolve()
    for folder in (data, out.parent):
        folder.mkdir(parents=True, exist_ok=True)
    name = f"aerie-bench-{uuid.uuid4().hex[:12]}"
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    # root, since the results are to belong to whoever runs this; nothing listens, and no network is there.
    command = [
        "docker", "run", "--rm", "--init", "--name", name, "--network", "none", "--user", "0:0",
        "--no-healthcheck", "--shm-size", "1g", "--oom-score-adj", "1000",
        "--volume", f"{REPOSITORY}:/aerie:ro", "--volume", f"{data}:/weights",
        "--volume", f"{out.parent}:/results", "--env", "PYTHONUNBUFFERED=1", "--env", "PYTHONDONTWRITEBYTECODE=1",
        *(("--volume", f"{arguments.site.resolve()}:/site:ro", "--env", "PYTHONPATH=/site") if arguments.site else ()),
        *(word for pair in ENVIRONMENT.items() for word in ("--env", "=".join(pair))),
        "--entrypoint", "python3", arguments.image, "/aerie/tests/bench/weights/measure.py", "--plan", plan,
        "--data", "/weights", "--out", f"/results/{out.name}", "--commit", head.stdout.strip(), *others,
    ]  # fmt: skip
    for number in (signal.SIGINT, signal.SIGTERM):  # also where whoever started this ignores them
        signal.signal(number, signal.default_int_handler)
    try:
        code = subprocess.run(command, check=False).returncode
    except KeyboardInterrupt:
        code = 130
    finally:
        with contextlib.suppress(KeyboardInterrupt):
            subprocess.run(["docker", "rm", "--force", "--volumes", name], capture_output=True, check=False)
    for file in (out, out.with_suffix(".log")):
        with contextlib.suppress(FileNotFoundError, PermissionError):
            os.chown(file, os.getuid(), os.getgid())
    print(f"results: {out}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
