"""Warming the page cache, with real files on a real disk: the kernel itself says what is in it."""

import ctypes
import json
import mmap
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from aerie.cache import warm
from aerie.cache.room import Room
from aerie.cache.warm import INDEX, Verdict, refusal, reserve, run, size_of, weight_files

MIB, GIB = 2**20, 2**30
SOURCE = Path(__file__).parents[3] / "src"
PLENTY = Room(10**15)


def write(path, mib=3):
    """Write random bytes, a little more than so many MiB, and let them be on the disk alone."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.write(os.urandom(mib * MIB + 123))
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return path


def cached_pages(path):
    """Return (pages in the page cache, pages) by mincore(2)."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, mmap.MAP_SHARED, mmap.PROT_READ) as mapped:
        pages = -(-len(mapped) // mmap.PAGESIZE)
        seen = (ctypes.c_ubyte * pages)()
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        address = libc.mmap(None, ctypes.c_size_t(len(mapped)), 1, 1, file.fileno(), ctypes.c_long(0))
        assert libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(len(mapped)), seen) == 0
        libc.munmap(ctypes.c_void_p(address), ctypes.c_size_t(len(mapped)))
    return sum(each & 1 for each in seen), pages


def warmed(*directories, **more):
    told = []
    result = run(list(directories), threading.Event(), lambda *given: told.append(given), there=PLENTY, **more)
    return result, told


def test_all_of_it_is_in_the_page_cache_then(tmp_path):
    files = [write(tmp_path / f"model-0000{number}-of-00002.safetensors", 20) for number in (1, 2)]
    before, pages = cached_pages(files[0])
    if before == pages:
        pytest.skip("this file system does not let go of pages")
    result, _ = warmed(tmp_path)
    assert result.state == Verdict.DONE
    assert result.warmed == result.total == size_of(files)
    assert [cached_pages(file) for file in files] == [(pages, pages)] * 2
    again, _ = warmed(tmp_path)
    assert (again.state, again.from_disk) == (Verdict.DONE, 0)
    assert "in the page cache already" in again.text


def test_in_vllms_order(tmp_path):
    for name in ("model-10.safetensors", "model-9.safetensors", "other.bin", "consolidated.safetensors"):
        write(tmp_path / name, 0)
    write(tmp_path / "assets/deep.safetensors", 0)
    assert [path.name for path in weight_files(tmp_path)] == [
        "consolidated.safetensors",
        "model-9.safetensors",
        "model-10.safetensors",
    ]
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "model-9.safetensors", "b": "model-10.safetensors"}}))
    assert [path.name for path in weight_files(tmp_path)] == ["model-9.safetensors", "model-10.safetensors"]
    (tmp_path / INDEX).write_text("{")  # vLLM says so itself
    assert len(weight_files(tmp_path)) == 3


def test_the_target_comes_before_the_drafter(tmp_path, monkeypatch):
    for number in range(3):
        write(tmp_path / f"target/model-{number}.safetensors", 0)
    write(tmp_path / "drafter/model.safetensors", 0)
    opened = []
    real = os.open
    monkeypatch.setattr(warm, "_THREADS", 1)
    monkeypatch.setattr(warm, "_cached", lambda _path: 0)
    monkeypatch.setattr(os, "open", lambda path, *given: (opened.append(path), real(path, *given))[1])
    warmed(tmp_path / "target", tmp_path / "drafter")
    assert [(path.parent.name, path.name) for path in opened if isinstance(path, Path)] == [
        *(("target", f"model-{number}.safetensors") for number in range(3)),
        ("drafter", "model.safetensors"),
    ]


def test_steps_are_no_larger_than_what_the_kernel_reads_for_one(tmp_path):
    assert warm._STEPS[0] <= warm._step(tmp_path.stat().st_dev) <= warm._STEPS[1]
    assert warm._step(os.makedev(4095, 1)) == warm._STEPS[0]


@pytest.mark.parametrize(
    ("total", "available", "engine", "refused"),
    [
        (80 * GIB, 100 * GIB, 0, False),
        (91 * GIB, 100 * GIB, 0, True),
        (80 * GIB, 100 * GIB, 20 * GIB, True),
        (8 * GIB, 12 * GIB, 0, False),
        (9 * GIB, 12 * GIB, 0, True),
    ],
)
def test_it_goes_into_what_is_available_but_for_a_reserve(total, available, engine, refused):
    assert (refusal(total, Room(available), engine) is not None) == refused


