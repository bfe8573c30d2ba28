"""What daemon.json is to hold, what a change needs, and with which arguments dockerd starts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from aerie_host import daemon

if TYPE_CHECKING:
    from pathlib import Path

DEFAULTS = {"log-driver": "json-file", "log-opts": {"max-size": "50m"}, "live-restore": True}


def test_defaults_give_way_to_what_the_site_has() -> None:
    assert daemon.wanted({}, DEFAULTS, {"live-restore": False}) == {
        "log-driver": "json-file",
        "log-opts": {"max-size": "50m"},
    }


def test_configuration_counts_in_any_case() -> None:
    assert daemon.wanted({"mtu": 9000}, DEFAULTS, {"mtu": 1500}) == DEFAULTS | {"mtu": 9000}


def test_null_takes_a_default_out() -> None:
    assert daemon.wanted({"live-restore": None, "features": {"cdi": None}}, DEFAULTS, {}) == {
        "features": {},
        "log-driver": "json-file",
        "log-opts": {"max-size": "50m"},
    }


@pytest.mark.parametrize(("config", "site"), [({"log-driver": "journald"}, {}), ({}, {"log-driver": "journald"})])
def test_another_log_driver_does_not_get_the_options_of_this_one(config: dict[str, str], site: dict[str, str]) -> None:
    assert "log-opts" not in daemon.wanted(config, DEFAULTS, site)
    assert "log-opts" in daemon.wanted({}, DEFAULTS, {"log-driver": "json-file"})


def test_what_changed_and_what_of_it_needs_a_restart() -> None:
    before = {"mtu": 1, "debug": False, "labels": ["a"]}
    settings = daemon.changed(before, {"debug": True, "labels": ["a"], "live-restore": True, "features": {"cdi": True}})
    assert settings == ["debug", "features", "live-restore", "mtu"]
    assert daemon.need_restart(settings) == ["features", "mtu"]


def test_a_daemon_is_known_by_name_and_start() -> None:
    stat = "412 (dockerd) S 1 412 " + " ".join(str(field) for field in range(6, 30))
    assert daemon.start_of(stat) == "22"
    # After `kill -9` the number in docker.pid may become another program's, whatever that calls itself.
    assert daemon.start_of(stat.replace("(dockerd)", "(my (dockerd) too)")) == ""
    assert daemon.start_of("") == ""


def test_arguments_of_the_unit() -> None:
    shown = (
        "ExecStart={ path=/usr/sbin/dockerd ; argv[]=/usr/sbin/dockerd -H fd:// --data-root ${ROOT}/docker $DOCKER_OPTS"
        " $NONE"
        " ; ignore_errors=no ; start_time=[n/a] ; pid=0 ; code=(null) ; status=0/0 }\n"
        'Environment=ROOT=/srv "OTHER=a b"\n'
        "EnvironmentFiles=/etc/default/docker (ignore_errors=yes)\n"
        "EnvironmentFiles=/etc/default/none (ignore_errors=yes)\n"
    )
    files = {"/etc/default/docker": '# DOCKER_OPTS="--debug"\n\nDOCKER_OPTS="--mtu 1400 --dns 192.0.2.1"\n'}
    assert daemon.flags_of_unit(shown, lambda name: files.get(name, "")) == [
        "-H",
        "fd://",
        "--data-root",
        "/srv/docker",
        "--mtu",
        "1400",
        "--dns",
        "192.0.2.1",
    ]


def test_a_unit_that_is_not_there_has_no_arguments() -> None:
    assert daemon.flags_of_unit("Environment=\n", lambda _: "") == []


def data_root(path: Path, *files: str) -> dict[str, str]:
    """A file that names a data root with these files in it."""
    for file in files:
        (path / file).parent.mkdir(parents=True, exist_ok=True)
        (path / file).touch()
    return {"data-root": str(path)}


def test_data_is_not_left_behind_in_the_old_root(tmp_path: Path) -> None:
    image = "image/overlay2/imagedb/content/sha256/0"
    old = data_root(tmp_path / "old", "containers/0/config.v2.json", image, "volumes/metadata.db")
    new = data_root(tmp_path / "new", "volumes/metadata.db")
    told = daemon.left_behind(old, new)
    assert list(told) == ["data-root"]
    assert f"Docker's data root is {tmp_path}/old and has containers and images" in told["data-root"]
    assert daemon.left_behind(old, old) == {}
    # Nothing to lose, and what was copied over.
    assert daemon.left_behind(new, old) == {}
    data_root(tmp_path / "new", image)
    assert daemon.left_behind(old, new) == {}


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ({"storage-driver": "vfs"}, "with another storage-driver (unset, then vfs)"),
        ({"features": {"containerd-snapshotter": True}}, "with another containerd-snapshotter (unset, then true)"),
    ],
)
def test_data_is_not_left_behind_in_another_store(tmp_path: Path, setting: dict[str, Any], said: str) -> None:
    root = data_root(tmp_path, "containers/0/config.v2.json")
    told = daemon.left_behind(root, root | setting)
    assert list(told) == list(setting)
    assert f"{tmp_path} has containers, and {said} the daemon" in told[next(iter(setting))]
    assert daemon.left_behind(root, root | {"features": {"cdi": True}}) == {}
    empty = data_root(tmp_path / "empty")
    assert daemon.left_behind(empty, empty | setting) == {}


def test_a_volume_is_data(tmp_path: Path) -> None:
    old = data_root(tmp_path / "old", "volumes/models/_data/file")
    told = daemon.left_behind(old, {"data-root": str(tmp_path / "new")})
    assert "has volumes; with data-root" in told["data-root"]
