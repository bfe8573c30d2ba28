"""The machine as `undo` sees it: files, units, holds, values under /proc and /sys, packages; read, and put back."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import grp
import json
import os
import pwd
import stat
import subprocess
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import undo
from .undo import ABSENT, Entry, Installed, Record, Step, Thing, UndoError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

STATE = Path("/var/lib/aerie/undo.json")
LOCK = Path("/run/aerie-undo.lock")
"""Held while the record is read, changed and written. It outlives the record, so it is not beside it."""
LOCK_SECONDS = 300
"""That apt waits for somebody else's dpkg to end, and a play for another one's change of the record."""
UP = ("active", "activating", "reloading")
"""A unit's states in which something runs."""


@dataclass(frozen=True, slots=True)
class Done:
    """How a command ended."""

    rc: int
    out: str
    err: str


def run(*argv: str, stdin: str = "") -> Done:
    """Run a command in the C locale; 127 where it is not there."""
    environment = os.environ | {"LC_ALL": "C", "DEBIAN_FRONTEND": "noninteractive", "NEEDRESTART_MODE": "l"}
    try:
        done = subprocess.run(argv, input=stdin, capture_output=True, text=True, check=False, env=environment)
    except FileNotFoundError:
        return Done(127, "", f"{argv[0]} is not there")
    return Done(done.returncode, done.stdout, done.stderr)


@contextlib.contextmanager
def locked(path: Path = LOCK, seconds: float = LOCK_SECONDS) -> Iterator[None]:
    """Keep a second play on this host from the record; without that, one would write over what the other recorded."""
    with path.open("a+") as file:
        deadline = time.monotonic() + seconds
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    file.seek(0)
                    raise UndoError(
                        f"Another play on this host, in process {file.read().strip()}, has held {STATE} for "
                        f"{seconds:.0f} s: wait for its end, then run this again"
                    ) from None
                time.sleep(0.2)
            else:
                break
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


def load(path: Path = STATE) -> Record:
    """Read the record; an empty one where there is none. UndoError where it is damaged."""
    try:
        text = path.read_text()
    except FileNotFoundError:
        return {}
    except UnicodeDecodeError as error:
        raise UndoError(f"{path} is not text ({error}): bring it back from a backup, or move it away") from None
    return undo.parse(text, str(path))


def save(record: Record, path: Path = STATE) -> None:
    """Write the record, whole or not at all; one in which nothing is left goes, with its directory if that is empty."""
    if all(entry.is_empty() for entry in record.values()):
        path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            path.parent.rmdir()
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    write(path, undo.dump(record).encode(), 0o600)


