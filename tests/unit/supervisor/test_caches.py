"""The caches of compiled graphs and kernels: apart from each other, proven before their use, set aside once."""

import os
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from aerie.diagnosis.signatures import signatures
from aerie.supervisor import caches
from aerie.supervisor.caches import Cache, Caches, Keys, damage, keys, prune

KEYS = Keys("software", "engine")


@pytest.fixture
def volume(tmp_path):
    return tmp_path / "cache"


@pytest.fixture
def given(volume):
    """Return the variables as the image sets them."""
    return {"VLLM_CACHE_ROOT": f"{volume}/vllm", "TRITON_CACHE_DIR": f"{volume}/triton", "HOME": "/home"}


@pytest.fixture
def opened(volume, given):
    """Return a function that begins a start; the engine of the first one has compiled two files."""
    made = []

    def open_caches(named=KEYS):
        one = Caches(volume, given)
        variables = one.open(lambda: named)
        made.append(one)
        return one, variables

    yield open_caches
    for one in made:
        one.release()


def compile_into(variables):
    for name in ("VLLM_CACHE_ROOT", "TRITON_CACHE_DIR"):
        for file in ("graph.so", "deep/kernel.json", "some.lock"):
            path = Path(variables[name], file)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{name} {file}")


@pytest.fixture
def proven(opened, volume):
    """Return the two directories after a start that became ready."""
    one, variables = opened()
    compile_into(variables)
    one.proven()
    one.release()
    return volume / "engines/engine", volume / "kernels/software"


def failure(signature):
    return SimpleNamespace(signature=signature)


POISONED = failure("compile-cache-poisoned")


def test_the_engine_is_led_to_directories_of_its_own(opened, volume):
    _, variables = opened()
    assert variables == {
        "VLLM_CACHE_ROOT": f"{volume}/engines/engine/vllm",
        "TRITON_CACHE_DIR": f"{volume}/kernels/software/triton",
    }


def test_what_lies_elsewhere_stays_there(volume):
    one = Caches(volume, {"VLLM_CACHE_ROOT": "/elsewhere", "TRITON_CACHE_DIR": ""})
    assert one.open(lambda: pytest.fail("nothing to name")) == {}
    one.proven()
    assert not volume.exists()


def test_a_proven_cache_is_used_again(proven, opened):
    one, variables = opened()
    assert one.blame(failure("another")) is None
    assert Path(variables["VLLM_CACHE_ROOT"], "graph.so").exists()


def in_place(path):
    with path.open("r+b") as file:
        file.write(b"?")


def bit_flip(path):
    """Change a byte as a disk does it: with the times as they were."""
    about = path.stat()
    in_place(path)
    os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))


def emptied(path):
    path.unlink()
    path.touch()


@pytest.mark.parametrize(
    ("harm", "told"),
    [(in_place, "changed in place"), (bit_flip, "other content"), (emptied, "kernel.json")],
)
@pytest.mark.parametrize("which", [0, 1])
def test_a_damaged_one_is_set_aside_before_the_start(proven, opened, harm, told, which, caplog):
    graph = next(proven[which].rglob("kernel.json"))
    harm(graph)
    with caplog.at_level("WARNING"):
        _, variables = opened()
    assert told in caplog.text
    assert not list(proven[which].rglob("kernel.json"))
    assert list(proven[which].with_name(f"{proven[which].name}.poisoned-1").rglob("kernel.json"))
    other = ("VLLM_CACHE_ROOT", "TRITON_CACHE_DIR")[1 - which]
    assert Path(variables[other], "graph.so").exists()


def test_what_an_engine_replaces_removes_or_adds_is_no_damage(proven, opened):
    engine = proven[0]
    fresh = engine / "vllm/fresh"
    fresh.write_text("another autotuning")
    fresh.replace(engine / "vllm/graph.so")
    (engine / "vllm/deep/kernel.json").unlink()
    (engine / "vllm/some.lock").write_text("changed")
    (engine / "vllm/new").write_text("new")
    assert damage(engine, Cache(engine).file.read()) is None


def test_one_is_kept_for_a_look_and_no_more(proven, opened):
    engine = proven[0]
    for number in (1, 2):
        in_place(next(engine.rglob("graph.so")))
        one, variables = opened()
        compile_into(variables)
        one.proven()
        one.release()
        assert [each.name for each in engine.parent.glob("*.poisoned-*")] == [f"engine.poisoned-{number}"]


def test_half_written_before_the_machine_went_down(opened, volume, monkeypatch):
    _, variables = opened()
    compile_into(variables)
    one, variables = opened()
    assert Path(variables["VLLM_CACHE_ROOT"], "graph.so").exists()  # only the engine had ended
    monkeypatch.setattr(caches, "_boot", lambda: "another")
    one, variables = opened()
    assert not Path(variables["VLLM_CACHE_ROOT"], "graph.so").exists()
    assert one.blame(POISONED)


