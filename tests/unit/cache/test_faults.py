"""What a store's commands say on a file system that cannot be written to, and beside one another."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from cache_store import CONTENT, FIRST, SECOND, THIRD, publish, write_files

import aerie
from aerie import cli
from aerie.cache.inspection import SERVICE
from aerie.cache.layout import Store
from aerie.cache.users import hold


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
    assert cli.main(["model", "verify", "--all", "--repair", "--models-dir", str(read_only)]) == 0
    assert cli.main(["model", "list", "--models-dir", str(read_only)]) == 0
    capsys.readouterr()
    assert cli.main(["model", "prune", "--dry-run", "--adopted", "--models-dir", str(read_only)]) == 0
    assert f"{FIRST} would be removed" in capsys.readouterr().out


def test_a_repair_on_a_read_only_file_system_shows_what_is_damaged(read_only, capsys):
    subprocess.run(["mount", "-o", "remount,rw", read_only], check=True)
    (read_only / "Model" / THIRD / "config.json").unlink()
    subprocess.run(["mount", "-o", "remount,ro", read_only], check=True)
    assert cli.main(["model", "verify", "--all", "--repair", "--models-dir", str(read_only)]) == 1
    shown = capsys.readouterr().out
    assert f"Model@{FIRST}: whole" in shown
    assert "  config.json  missing  54 bytes\n  not repaired: " in shown
    assert "lock cannot be opened: Read-only file system" in shown


@pytest.fixture
def open_store():
    """A store that every user may come to."""
    root = Path(tempfile.mkdtemp())
    try:
        root.chmod(0o755)
        yield Store(root)
    finally:
        shutil.rmtree(root)


@pytest.fixture
def run_as_service(open_store, capsys):
    """Run a command as the service's user and return its exit code, its output and its messages."""
    if os.geteuid() != 0:
        pytest.skip("becomes another user")

    def run(*arguments):
        given = ["model", *arguments, "--models-dir", str(open_store.root)]
        cli.main(given)  # as root, who may read the modules
        capsys.readouterr()
        groups = os.getgroups()
        os.setgroups([])
        os.setegid(SERVICE)
        os.seteuid(SERVICE)
        try:
            code = cli.main(given)
        finally:
            os.seteuid(0)
            os.setegid(0)
            os.setgroups(groups)
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def shared_model(open_store):
    """A model of three revisions that is being fetched further."""
    model = open_store.model("Model")
    for revision in (FIRST, SECOND, THIRD):
        publish(model, CONTENT, revision)
    with model.lock("test"):
        write_files(model.staging("4" * 40) / "files", {"shard": bytes(8192)})
    return model


def test_a_user_who_may_not_write_sees_what_is_published(open_store, shared_model, run_as_service):
    (open_store.root / "closed").mkdir(mode=0o700)
    code, out, err = run_as_service("list")
    assert code == 0
    assert [line.split()[1] for line in out.splitlines()] == [THIRD, SECOND, FIRST]
    assert "what is half fetched of Model is not shown: only root may look" in err
    assert f"{open_store.root / 'closed'} is left out: it cannot be looked into: Permission denied" in err
    code, out, _ = run_as_service("list", "--json")
    told = json.loads(out)
    (listed,) = told["models"]
    assert (code, listed["staging"], [each["path"] for each in told["left_out"]]) == (
        0, None, [str(open_store.root / "closed")],
    )  # fmt: skip
    assert {each["in_use"] for each in listed["revisions"]} == {None}
    with hold(shared_model.path / THIRD):
        (listed,) = json.loads(run_as_service("list", "--json")[1])["models"]
    assert [each["in_use"] for each in listed["revisions"]] == [True, None, None]


def test_a_user_who_may_not_write_sees_what_a_prune_would_remove(shared_model, run_as_service):
    code, out, err = run_as_service("prune", "--adopted", "--dry-run")
    assert code == 0
    assert f"{FIRST} would be removed" in out
    assert "of Model, only root sees what is half fetched and which files are open" in err
    with shared_model.lock("aerie model fetch"):  # who has it cannot be told, as root may
        assert run_as_service("prune", "--adopted", "--dry-run")[0] == 0
        assert cli.main(["model", "prune", "--dry-run", "--models-dir", str(shared_model.root)]) == 1
    assert len(shared_model.revisions()) == 3


def test_a_user_who_may_not_write_verifies_and_hears_that_nothing_is_repaired(shared_model, run_as_service):
    assert run_as_service("verify", "--repair")[0] == 0
    (shared_model.path / THIRD / "config.json").unlink()
    shutil.rmtree(shared_model.path / SECOND)  # nor has another revision the file
    (shared_model.path / FIRST / "config.json").unlink()
    code, out, _ = run_as_service("verify", "--repair")
    assert code == 1
    assert "config.json  missing" in out
    assert "not repaired: " in out


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