def write(path: Path, content: bytes, mode: int, owner: int = -1, group: int = -1) -> None:
    """Replace a file in one step: whoever reads it finds the old or the new one."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fchmod(descriptor, mode)
            os.fchown(descriptor, owner, group)
            os.fsync(descriptor)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


# --- Looking ----------------------------------------------------------------------------------------------------------


def look(kind: str, name: str) -> Thing:
    """Return the present state of one thing."""
    return {"files": _file, "units": _unit, "holds": _hold, "values": _value}[kind](name)


def _file(name: str) -> Thing:
    path = Path(name)
    try:
        status = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return ABSENT
    thing: Thing = {
        "mode": f"{stat.S_IMODE(status.st_mode):04o}",
        "owner": _name(pwd.getpwuid, status.st_uid),
        "group": _name(grp.getgrgid, status.st_gid),
    }
    if stat.S_ISLNK(status.st_mode):
        return {"kind": "link", "target": str(path.readlink())}
    if stat.S_ISDIR(status.st_mode):
        return {"kind": "directory", **thing}
    if not stat.S_ISREG(status.st_mode) or status.st_size > undo.LARGEST_FILE:
        raise UndoError(
            f"{name} is no regular file of at most {undo.LARGEST_FILE} bytes, so what it was cannot be kept: `files` "
            "are the configuration that a role writes, a runtime value belongs into `values`"
        )
    content = path.read_bytes()
    try:
        return {"kind": "file", **thing, "text": content.decode()}
    except UnicodeDecodeError:
        return {"kind": "file", **thing, "base64": base64.b64encode(content).decode()}


def _name(database: Any, number: int) -> str:
    try:
        return str(database(number)[0])
    except KeyError:
        return str(number)


def _number(database: Any, name: str) -> int:
    return int(name) if name.isdecimal() else int(database(name)[2])


def _unit(name: str) -> Thing:
    # is-enabled prints nothing, or not-found, for a unit that is not there, by systemd's version.
    enabled = run("systemctl", "is-enabled", name).out.strip() or "not-found"
    return {"enabled": enabled, "active": run("systemctl", "is-active", name).out.strip() or "inactive"}


def _hold(name: str) -> Thing:
    return {"held": run("dpkg-query", "--show", "--showformat", "${db:Status-Want}", name).out.strip() == "hold"}


def _value(name: str) -> Thing:
    try:
        return {"text": Path(name).read_text()}
    except OSError as error:
        return {"text": "", "error": error.strerror or "cannot be read"}


def packages() -> dict[str, str]:
    """Return what dpkg knows: `installed` (also half so), or `configuration` that a removed package left."""
    done = run("dpkg-query", "--show", "--showformat", "${db:Status-Abbrev} ${binary:Package}\n")
    if done.rc:
        raise UndoError(f"dpkg-query does not say what is installed: {done.err.strip()}")
    lines = [line.split() for line in done.out.splitlines()]
    # Second letter: n is not installed, c is configuration only.
    return {name: "configuration" if status[1] == "c" else "installed" for status, name in lines if status[1] != "n"}


def _installed() -> list[Installed]:
    fields = ("db:Status-Abbrev", "binary:Package", "Package", "Provides", "Pre-Depends", "Depends")
    showformat = "\t".join(f"${{{name}}}" for name in fields) + "\n"
    found = []
    for line in run("dpkg-query", "--show", "--showformat", showformat).out.splitlines():
        status, name, short, provides, *needs = line.split("\t")
        if status[1] not in "nc":
            itself = frozenset({short}).union(*undo.dependencies(provides))
            found.append(Installed(name, itself, tuple(c for need in needs for c in undo.dependencies(need))))
    return found


# --- Recording --------------------------------------------------------------------------------------------------------


def record_first(entry: Entry, kind: str, names: Iterable[str]) -> list[str]:
    """Record things that are not recorded yet; return their names."""
    first = [name for name in names if name not in entry.things[kind]]
    for name in first:
        present = look(kind, name)
        undo.note_first(entry, kind, name, present)
        if kind == "files":
            note_directories(entry, Path(name))
    return first


def note_directories(entry: Entry, path: Path) -> None:
    """Record the directories above a file that are not there yet."""
    for directory in path.parents:
        if directory.exists():
            break
        if str(directory) not in entry.directories:
            entry.directories.append(str(directory))


def record_written(entry: Entry) -> None:
    """Record the present state of everything that is recorded as the role's work."""
    for kind in undo.KINDS:
        for name in entry.things[kind]:
            undo.note_written(entry, kind, name, look(kind, name))


# --- The way back -----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Outcome:
    """What was put back, and what was left alone and why, one line each."""

    did: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)


def restore(
    record: Record,
    role: str,
    *,
    check: bool,
    only: Sequence[str] | None = None,
    keep_packages: str = "",
    state: Path = STATE,
) -> Outcome:
    """Put back what is recorded for a role. What was put back leaves the record, what was kept stays in it.

    With `check` only say what would be done. `only` names the things that are put back while the role goes on without
    them: what is kept of those leaves the record, too, for the role would next record it as its own work.
    `keep_packages` is a reason to leave packages, units and holds alone.
    """
    outcome = Outcome()
    if role not in record:
        return outcome
    entry, rest = (record[role], Entry()) if only is None else undo.split(record[role], only)
    _know_directories(entry)
    steps = _steps(entry, keep_packages)
    todo = [step for step in steps if not step.kept]
    going, staying = _packages_to_go(entry, keep_packages)
    outcome.kept = [undo.say(step) for step in steps if step.kept]
    outcome.kept += [f"package {name}: kept, {why}" for name, why in staying.items()]
    outcome.did = [undo.say(step) for step in todo] + [f"package {name}: {how}d" for name, how in going.items()]
    shares = _shares_to_go(entry, outcome)
    if check:
        _directories_that_would_go(entry, todo, outcome)
        return outcome
    _act(entry, todo, going, shares)
    _remove_directories(entry, outcome)
    for step in steps:
        if step.kept and only is None:
            rest.things[step.kind][step.name] = entry.things[step.kind][step.name]
    rest.packages.came |= {name: how for name, how in entry.packages.came.items() if name in staying}
    record[role] = rest
    save(record, state)
    return outcome


