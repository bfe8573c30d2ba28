"""Measures vLLM's loaders of weights on one GPU, from a cold and from a warm page cache: calls of ten minutes.

    python tests/gpu/loading.py --out results                    # BF16, 20 GB
    python tests/gpu/loading.py --out results --plan gpu-int4    # INT4, 10 GB
    python tests/gpu/loading.py --out results --plan gpu-sharded # sharded state, of BF16
    docker run --rm --network none --user 0:0 --entrypoint python3 -v "$PWD:/aerie:ro" -v "$PWD/results:/results" \\
        aerie:cpu /aerie/tests/gpu/loading.py --cpu --out /results    # the whole program, with a small checkpoint

Where vLLM 0.32.0's CUDA wheel is installed, with fastsafetensors, instanttensor and runai-model-streamer; a loader
that is missing fails alone. Needs 22 GB of disk below --data, 12 GB more for the second, 42 GB for the third; on
overlayfs it works, too. Results are written after each run, and what is in them is not measured again;
`tests/bench/plot_loaders.py` draws them. The same program as tests/bench/loaders.py's,
tests/bench/weights/measure.py.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
MEASURE = REPOSITORY / "tests/bench/weights/measure.py"


def main() -> int:
    """Run the plan."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory of the results")
    parser.add_argument(
        "--plan", choices=("gpu", "gpu-int4", "gpu-sharded"), default="gpu", help="(default: %(default)s)"
    )
    parser.add_argument("--cpu", action="store_true", help="a trial without a GPU")
    parser.add_argument(
        "--data", type=Path, default=Path(tempfile.gettempdir(), "aerie-loading"), help="(default: %(default)s)"
    )
    parser.add_argument("--seconds", type=float, default=540, help="begin no run after so many (default: %(default)s)")
    parser.add_argument("--commit", default="", help="to be written down")
    arguments, others = parser.parse_known_args()
    plan = "tiny" if arguments.cpu else arguments.plan
    arguments.out.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {"VLLM_USE_FLASHINFER_SAMPLER": "0", "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
    if arguments.cpu:
        environment |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    command = [
        sys.executable, str(MEASURE), "--plan", plan, "--data", str(arguments.data),
        "--out", str(arguments.out / f"loading-{plan}.json"), "--seconds", str(arguments.seconds),
        "--commit", arguments.commit, *others,
    ]  # fmt: skip
    return subprocess.run(command, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