def test_why_not_is_told_with_all_figures():
    text = refusal(600 * 10**9, Room(800 * 10**9, 100 * 10**9))
    assert "take 600.0 GB, and this container's memory limit has 100.0 GB available, of which 10.0 GB stay free" in text
    assert reserve(100 * 10**9, 7) == 10**10 + 7


def test_too_little_memory_reads_nothing(tmp_path):
    file = write(tmp_path / "model.safetensors", 20)
    before = cached_pages(file)
    result = run([tmp_path], threading.Event(), lambda *_: None, there=Room(GIB))
    assert result.state == Verdict.SKIPPED
    assert cached_pages(file) == before


def test_nothing_to_read_is_no_failure(tmp_path):
    assert warmed(tmp_path)[0].state == Verdict.DONE


def test_a_directory_that_is_not_there(tmp_path):
    result, _ = warmed(tmp_path / "gone")
    assert (result.state, result.text) == (Verdict.FAILED, f"{tmp_path / 'gone'}: No such file or directory")


def test_a_disk_that_fails_is_told(tmp_path, monkeypatch):
    write(tmp_path / "model.safetensors", 20)

    def fails(_descriptor, _count, _offset):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "pread", fails)
    monkeypatch.setattr(warm, "_cached", lambda _path: 0)
    assert warmed(tmp_path)[0].text == "Input/output error"


def test_it_stops_when_told_though_the_disk_does_not_answer(tmp_path, monkeypatch):
    write(tmp_path / "model.safetensors", 40)
    stuck, stop = threading.Event(), threading.Event()
    monkeypatch.setattr(os, "pread", lambda *_: stuck.wait())
    monkeypatch.setattr(warm, "_STOPS_WITHIN", 0.1)
    monkeypatch.setattr(warm, "_cached", lambda _path: 0)
    threading.Timer(0.2, stop.set).start()
    began = time.monotonic()
    result = run([tmp_path], stop, lambda *_: None, there=PLENTY)
    stuck.set()
    assert result.state == Verdict.STOPPED
    assert time.monotonic() - began < 10


def command(*words, **more):
    return subprocess.Popen(
        [sys.executable, "-m", "aerie.cli", "model", "warm", *map(str, words)],
        env=os.environ | {"PYTHONPATH": str(SOURCE)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **more,
    )


def test_the_command(tmp_path):
    write(tmp_path / "a/model.safetensors")
    write(tmp_path / "b/model.safetensors")
    done = command("--json", tmp_path / "a", tmp_path / "b")
    said, _ = done.communicate(timeout=60)
    assert done.returncode == 0
    assert json.loads(said)["total_bytes"] == 2 * (3 * MIB + 123)
    failed = command(tmp_path / "c")
    said = failed.communicate(timeout=60)
    assert (failed.returncode, *said) == (1, "", f"aerie model warm: {tmp_path / 'c'}: No such file or directory\n")


def test_of_a_model_in_the_models_directory_the_current_revision_is_read(tmp_path):
    write(tmp_path / "Kimi/revision/model.safetensors")
    (tmp_path / "Kimi/current").symlink_to("revision")
    done = command("--json", tmp_path / "Kimi")
    said, _ = done.communicate(timeout=60)
    assert done.returncode == 0
    assert json.loads(said)["total_bytes"] == 3 * MIB + 123


@pytest.mark.parametrize(
    ("given", "says"), [("empty", "empty has no *.safetensors"), (".", "is no model, but has models in it")]
)
def test_a_directory_without_weights_is_told(tmp_path, given, says):
    (tmp_path / "empty").mkdir()
    write(tmp_path / "Kimi/current/model.safetensors")
    done = command(tmp_path / "Kimi", tmp_path / given)
    said, told = done.communicate(timeout=60)
    assert (done.returncode, said) == (1, "")
    assert told.startswith("aerie model warm: ")
    assert says in told


def test_a_child_of_the_supervisor_says_how_it_goes(tmp_path):
    write(tmp_path / "model.safetensors")
    child = subprocess.run(
        [sys.executable, "-P", "-m", "aerie.cache.warm", "0", str(tmp_path)],
        env=os.environ | {"PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    last = json.loads(child.stdout.splitlines()[-1])
    assert (last["state"], last["total_bytes"]) == ("done", 3 * MIB + 123)


def test_a_stop_ends_the_command(tmp_path):
    # 4 GB that take no space: reading them takes a while, and a signal ends it.
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(4 * 10**9)
    running = command(tmp_path)
    time.sleep(0.5)
    running.send_signal(signal.SIGTERM)
    said, told = running.communicate(timeout=60)
    assert running.returncode in {143, 0, -15}
    assert said.startswith("4.0 GB") or "aerie model warm: stopped" in told or running.returncode == -15
