"""What was there before a role's first change comes back, and what others changed since stays."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from aerie_host import undo, undo_host
from aerie_host.merged import Share, merge
from aerie_host.undo import Entry, Installed, UndoError
from aerie_host.undo_host import Done


class Machine:
    """Stands for dpkg, apt and systemctl: takes the commands, keeps what they would change."""

    def __init__(self) -> None:
        self.enabled: dict[str, str] = {}
        self.active: dict[str, str] = {}
        self.held: set[str] = set()
        self.packages: dict[str, str] = {"base": "ii"}
        self.needs: dict[str, str] = {}
        self.taken_along: list[str] = []
        self.done: list[str] = []

    def __call__(self, *argv: str, stdin: str = "") -> Done:
        command, *arguments = argv
        return Done(0, getattr(self, command.replace("-", "_"))(*arguments, stdin), "")

    def systemctl(self, verb: str, *rest: str) -> str:
        name, *_ = rest
        if verb.startswith("is-"):
            return self.enabled.get(name, "") if verb == "is-enabled" else self.active.get(name, "inactive")
        self.done.append(f"{verb} {name}".strip())
        if verb in ("start", "stop"):
            self.active[name] = "active" if verb == "start" else "inactive"
        if verb in ("enable", "disable"):
            self.enabled[name] = f"{verb}d"
        return ""

    def dpkg_query(self, _show: str, _showformat: str, form: str, name: str, *_: str) -> str:
        if "Want" in form:
            return "hold" if name in self.held else "install"
        if "Depends" in form:
            return "\n".join(f"{s}\t{n}\t{n}\t\t\t{self.needs.get(n, '')}" for n, s in self.packages.items())
        return "".join(f"{status} {name}\n" for name, status in self.packages.items())

    def apt_get(self, *arguments: str) -> str:
        *options, how, name, _stdin = arguments
        if "--simulate" in options:
            act = "Purg" if how == "purge" else "Remv"
            return "".join(f"{act} {one} [1]\n" for one in [name, *self.taken_along])
        self.done.append(f"{how} {name}")
        del self.packages[name]
        return ""

    def dpkg(self, _set_selections: str, stdin: str) -> str:
        name, selection = stdin.split()
        (self.held.add if selection == "hold" else self.held.discard)(name)
        self.done.append(stdin.strip())
        return ""


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine()
    monkeypatch.setattr(undo_host, "run", machine)
    return machine


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "aerie/undo.json"


def again(record: undo.Record, state: Path) -> undo.Record:
    """The record as the next run reads it."""
    undo_host.save(record, state)
    return undo_host.load(state)


def test_first_record_wins_and_a_file_comes_back_as_it_was(tmp_path: Path, state: Path, machine: Machine) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"of the site\xff")
    file.chmod(0o640)
    record = {"role": Entry()}
    assert undo_host.record_first(record["role"], "files", [str(file)]) == [str(file)]
    file.unlink()
    file.write_text("of the role")
    undo_host.record_written(record["role"])
    record = again(record, state)
    assert undo_host.record_first(record["role"], "files", [str(file)]) == []
    assert state.stat().st_mode & 0o777 == 0o600

    outcome = undo_host.restore(record, "role", check=False, state=state)
    assert file.read_bytes() == b"of the site\xff"
    assert file.stat().st_mode & 0o777 == 0o640
    assert (outcome.did, outcome.kept) == ([f"{file}: a file, as before"], [])
    assert not state.parent.exists()


def test_check_changes_nothing_and_tells_the_same(tmp_path: Path, state: Path, machine: Machine) -> None:
    file = tmp_path / "file"
    record = {"role": Entry()}
    undo_host.record_first(record["role"], "files", [str(file)])
    file.write_text("of the role")
    record = again(record, state)
    kept = state.read_text()
    outcome = undo_host.restore(record, "role", check=True, state=state)
    assert (file.exists(), state.read_text(), machine.done) == (True, kept, [])
    assert undo_host.restore(record, "role", check=False, state=state).did == outcome.did
    assert not file.exists()


def test_undo_twice_is_undo_once(tmp_path: Path, state: Path, machine: Machine) -> None:
    record = {"role": Entry()}
    undo_host.record_first(record["role"], "files", [str(tmp_path / "file")])
    (tmp_path / "file").write_text("of the role")
    undo_host.restore(again(record, state), "role", check=False, state=state)
    outcome = undo_host.restore(undo_host.load(state), "role", check=False, state=state)
    assert (outcome.did, outcome.kept) == ([], [])


def test_what_somebody_else_changed_since_is_kept_told_and_stays_recorded(
    tmp_path: Path, state: Path, machine: Machine
) -> None:
    file = tmp_path / "file"
    file.write_text("before")
    record = {"role": Entry()}
    undo_host.record_first(record["role"], "files", [str(file)])
    file.write_text("of the role")
    undo_host.record_written(record["role"])
    file.write_text("of an operator")
    for _ in range(2):
        outcome = undo_host.restore(again(record, state), "role", check=False, state=state)
        assert file.read_text() == "of an operator"
        assert (outcome.did, outcome.kept) == ([], [f"{file}: kept, somebody changed it since: a file"])
    assert undo_host.load(state)["role"].things["files"][str(file)].before["text"] == "before"


def test_a_role_that_ended_early_is_undone_all_the_same(tmp_path: Path, state: Path, machine: Machine) -> None:
    file = tmp_path / "file"
    record = {"role": Entry()}
    undo_host.record_first(record["role"], "files", [str(file)])
    file.write_text("of the role, which then failed")
    undo_host.restore(again(record, state), "role", check=False, state=state)
    assert not file.exists()


def test_a_link_and_a_mode_come_back(tmp_path: Path, state: Path, machine: Machine) -> None:
    link, file = tmp_path / "link", tmp_path / "file"
    link.symlink_to("there")
    file.write_text("same")
    file.chmod(0o600)
    record = {"role": Entry()}
    undo_host.record_first(record["role"], "files", [str(link), str(file)])
    link.unlink()
    link.write_text("of the role")
    file.chmod(0o644)
    undo_host.restore(again(record, state), "role", check=False, state=state)
    assert link.readlink() == Path("there")
    assert file.stat().st_mode & 0o777 == 0o600


def test_directories_that_came_with_a_file_go_if_they_are_empty(tmp_path: Path, state: Path, machine: Machine) -> None:
    record = {"role": Entry()}
    files = [tmp_path / "a/b/file", tmp_path / "c/file"]
    undo_host.record_first(record["role"], "files", map(str, [*files, tmp_path / "d"]))
    (tmp_path / "d").mkdir()
    for file in files:
        file.parent.mkdir(parents=True)
        file.write_text("of the role")
    (tmp_path / "c/other").write_text("of somebody else")
    check = undo_host.restore(again(record, state), "role", check=True, state=state)
    outcome = undo_host.restore(again(record, state), "role", check=False, state=state)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c"]
    assert check.did == outcome.did
    assert (tmp_path / "c/other").exists()
    assert outcome.kept == [f"{tmp_path}/c: kept, directory not empty"]


def test_a_large_file_and_a_device_are_refused(tmp_path: Path) -> None:
    with (tmp_path / "large").open("wb") as file:
        file.truncate(undo.LARGEST_FILE + 1)
    os.mkfifo(tmp_path / "pipe")
    for name in ("large", "pipe"):
        with pytest.raises(UndoError, match="no regular file of at most 1048576 bytes"):
            undo_host.record_first(Entry(), "files", [str(tmp_path / name)])


def test_values_come_back(tmp_path: Path, state: Path, machine: Machine) -> None:
    value = tmp_path / "numa_balancing"
    value.write_text("1\n")
    record = {"role": Entry()}
    undo_host.record_first(record["role"], "values", [str(value), str(tmp_path / "none")])
    value.write_text("0\n")
    undo_host.record_written(record["role"])
    outcome = undo_host.restore(again(record, state), "role", check=False, state=state)
    assert value.read_text() == "1\n"
    assert outcome.did == [f"{value}: 1, as before"]


def test_only_what_is_named_comes_back_and_the_rest_stays_recorded(
    tmp_path: Path, state: Path, machine: Machine
) -> None:
    one, other, file = tmp_path / "numa_balancing", tmp_path / "governor", tmp_path / "made/file"
    one.write_text("1\n")
    other.write_text("schedutil\n")
    record = {"role": Entry()}
    entry = record["role"]
    undo_host.record_first(entry, "values", [str(one), str(other)])
    undo_host.record_first(entry, "files", [str(file)])
    undo.note_start(entry, undo_host.packages())
    machine.packages["new"] = "ii"
    undo.note_installed(entry, undo_host.packages())
    file.parent.mkdir()
    for path in (one, other, file):
        path.write_text("of the role\n")
    undo_host.record_written(entry)
    record = again(record, state)
    only = [str(one), str(tmp_path / "never recorded")]
    assert undo_host.restore(record, "role", check=True, only=only, state=state).did == [f"{one}: 1, as before"]
    outcome = undo_host.restore(record, "role", check=False, only=only, state=state)
    assert (outcome.did, outcome.kept) == ([f"{one}: 1, as before"], [])
    assert (one.read_text(), other.read_text(), file.exists()) == ("1\n", "of the role\n", True)

    # The role may set it again, and what is there by then is what comes back.
    record = undo_host.load(state)
    assert undo_host.record_first(record["role"], "values", [str(one), str(other)]) == [str(one)]
    undo_host.restore(again(record, state), "role", check=False, state=state)
    assert (other.read_text(), file.parent.exists(), machine.packages.get("new")) == ("schedutil\n", False, None)


def test_what_somebody_changed_since_is_theirs_where_the_role_goes_on_without_it(
    tmp_path: Path, state: Path, machine: Machine
) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    record = {"role": Entry()}
    for path in (one, other):
        path.write_text("before")
    undo_host.record_first(record["role"], "values", [str(one), str(other)])
    for path in (one, other):
        path.write_text("of the role")
    undo_host.record_written(record["role"])
    one.write_text("of an operator")
    outcome = undo_host.restore(again(record, state), "role", check=False, only=[str(one)], state=state)
    assert outcome.kept == [f"{one}: kept, somebody changed it since: of an operator"]
    # A role's next run records all that it may change, before and after.
    for _ in range(2):
        record = undo_host.load(state)
        assert record["role"].things["values"].keys() - {str(one)} == {str(other)}
        undo_host.record_first(record["role"], "values", [str(one), str(other)])
        outcome = undo_host.restore(record, "role", check=False, only=[str(one)], state=state)
        assert (outcome.did, outcome.kept, one.read_text()) == ([], [], "of an operator")
        undo_host.record_written(record["role"])
        undo_host.save(record, state)
    undo_host.restore(undo_host.load(state), "role", check=False, state=state)
    assert (one.read_text(), other.read_text()) == ("of an operator", "before")


def test_only_nothing_is_nothing(tmp_path: Path, state: Path, machine: Machine) -> None:
    one = tmp_path / "one"
    one.write_text("before")
    record = {"role": Entry()}
    undo_host.record_first(record["role"], "values", [str(one)])
    one.write_text("of the role")
    outcome = undo_host.restore(again(record, state), "role", check=False, only=[], state=state)
    assert (outcome.did, one.read_text()) == ([], "of the role")


def test_units_and_holds_come_back_around_the_packages(state: Path, machine: Machine) -> None:
    machine.enabled = {"old.service": "enabled"}
    machine.active = {"old.service": "active"}
    record = {"role": Entry()}
    entry = record["role"]
    undo_host.record_first(entry, "units", ["old.service", "new.service"])
    undo_host.record_first(entry, "holds", ["new"])
    undo.note_start(entry, undo_host.packages())
    machine.packages["new"] = "ii"
    assert undo.note_installed(entry, undo_host.packages()) == ["new"]
    machine.held.add("new")
    machine.enabled |= {"old.service": "disabled", "new.service": "enabled"}
    machine.active |= {"old.service": "inactive", "new.service": "failed"}
    undo_host.record_written(entry)
    undo_host.restore(again(record, state), "role", check=False, state=state)
    assert machine.done == [
        "stop new.service",
        "reset-failed new.service",
        "disable new.service",
        "new install",
        "purge new",
        "daemon-reload",
        "enable old.service",
        "start old.service",
    ]


def test_a_unit_that_somebody_masked_and_a_hold_that_somebody_released_stay(state: Path, machine: Machine) -> None:
    machine.enabled = {"a.service": "disabled"}
    record = {"role": Entry()}
    undo_host.record_first(record["role"], "units", ["a.service"])
    undo_host.record_first(record["role"], "holds", ["package"])
    machine.enabled["a.service"] = "enabled"
    machine.held.add("package")
    undo_host.record_written(record["role"])
    machine.enabled["a.service"] = "masked"
    machine.held.clear()
    outcome = undo_host.restore(again(record, state), "role", check=False, state=state)
    assert outcome.kept == ["a.service: kept, somebody changed it since: masked and inactive"]
    assert machine.done == []


def test_exactly_the_packages_that_came_go(state: Path, machine: Machine) -> None:
    machine.packages |= {"leftover": "rc"}
    record = {"role": Entry()}
    packages = record["role"].packages
    undo.note_start(record["role"], undo_host.packages())
    machine.packages |= {"new": "ii", "leftover": "ii"}
    undo.note_installed(record["role"], undo_host.packages())
    # Between two runs somebody installs another one, which is not the role's.
    machine.packages["foreign"] = "ii"
    undo.note_start(record["role"], undo_host.packages())
    undo.note_installed(record["role"], undo_host.packages())
    assert packages.came == {"new": "purge", "leftover": "remove"}
    undo_host.restore(again(record, state), "role", check=False, state=state)
    assert machine.done == ["remove leftover", "purge new", "daemon-reload"]
    assert sorted(machine.packages) == ["base", "foreign"]


def test_a_package_that_others_need_stays(state: Path, machine: Machine) -> None:
    record = {"role": Entry()}
    record["role"].packages.came = {"library": "purge", "tool": "purge"}
    machine.packages |= {"library": "ii", "tool": "ii", "foreign": "ii"}
    machine.needs = {"foreign": "library (>= 2) | other", "tool": "library"}
    outcome = undo_host.restore(again(record, state), "role", check=False, state=state)
    assert outcome.kept == ["package library: kept, foreign needs it"]
    assert sorted(machine.packages) == ["base", "foreign", "library"]
    assert undo_host.load(state)["role"].packages.came == {"library": "purge"}


def test_packages_stay_where_the_caller_has_a_reason(state: Path, machine: Machine) -> None:
    record = {"role": Entry()}
    record["role"].packages.came = {"new": "purge"}
    machine.packages["new"] = "ii"
    outcome = undo_host.restore(again(record, state), "role", check=False, keep_packages="in use", state=state)
    assert (outcome.did, outcome.kept) == ([], ["package new: kept, in use"])


def test_nothing_is_removed_where_apt_would_take_others_along(state: Path, machine: Machine) -> None:
    record = {"role": Entry()}
    record["role"].packages.came = {"new": "purge"}
    machine.packages["new"] = "ii"
    machine.taken_along = ["base"]
    with pytest.raises(UndoError, match=r"but also: Purg base\. Nothing was removed"):
        undo_host.restore(again(record, state), "role", check=False, state=state)
    assert "new" in machine.packages
    assert undo_host.load(state)["role"].packages.came == {"new": "purge"}


def test_packages_of_a_run_that_was_cut_short_are_told(state: Path, machine: Machine) -> None:
    record = {"role": Entry()}
    undo.note_start(record["role"], undo_host.packages())
    machine.packages["new"] = "ii"
    outcome = undo_host.restore(again(record, state), "role", check=True, state=state)
    assert outcome.kept == [
        "package new: kept, it came since a run of the role that was cut short, perhaps not by the role"
    ]


def test_needed_by_others_follows_what_is_kept() -> None:
    def package(name: str, *needs: str, provides: str = "") -> Installed:
        return Installed(name, frozenset({name, provides} - {""}), tuple(frozenset(n.split("|")) for n in needs))

    installed = [
        package("foreign", "engine"),
        package("content", "runtime|engine"),
        package("docker", "runtime", provides="engine"),
        package("runtime"),
        package("plugin", "docker"),
    ]
    needed = undo.needed_by_others(installed, ["docker", "runtime", "plugin"])
    assert set(needed) == {"docker", "runtime"}
    assert needed["docker"] in {"foreign", "content"}


def test_dependencies_are_read_without_versions_and_architectures() -> None:
    assert undo.dependencies("libc6 (>= 2.34), python3:any | python [amd64], ") == (
        frozenset({"libc6"}),
        frozenset({"python3", "python"}),
    )


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "is not a record that the module undo wrote"),
        ("[]", "is not a record that the module undo wrote"),
        ('{"schema": 2, "roles": {}}', "has schema 2, written by a later version .*this one knows 1"),
        ('{"schema": 1, "roles": {"docker": {"files": {"/etc/x": {}}}}}', "is damaged .KeyError: 'before'"),
        ('{"schema": 1, "roles": []}', "is damaged"),
        ('{"schema": "1", "roles": {}}', "is not a record that the module undo wrote .schema '1'."),
        ('{"schema": 1, "roles": {"docker": {"files": {"/etc/x": {"before": "x"}}}}}', "is damaged .*/etc/x: 'x'"),
        ('{"schema": 1, "roles": {"docker": {"files": {"/x": {"before": {"kind": "file"}}}}}}', "is damaged .*/x: "),
        ('{"schema": 1, "roles": {"docker": {"units": {"a": {"before": {"enabled": "x"}}}}}}', "is damaged .*a: "),
        ('{"schema": 1, "roles": {"docker": {"packages": {"came": ["a"]}}}}', "is damaged .*came"),
        ('{"schema": 1, "roles": {"docker": {"directories": "/etc"}}}', "is damaged .*directories"),
        ('{"schema": 1, "roles": {"docker": {"shares": {"/etc/d": {"settings": []}}}}}', "is damaged .KeyError"),
    ],
)
def test_a_damaged_or_newer_record_is_refused(state: Path, text: str, says: str) -> None:
    state.parent.mkdir()
    state.write_text(text)
    with pytest.raises(UndoError, match=rf"{state} {says}.*undo\.yml restores from it"):
        undo_host.load(state)


def test_a_second_play_waits_for_the_record_and_says_so_where_it_does_not_get_it(tmp_path: Path) -> None:
    lock = tmp_path / "undo.lock"
    with (
        undo_host.locked(lock),
        pytest.raises(UndoError, match=r"Another play .* process [0-9]+.* for 0 s.*run this again"),
        undo_host.locked(lock, seconds=0),
    ):
        pass
    with undo_host.locked(lock, seconds=0):
        pass


def test_the_record_is_readable(state: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("größe = 1\n")
    record = {"role": Entry(), "untouched": Entry()}
    undo_host.record_first(record["role"], "files", [str(tmp_path / "file")])
    undo_host.save(record, state)
    kept = json.loads(state.read_text())
    assert (kept["schema"], list(kept["roles"])) == (1, ["role"])
    assert "größe = 1" in state.read_text()


def test_a_role_goes_out_of_a_json_file_which_is_written_as_it_was(
    tmp_path: Path, state: Path, machine: Machine
) -> None:
    file = tmp_path / "daemon.json"
    text = '{"mtu":1400,\n   "debug": true}'
    file.write_text(text)
    record = {"role": Entry()}
    share = Share(created=False, text=text)
    done = merge(json.loads(text), share, {"live-restore": True})
    record["role"].shares[str(file)] = done.share
    file.write_text(undo_host.to_text(done.content, text))
    assert "live-restore" in file.read_text()
    outcome = undo_host.restore(again(record, state), "role", check=False, state=state)
    assert (file.read_text(), outcome.did) == (text, [f"{file}: without the settings of the role"])


def test_a_json_file_goes_before_the_packages_whose_directory_it_is_in(
    tmp_path: Path, state: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "daemon.json"
    record = {"role": Entry()}
    done = merge(None, None, {"live-restore": True})
    record["role"].shares[str(file)] = done.share
    record["role"].packages.came = {"engine": "purge"}
    file.write_text(undo_host.to_text(done.content, ""))
    machine.packages["engine"] = "ii"
    there: list[bool] = []
    apt_get = machine.apt_get
    monkeypatch.setattr(machine, "apt_get", lambda *given: (there.append(file.exists()), apt_get(*given))[1])
    undo_host.restore(again(record, state), "role", check=False, state=state)
    assert there == [False, False]


def test_a_json_file_of_the_roles_own_goes_and_one_that_is_broken_is_told(
    tmp_path: Path, state: Path, machine: Machine
) -> None:
    file = tmp_path / "daemon.json"
    record = {"role": Entry()}
    done = merge(None, None, {"live-restore": True})
    record["role"].shares[str(file)] = done.share
    file.write_text("{")
    with pytest.raises(UndoError, match=f"{file} is not JSON: .*line 1 column 2"):
        undo_host.restore(again(record, state), "role", check=False, state=state)
    file.write_text(undo_host.to_text(done.content, ""))
    undo_host.restore(again(record, state), "role", check=False, state=state)
    assert not file.exists()