def test_a_failure_of_a_warm_cache_sets_it_aside_once_and_then_is_the_engines(proven, opened):
    one, variables = opened()
    assert "the next start compiles anew" in one.blame(POISONED)
    one, variables = opened()
    assert not Path(variables["VLLM_CACHE_ROOT"], "graph.so").exists()
    compile_into(variables)
    # Again, with what the failed start has left in the new one, and after that.
    assert "the failure is the engine's own" in one.blame(POISONED)
    one, variables = opened()
    assert "the failure is the engine's own" in one.blame(POISONED)
    assert Path(variables["VLLM_CACHE_ROOT"], "graph.so").exists()
    # Once an engine has been ready, it may happen again.
    one.proven()
    one, variables = opened()
    assert "the next start compiles anew" in one.blame(POISONED)


def test_a_cold_start_that_fails_is_the_engines(opened):
    one, _ = opened()
    assert "the failure is the engine's own" in one.blame(POISONED)


def test_those_used_least_lately_are_removed_but_not_what_is_in_use(opened, volume):
    held, _ = opened(Keys("software", "first"))
    for number in range(4):
        one, _ = opened(Keys("software", f"key-{number}"))
        record = Cache(volume / f"engines/key-{number}").file
        record.write(record.read() | {"used": f"2030-01-0{number + 1}"})
        one.release()
    (volume / "engines/old.poisoned-1").mkdir()
    prune(volume / "engines", 2)
    left = {each.name for each in (volume / "engines").iterdir()}
    assert left == {"first", "key-2", "key-3", "old.poisoned-1"}
    held.release()
    prune(volume / "engines", 2)
    assert not (volume / "engines/first").exists()


def test_a_damaged_record_counts_as_none(proven):
    (proven[0] / "aerie-cache.json").write_text("{")
    assert damage(proven[0], Cache(proven[0]).file.read()) is None


def test_a_cache_on_a_full_or_foreign_disk_is_told(volume, given):
    volume.parent.joinpath("cache").touch()
    with pytest.raises(OSError, match="Not a directory"):
        Caches(volume, given).open(lambda: KEYS)


WORDS = ["/models/a", "--tensor-parallel-size", "8", "--port", "8000"]


@pytest.mark.parametrize(
    ("words", "environment", "machine", "software", "engine"),
    [
        ([*WORDS, "--host", "::1", "--served-model-name", "x"], {}, "GPU", True, True),
        ([*WORDS, "--max-num-seqs", "4"], {}, "GPU", True, False),
        (["/models/b", *WORDS[1:]], {}, "GPU", True, False),
        (WORDS, {"HOSTNAME": "a", "VLLM_CACHE_ROOT": "/elsewhere", "TRITON_CACHE_DIR": "/x"}, "GPU", True, True),
        (WORDS, {"TORCHINDUCTOR_MAX_AUTOTUNE": "1"}, "GPU", True, False),
        (WORDS, {}, "another GPU", False, False),
    ],
)
def test_what_they_are_named_by(words, environment, machine, software, engine):
    first, second = keys(WORDS, {}, "GPU"), keys(words, environment, machine)
    assert (first.software == second.software, first.engine == second.engine) == (software, engine)


def test_another_build_of_the_same_release_is_another(monkeypatch):
    first = keys(WORDS, {}, "GPU")
    monkeypatch.setattr(caches, "_software", lambda: iter(["another"]))
    assert replace(keys(WORDS, {}, "GPU"), engine="") != replace(first, engine="")


def test_some_failures_are_known_to_come_from_a_cache():
    assert {"compile-cache-poisoned", "flashinfer-build-failed"} <= {one.id for one in signatures() if one.cache}
    assert all(one.kind == "crash" for one in signatures() if one.cache)  # what is held would never start again


def test_a_service_leads_the_engine_there_and_proves_it(serving, monkeypatch):
    cache = serving.directory / "cache"
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(cache / "vllm"))
    with serving.run() as service:
        service.until_phase("ready")
        (engine,) = (cache / "engines").iterdir()
        service.until(lambda: Cache(engine).file.read().get("proven"), "its record")
    assert f'"VLLM_CACHE_ROOT": "{engine}/vllm"' in (serving.directory / "environ.json").read_text()
    shutil.rmtree(cache)


def test_a_service_sets_a_poisoned_cache_aside_and_comes_back(serving, monkeypatch):
    cache = serving.directory / "cache"
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(cache / "vllm"))
    with serving.run() as service:
        service.until_phase("ready")
        (engine,) = (cache / "engines").iterdir()
        (engine / "vllm").mkdir()
        (engine / "vllm/graph").write_text("poison")
    said = "RuntimeError: vLLM failed to compile the model, leading to a corrupted compilation artifact."
    line = f"(EngineCore pid=7) ERROR 11-29 20:14:09 [core.py:1510] {said}"
    serving.state_file.unlink()
    with serving.run("--once", says=line, exit=1) as service:
        code, _, told = service.end()
    assert code == 5
    assert "the next start compiles anew" in told
    assert list((cache / "engines").glob("*.poisoned-1/vllm/graph"))
    with serving.run("--once", says=line, exit=1) as service:
        _, _, told = service.end()
    assert "the failure is the engine's own" in told
