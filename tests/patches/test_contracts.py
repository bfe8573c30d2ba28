"""What the engine must do, as contracts: each holds in the patched engine, and each patch is needed.

`contracts.toml` is the table: a contract a row, and the programs in `contracts/` that prove it, by release and place. A
program runs in an engine tree, which is the image with the release's series applied, with one patch taken out, or with
none at all. `docs/patches.md` shows the table, and a test compares.
"""

from __future__ import annotations

import json
import re
from email.parser import HeaderParser
from pathlib import Path

import pytest
import story_release
from contracts_table import ELSEWHERE, PLACES, RECORDED, Table, render_into
from engine_trees import patches_of

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]
PAGE = REPOSITORY / "docs/patches.md"
TABLE = Table.read(HERE / "contracts.toml")

ENGINE = [
    "-e", "VLLM_CPU_KVCACHE_SPACE=1", "-e", "VLLM_CPU_OMP_THREADS_BIND=nobind",
    # Waiting OpenMP threads spin: two on a machine that does something else as well are slower than one.
    "-e", "OMP_NUM_THREADS=1",
    "-v", f"{HERE / 'contracts'}:/contracts:ro",
    "-v", f"{HERE / 'v2_on_cpu'}:/v2_on_cpu:ro",
]  # fmt: skip
V2_ON_CPU = ["-e", "VLLM_USE_V2_MODEL_RUNNER=1", "-e", "PYTHONPATH=/v2_on_cpu"]
TIMEOUT = 900  # seconds; two engine starts take 60 where nothing else runs


@pytest.fixture(scope="session")
def sources(pinned, overlay):
    """Each supported release's package."""
    return {TABLE.default: pinned, story_release.RELEASE: overlay}


@pytest.fixture(scope="session")
def verdicts(in_image, sources, tmp_path_factory):
    """Run a program for some contracts, or take what it said before."""
    seen = {}

    def run(release, applied, place, program, contracts):
        key = (release, tuple(sorted(applied)), place, program, tuple(contracts))
        if key not in seen:
            tree = sources[release].tree(applied, tmp_path_factory.mktemp("tree"))
            runner = V2_ON_CPU if place == "CPU V2" else []
            done = in_image(
                "python", f"/contracts/{program}.py", *contracts,
                options=[*ENGINE, *tree, *runner], check=False, timeout=TIMEOUT,
            )  # fmt: skip
            found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"contract"')]
            seen[key] = {verdict["contract"]: verdict for verdict in found}, done.stdout + done.stderr
        return seen[key]

    return run


def test_every_patch_has_a_contract_that_breaks_without_it():
    for release in TABLE.releases:
        folder = REPOSITORY / "patches" / release
        patches = patches_of(folder)
        assert set(patches) == {path.stem for path in folder.glob("*.patch")}
        claimed = dict.fromkeys(without.patch for without in TABLE.without if without.release == release)
        assert list(claimed) == list(patches)


def test_a_patch_names_the_contracts_that_break_without_it():
    for release in TABLE.releases:
        for patch in patches_of(REPOSITORY / "patches" / release):
            header = HeaderParser().parsestr((REPOSITORY / "patches" / release / f"{patch}.patch").read_text())
            named = {
                (program, contract)
                for program, contracts in re.findall(r"contracts/(\w+)\.py\s+\(([^)]+)\)", header["Test"])
                for contract in re.split(r",\s*", contracts)
            }
            proven = {
                (TABLE.program(w.contract, release, w.place), w.contract)
                for w in TABLE.without
                if (w.release, w.patch) == (release, patch)
            }
            assert named == proven, f"{release}/{patch}"


def test_the_default_release_is_the_one_that_the_image_ships(series):
    assert TABLE.default == series.name


def test_no_contract_rests_on_a_runner_that_does_not_ship():
    for row in TABLE.rows:
        places = row.proofs.get(TABLE.default, {})
        assert row.not_applicable.get(TABLE.default) or set(places) - {"CPU V1"}, f"{row.name}: proven on V1 alone"


@pytest.mark.parametrize("run", TABLE.runs(), ids=str)
def test_contracts_hold(run, verdicts):
    found, output = verdicts(run.release, TABLE.patches(run.release), run.place, run.program, run.contracts)
    broken = [name for name in run.contracts if not found.get(name, {}).get("holds")]
    assert not broken, f"{broken}: {found}\n{output[-8000:]}"


@pytest.mark.parametrize("without", TABLE.without, ids=str)
def test_a_contract_breaks_without_the_patch(without, verdicts):
    applied = [name for name in TABLE.patches(without.release) if name != without.patch]
    run = TABLE.run_without(without)
    found, output = verdicts(run.release, applied, run.place, run.program, run.contracts)
    assert without.contract in found, output[-8000:]
    assert not found[without.contract]["holds"], found
    # The reason of an engine that does not start stands in its output.
    assert without.reason in found[without.contract]["reason"] + output


@pytest.mark.parametrize("run", TABLE.upstream_runs(), ids=str)
def test_what_no_patch_brings_is_upstream(run, verdicts):
    found, output = verdicts(run.release, [], run.place, run.program, run.contracts)
    broken = [name for name in run.contracts if not found.get(name, {}).get("holds")]
    assert not broken, f"{broken}: {found}\n{output[-8000:]}"


def test_the_documented_table_is_the_one_that_is_proven_here():
    shown = PAGE.read_text()
    # Written anew by: PYTHONPATH=patches:tests python3 tests/patches/contracts_table.py
    assert render_into(shown, TABLE, RECORDED) == shown


def test_the_places_are_known():
    assert {place for row in TABLE.rows for proofs in row.proofs.values() for place in proofs} <= {*PLACES, ELSEWHERE}
