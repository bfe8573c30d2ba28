"""What a store's commands say on a file system that cannot be written to, and beside one another."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from cache_store import CONTENT, FIRST, SECOND, THIRD, publish, write_files

import aerie
from aerie import cli
from aerie.cache.layout import Store


@pytest.fixture
def read_only(tmp_path):
    """A store of two revisions on a file system that is mounted read-only by now."""
    root = tmp_path / "read-only"
    root.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", root], capture_output=True, text=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    try:
        model = Store(root).model("Model")
        for revision in (FIRST, SECOND, THIRD):
            publish(model, CONTENT, revision)
        write_files(root / "Old", CONTENT)
        subprocess.run(["mount", "-o", "remount,ro", root], check=True)
        yield root
    finally:
        subprocess.run(["umount", "--lazy", root], check=True)


@pytest.mark.parametrize(
    "arguments",
    [
        ["verify", "--repair"],
        ["rollback", "Model"],
        ["prune", "--keep", "0"],
        ["adopt", "Old"],
        ["adopt", "Old", "--copy"],
    ],
    ids=" ".join,
)
def test_what_writes_says_that_the_file_system_is_read_only(read_only, arguments, capsys, monkeypatch):
    monkeypatch.chdir(read_only)
    assert cli.main(["model", *arguments, "--models-dir", str(read_only)]) == 1
    assert "Read-only file system" in capsys.readouterr().err
    assert len(Store(read_only).model("Model").revisions()) == 3


def test_what_only_reads_works_on_a_read_only_file_system(read_only, capsys):
    assert cli.main(["model", "verify", "--all", "--models-dir", str(read_only)]) == 0
    assert cli.main(["model", "list", "--models-dir", str(read_only)]) == 0
    assert cli.main(["model", "prune", "--dry-run", "--models-dir", str(read_only)]) in (0, 1)


def test_of_two_at_once_one_works_and_the_other_says_so(store, tmp_path):
    write_files(tmp_path / "Model", CONTENT | {f"shard{number}": os.urandom(2**21) for number in range(16)})
    files = sorted(path.name for path in (tmp_path / "Model").iterdir())
    command = [sys.executable, "-m", "aerie.cli", "model", "adopt", tmp_path / "Model", "--models-dir", store.root]
    environment = os.environ | {"PYTHONPATH": str(Path(aerie.__file__).parents[1])}
    both = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
        for _ in range(2)
    ]
    told = [each.communicate(timeout=60)[1] for each in both]
    codes = sorted(each.returncode for each in both)
    assert codes in ([0, 1], [0, 0]), told
    if codes == [0, 1]:
        assert any("is being worked on by `aerie model adopt`" in each or "is not there" in each for each in told), told
    (revision,) = store.model("Model").revisions()
    assert [name for name in files if not (store.root / "Model" / revision / name).exists()] == []
    assert cli.main(["model", "verify", "--models-dir", str(store.root)]) == 0


def test_a_full_disk_says_so_and_leaves_the_old_state(tmp_path, capsys):
    root = tmp_path / "small"
    root.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", root], capture_output=True, text=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    try:
        model = Store(root).model("Model")
        path = publish(model, CONTENT | {"shard": bytes(3 * 2**20)}, source=str(tmp_path / "source"))
        write_files(tmp_path / "source", CONTENT | {"shard": bytes(3 * 2**20)})
        (path / "shard").chmod(0o644)
        with (path / "shard").open("r+b") as file:
            file.write(b"1")
        assert cli.main(["model", "verify", "--repair", "--models-dir", str(root)]) == 1
        assert "make room (`aerie model prune`)" in capsys.readouterr().out
        assert (path / "shard").read_bytes()[:2] == b"1\0"
        assert not (model.own / "repair").exists()
    finally:
        subprocess.run(["umount", "--lazy", root], check=True)
        shutil.rmtree(root, ignore_errors=True)
