"""A real hang, as the supervisor finds it: two pipeline stages without async scheduling, which one patch refuses.

Without that patch the first stage fails an assertion at the first request and the second waits for it for ever, while
`/health` stays 200 and no process dies. With the other patches the engine gets that far.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from engine_trees import patches_of

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]
REFUSES = "pp-needs-async-scheduling"
FOUND_WITHIN = 180.0  # seconds after the first request


@pytest.mark.slow
def test_stages_that_wait_for_each_other_are_found_hung(in_image, pinned, series, tmp_path):
    tree = pinned.tree(set(patches_of(series)) - {REFUSES}, tmp_path)
    options = [
        *tree,
        *("-e", "VLLM_CPU_KVCACHE_SPACE=1", "-e", "VLLM_CPU_OMP_THREADS_BIND=nobind", "-e", "OMP_NUM_THREADS=1"),
        *("-e", "VLLM_USE_V2_MODEL_RUNNER=1", "-e", "PYTHONPATH=/v2_on_cpu"),
        *("-v", f"{HERE / 'v2_on_cpu'}:/v2_on_cpu:ro", "-v", f"{HERE / 'story'}:/story:ro"),
        *("-v", f"{REPOSITORY / 'config/tiny.yaml'}:/config.yaml:ro"),
    ]
    arguments = ["--config", "/config.yaml", "--pipeline-parallel-size", "2", "--no-async-scheduling"]
    done = in_image("python", "/story/supervise.py", *arguments, options=options, check=False, timeout=900)
    assert done.returncode == 0, done.stderr[-8000:]
    told = json.loads(done.stdout.splitlines()[-1])
    diagnosis = told["state"]["diagnosis"]
    assert diagnosis["kind"] == "hung", diagnosis
    assert told["gate"]["exit"] == 1, told["gate"]
    began, printed = (
        next(at for at, line in told["lines"] if words in line)
        for words in ("Application startup complete", "DIAGNOSIS: ")
    )
    print(f"found after {printed - began:.0f} s: {diagnosis['title']}; {'; '.join(diagnosis['evidence'])}")
    assert printed - began < FOUND_WITHIN
