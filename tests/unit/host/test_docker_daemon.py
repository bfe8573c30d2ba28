"""The module docker_daemon: what it writes, and what it leaves to the site when its owner goes."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import aerie_host
import pytest
from aerie_host import daemon, undo, undo_host

MODULE = Path(__file__).parents[3] / "ansible/plugins/modules/docker_daemon.py"


class FailedError(Exception):
    """What the module fails with."""


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """The module, with its files below tmp_path, on a host without dockerd."""
    monkeypatch.setitem(sys.modules, "ansible.module_utils.aerie_host", aerie_host)
    specification = importlib.util.spec_from_file_location("docker_daemon", MODULE)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    for name in ("daemon", "merged", "undo", "undo_host"):
        whole = f"aerie_host.{name}"
        importlib.import_module(whole)
        monkeypatch.setitem(sys.modules, f"ansible.module_utils.{whole}", sys.modules[whole])
    specification.loader.exec_module(module)
    record: undo.Record = {}
    monkeypatch.setattr(undo_host, "load", lambda: record)
    monkeypatch.setattr(undo_host, "save", lambda _: None)
    monkeypatch.setattr(undo_host, "run", lambda *_: undo_host.Done(0, "", ""))
    monkeypatch.setattr(module, "FILE", tmp_path / "docker/daemon.json")
    monkeypatch.setattr(module, "STARTED_WITH", tmp_path / "started.json")
    monkeypatch.setattr(module, "running_daemon", lambda: "")
    monkeypatch.setattr(daemon, "DATA_ROOT", str(tmp_path / "docker-data"))
    return module


def run(module: ModuleType, *, leave: bool = False, **config: Any) -> dict[str, Any]:
    """Run it as role docker does."""

    def fail(msg: str) -> None:
        raise FailedError(msg)

    parameters = {"owner": "docker", "config": config, "defaults": {}, "leave": leave}
    result: dict[str, Any] = module.run(SimpleNamespace(params=parameters, check_mode=False, fail_json=fail))
    return result


def content(module: ModuleType) -> dict[str, Any]:
    """What the file holds."""
    return dict(json.loads(module.FILE.read_text()))


def test_a_data_root_with_data_in_it_is_left_to_the_site(module: ModuleType, tmp_path: Path) -> None:
    root = {"data-root": str(tmp_path / "data")}
    run(module, **root, mtu=1400)
    (tmp_path / "data/volumes/models").mkdir(parents=True)
    with pytest.raises(FailedError, match=r"has volumes; with data-root .*docker-data they would be out of sight"):
        run(module)
    assert content(module) == {**root, "mtu": 1400}
    left = run(module, leave=True)
    assert (content(module), left["kept"]) == (root, ["data-root"])
    # It is theirs now: nothing of the role's is left to take out.
    again = run(module, leave=True)
    assert (again["changed"], again["kept"]) == (False, [])


def test_without_data_nothing_is_left(module: ModuleType, tmp_path: Path) -> None:
    run(module, **{"data-root": str(tmp_path / "data")})
    assert run(module, leave=True)["kept"] == []
    assert not module.FILE.exists()


def test_a_link_stays_one(module: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "site.json").write_text('{"debug": true}')
    module.FILE.parent.mkdir()
    module.FILE.symlink_to(tmp_path / "site.json")
    run(module, mtu=1400)
    assert module.FILE.is_symlink()
    assert content(module) == {"debug": True, "mtu": 1400}