def _know_directories(entry: Entry) -> None:
    """Take what is a directory now, and was not there before, for one: it goes only if it is empty."""
    for name, one in list(entry.things["files"].items()):
        if one.before == ABSENT and Path(name).is_dir() and not Path(name).is_symlink():
            del entry.things["files"][name]
            entry.directories.append(name)


def _steps(entry: Entry, keep_packages: str) -> list[Step]:
    present = {kind: {name: look(kind, name) for name in entry.things[kind]} for kind in undo.KINDS}
    steps = undo.way_back(entry, present)
    if not keep_packages:
        return steps
    return [replace(one, kept=keep_packages) if one.kind in ("units", "holds") else one for one in steps]


def _act(entry: Entry, todo: list[Step], going: dict[str, str], shares: dict[str, dict[str, Any] | None]) -> None:
    """Put back: what runs and what is held first, packages, what they read, and last what ran before."""
    for kinds in (("units", "holds"), ("files", "values")):
        for step in todo:
            if step.kind in kinds:
                _put(step)
        if "holds" in kinds:
            # Before the packages, which take their directories along only where those are empty.
            for path, content in shares.items():
                _write_json(Path(path), content, entry.shares[path].text)
            _remove(going)
    if todo or going:
        # Units may have come or gone. Not an error where no systemd is.
        run("systemctl", "daemon-reload")
    for step in todo:
        if step.kind == "units":
            _put_unit_up(step)


def _put(step: Step) -> None:
    {"units": _put_unit_down, "holds": _put_hold, "files": _put_file, "values": _put_value}[step.kind](step)


def _put_unit_down(step: Step) -> None:
    now = look("units", step.name)
    if now["active"] in (*UP, "failed") and step.before["active"] not in UP:
        _must("systemctl", "stop", step.name)
        run("systemctl", "reset-failed", step.name)
    if now["enabled"].startswith("masked") and not step.before["enabled"].startswith("masked"):
        _must("systemctl", "unmask", step.name)
    if now["enabled"].startswith("enabled") and not step.before["enabled"].startswith("enabled"):
        _must("systemctl", "disable", step.name)


def _put_unit_up(step: Step) -> None:
    now = look("units", step.name)
    before = step.before
    if before["enabled"].startswith("enabled") and not now["enabled"].startswith("enabled"):
        _must("systemctl", "enable", step.name)
    if before["enabled"].startswith("masked") and not now["enabled"].startswith("masked"):
        _must("systemctl", "mask", step.name)
    if before["active"] in UP and now["active"] not in UP:
        _must("systemctl", "start", step.name)


def _put_hold(step: Step) -> None:
    # A package that is not there and is held leaves dpkg's list only with this selection.
    there = packages().get(step.name) == "installed"
    selection = "hold" if step.before["held"] else "install" if there else "purge"
    _must("dpkg", "--set-selections", stdin=f"{step.name} {selection}\n")


def _put_file(step: Step) -> None:
    path, before = Path(step.name), step.before
    if before["kind"] == "absent":
        path.unlink(missing_ok=True)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    if before["kind"] == "link":
        path.unlink(missing_ok=True)
        path.symlink_to(before["target"])
        return
    mode = int(before["mode"], 8)
    owner, group = _number(pwd.getpwnam, before["owner"]), _number(grp.getgrnam, before["group"])
    if before["kind"] == "directory":
        path.mkdir(exist_ok=True)
        path.chmod(mode)
        os.chown(path, owner, group)
        return
    content = before["text"].encode() if "text" in before else base64.b64decode(before["base64"])
    write(path, content, mode, owner, group)


def _put_value(step: Step) -> None:
    if "error" in step.before:
        return
    try:
        Path(step.name).write_text(step.before["text"])
    except OSError as error:
        raise UndoError(f"{step.name} does not take back {step.before['text'].strip()!r}: {error.strerror}") from None


def _must(*argv: str, stdin: str = "") -> Done:
    done = run(*argv, stdin=stdin)
    if done.rc:
        raise UndoError(f"`{' '.join(argv)}` failed ({done.rc}): {(done.err or done.out).strip()}")
    return done


