"""The runner of tests/gpu, with programs that need no GPU."""

import json
import sys
import threading
import time
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
sys.path[:0] = [str(REPOSITORY / "tests/gpu"), str(REPOSITORY / "patches")]

import items  # noqa: E402
import series  # noqa: E402
import table  # noqa: E402

VERDICTS = """
print('(EngineCore pid=1) INFO 11-29 [cuda.py:1] Using TRITON_MLA attention backend')
print('{"contract": "kept", "holds": true, "evidence": "1 of 1", "seconds": 0.1}')
print('{"contract": "lost", "holds": false, "reason": "AssertionError: gone | away", "seconds": 0.2}')
raise SystemExit(1)
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setattr(items, "REPOSITORY", tmp_path)

    def run_program(text, gpus=("4",), gpus_needed=1, deadline=60, **options):
        (tmp_path / "program.py").write_text(text)
        item = items.Item("thing", "program.py", gpus=gpus_needed, **options)
        return items.run_item(item, 0, items.Gpus(list(gpus)), {"PATH": "/bin"}, tmp_path, time.monotonic() + deadline)

    return run_program


def test_verdicts_and_telling_lines_are_read(run):
    outcome = run(VERDICTS)
    assert outcome.state == "exit status 1"
    assert [(v["contract"], v["holds"], v["item"]) for v in outcome.verdicts] == [
        ("kept", True, "thing"),
        ("lost", False, "thing"),
    ]
    assert outcome.said == ["Using TRITON_MLA attention backend"]


def test_without_the_series_a_contract_must_break_and_for_the_known_reason(run):
    kept, lost = run(VERDICTS, unpatched={"kept": "gone", "lost": "gone"}).verdicts
    assert (kept["broken_as_expected"], lost["broken_as_expected"]) == (False, True)
    _, lost = run(VERDICTS, unpatched={"kept": "gone", "lost": "another"}).verdicts
    assert not lost["broken_as_expected"]


def test_a_program_gets_its_gpus_and_its_measurement_is_kept(run):
    write = "import json, os, sys; json.dump(os.environ['CUDA_VISIBLE_DEVICES'], open(sys.argv[1], 'w'))"
    assert run(write, gpus=("4", "6", "7"), arguments=("{result}",)).measured == "4"
    assert run(write, gpus=("4", "6", "7"), arguments=("{result}",), gpus_needed=2).measured == "4,6"


def test_a_program_that_hangs_is_ended_with_what_it_started(run):
    hang = "import subprocess, time; print(subprocess.Popen(['sleep', '60']).pid, flush=True); time.sleep(60)"
    outcome = run(hang, seconds=1)
    assert outcome.state == "stopped after 1 s"
    for _ in range(100):
        if b"sleep" not in command_line(int(outcome.log)):
            break
        time.sleep(0.1)
    else:
        pytest.fail("what the program started is still running")


def command_line(pid):
    """A process's command line, empty once it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def test_what_cannot_run_is_skipped_and_says_why(run):
    assert run("", deadline=-1).state == "skipped: no time left"
    assert items.obstacle(items.Item("thing", "program.py"), 0) == "skipped: needs 1 GPU(s), there are 0"
    assert items.obstacle(items.Item("thing", "program.py"), 1) is None
    assert items.obstacle(items.Item("thing", "none.py"), 1) == "skipped: there is no none.py"


def test_items_share_gpus_in_their_order_unless_one_is_to_be_alone():
    gpus = items.Gpus(["0", "1"])
    one, both, alone = (items.Item("", "", **o) for o in ({}, {"gpus": 2}, {"alone": True}))
    with gpus.take(0, one) as first, gpus.take(1, one) as second, gpus.take(2, both) as third:
        assert (first, second, third) == (["0"], ["1"], ["0", "1"])
    got = []

    def wait(place, item):
        with gpus.take(place, item) as taken:
            got.append((place, taken))

    with gpus.take(3, one):
        later = [threading.Thread(target=wait, args=(5, one)), threading.Thread(target=wait, args=(4, alone))]
        for thread in later:
            thread.start()
        for thread in later:
            thread.join()
    assert got[0] == (4, ["1"])


PATCH = """Says two.

--- a/vllm/module.py
+++ b/vllm/module.py
@@ -1,3 +1,3 @@
 # one
-value = 1
+value = 2
 # three
"""


@pytest.mark.parametrize(("installed", "patched"), [(1, False), (2, True)])
def test_trees_with_and_without_the_series_are_made_of_either_engine(tmp_path, monkeypatch, installed, patched):
    engine = tmp_path / "site/vllm"
    (engine / "v1").mkdir(parents=True)
    (engine / "__init__.py").touch()
    (engine / "v1/large.so").write_text("x")
    (engine / "module.py").write_text(f"# one\nvalue = {installed}\n# three\n")
    folder = tmp_path / "0.32.0"
    folder.mkdir()
    (folder / "series").write_text("two.patch\n")
    (folder / "two.patch").write_text(PATCH)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    trees = items.engine_trees(folder, tmp_path)
    assert "value = 2" in (trees[True] / "vllm/module.py").read_text()
    assert "value = 1" in (trees[False] / "vllm/module.py").read_text()
    assert (trees[True] / "vllm/v1/large.so").readlink() == engine / "v1/large.so"
    assert f"value = {installed}" in (engine / "module.py").read_text()
    (engine / "module.py").write_text("value = 3\n")
    with pytest.raises(series.PatchError, match=r"neither vLLM 0\.32\.0 nor"):
        items.engine_trees(folder, tmp_path / "other")


def test_the_table_shows_every_verdict_and_every_item_without_one(run):
    outcomes = [run(VERDICTS), run(VERDICTS, unpatched={"kept": "nowhere", "lost": "gone"}), run("", deadline=-1)]
    about = {"gpu": "GPU", "gpus": 1, "compute_cap": "9.0", "driver_version": "580", "python": "3.12", "packages": {}}
    about |= {"date": "2026-01-01", "commit": "abc", "series": "sha256:0"}
    result = items.results(about, outcomes)
    shown = table.table(result)
    assert "| `kept` (thing) | patched | holds | 1 of 1 | 0.1 |" in shown
    assert "| `lost` (thing) | patched | **broken** | AssertionError: gone \\| away | 0.2 |" in shown
    assert "| `kept` (thing) | unpatched | **holds** |" in shown
    assert "| `lost` (thing) | unpatched | broken, as expected |" in shown
    assert items.failed(result, outcomes)
    assert not items.failed(items.results(about, outcomes[:0]), [])
    for text, unpatched in (
        ("raise SystemExit(1)", {}),
        ("", {"lost": "gone"}),
        (VERDICTS.replace("false", "true"), {}),
    ):
        outcomes = [run(text, unpatched=unpatched)]
        assert items.failed(items.results(about, outcomes), outcomes), text
    fine = [run(VERDICTS.replace("false", "true").replace("SystemExit(1)", "SystemExit(0)"))]
    assert not items.failed(items.results(about, fine), fine)
    fine = [run(VERDICTS, unpatched={"lost": "gone", "kept": "1 of 1"})]
    assert items.failed(items.results(about, fine), fine)
    assert json.loads(json.dumps(result)) == result