def _packages_to_go(entry: Entry, keep: str) -> tuple[dict[str, str], dict[str, str]]:
    """Tell the packages that go by how, and those that stay by the reason."""
    came, start = entry.packages.came, entry.packages.at_start
    if not came and start is None:
        return {}, {}
    there = packages()
    # Of one that is to be removed only, its configuration was there before.
    going = {
        name: how for name, how in came.items() if name in there and (how == "purge" or there[name] == "installed")
    }
    if keep:
        return {}, dict.fromkeys(going, keep)
    needed = undo.needed_by_others(_installed(), [name for name in going if there[name] == "installed"])
    staying = {name: f"{other} needs it" for name, other in needed.items()}
    # Of a run that did not come to its end nobody knows what came by it, and what by somebody else.
    for name, state in there.items():
        if start is not None and state == "installed" and name not in start and name not in came:
            staying[name] = "it came since a run of the role that was cut short, perhaps not by the role"
    return {name: how for name, how in going.items() if name not in needed}, staying


def _remove(going: dict[str, str]) -> None:
    for how in ("remove", "purge"):
        names = sorted(name for name, one in going.items() if one == how)
        if not names:
            continue
        apt = ("apt-get", "--yes", "-o", f"DPkg::Lock::Timeout={LOCK_SECONDS}", "-o", "APT::Get::AutomaticRemove=false")
        # What apt would take along or bring in is not this role's: better nothing than that.
        simulated = _must(*apt, "--simulate", how, *names).out.splitlines()
        acts = [line.split()[:2] for line in simulated if line.startswith(("Remv ", "Purg ", "Inst "))]
        ours = {name.split(":")[0] for name in going}
        others = sorted({f"{act} {name}" for act, name in acts if act == "Inst" or name.split(":")[0] not in ours})
        if others:
            raise UndoError(
                f"apt-get would not only {how} what the role installed ({' '.join(names)}), but also: "
                f"{', '.join(others)}. Nothing was removed: see what needs them, and run this again"
            )
        _must(*apt, how, *names)


def read_json(path: Path) -> dict[str, Any] | None:
    """Read the object in a JSON file, None where there is no file. UndoError where it is something else."""
    try:
        content = json.loads(path.read_text() or "{}")
    except FileNotFoundError:
        return None
    except (ValueError, UnicodeDecodeError) as error:
        raise UndoError(f"{path} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise UndoError(f"{path} holds no JSON object")
    return content


def _shares_to_go(entry: Entry, outcome: Outcome) -> dict[str, dict[str, Any] | None]:
    out = {}
    for name, share in entry.shares.items():
        content = read_json(Path(name))
        without, kept = undo.without_share(content, share)
        outcome.kept += [f"{name}: {one}" for one in kept]
        if without != content:
            out[name] = without
            outcome.did.append(
                f"{name}: {'not there, as before' if without is None else 'without the settings of the role'}"
            )
    return out


def _write_json(path: Path, content: dict[str, Any] | None, text: str) -> None:
    if content is None:
        path.unlink(missing_ok=True)
        return
    # The site's own configuration management may have made it a link.
    path = path.resolve()
    status = path.stat()
    write(path, to_text(content, text).encode(), stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid)


def to_text(content: dict[str, Any], earlier: str) -> str:
    """Write it as it was written before, where it says the same, else as this repository writes JSON files."""
    if earlier and json.loads(earlier) == content:
        return earlier
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"


def _directories_that_would_go(entry: Entry, todo: list[Step], outcome: Outcome) -> None:
    gone = {step.name for step in todo if step.kind == "files" and step.before == ABSENT}
    for name in sorted(entry.directories, key=len, reverse=True):
        if Path(name).is_dir() and {str(path) for path in Path(name).iterdir()} <= gone:
            gone.add(name)
            outcome.did.append(f"{name}: not there, as before")


def _remove_directories(entry: Entry, outcome: Outcome) -> None:
    for name in sorted(entry.directories, key=len, reverse=True):
        path = Path(name)
        try:
            path.rmdir()
        except FileNotFoundError:
            continue
        except OSError as error:
            outcome.kept.append(f"{name}: kept, {(error.strerror or '').lower()}")
        else:
            outcome.did.append(f"{name}: not there, as before")
