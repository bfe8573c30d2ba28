"""What was there before a role's first change, and the way back to it. Pure: `undo_host` looks at the machine and acts.

Of each thing that a role is about to change the record keeps what stood there `before`, once and for good, and what
stood there when the role had `written` it. The way back leaves alone what somebody else changed since, which is what is
neither the one nor the other.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from .merged import Share, merge

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Mapping

SCHEMA = 1
"""Of undo.json. One that is newer is refused."""
LARGEST_FILE = 1 << 20
"""Bytes of a file that is kept: what a role writes over is configuration."""

Thing = dict[str, Any]
"""One thing's state, as JSON. A file: kind (absent, file, link, directory, other) and, of a file, text or base64, mode,
owner and group, of a link, target. A unit: enabled and active, in systemctl's words. A hold: held. A value: text."""
KINDS = ("units", "holds", "files", "values")
"""In this order they are put back: nothing runs any more, nothing is held, then what it read is taken away."""
ABSENT: Thing = {"kind": "absent"}


class UndoError(Exception):
    """The record cannot be used; the message says what to do."""


@dataclass(slots=True)
class Recorded:
    """One thing of the record. `written` is None as long as nobody said that the role is through with it."""

    before: Thing
    written: Thing | None = None


@dataclass(slots=True)
class Packages:
    """Packages that came with a role, and how each goes: `purge`, or `remove` where configuration was there before."""

    came: dict[str, str] = field(default_factory=dict)
    at_start: dict[str, str] | None = None
    """By name, `installed` or `configuration`; only while the role is installing."""


@dataclass(slots=True)
class Entry:
    """What is recorded for one role."""

    things: dict[str, dict[str, Recorded]] = field(default_factory=lambda: {kind: {} for kind in KINDS})
    directories: list[str] = field(default_factory=list)
    """Directories that were not there when a file in them was recorded."""
    shares: dict[str, Share] = field(default_factory=dict)
    """By path: JSON files of the site in which the role has settings (`merged`)."""
    packages: Packages = field(default_factory=Packages)

    def is_empty(self) -> bool:
        """Whether there is nothing to put back."""
        return not (
            any(self.things.values())
            or self.directories
            or self.shares
            or self.packages.came
            or self.packages.at_start is not None
        )


Record = dict[str, Entry]
"""By role."""


def parse(text: str, path: str) -> Record:
    """Read undo.json; UndoError where it is not one that this version can read."""
    remedy = (
        f"undo.yml restores from it: bring it back from a backup, or, if nothing is to be undone, move {path} away."
    )
    try:
        kept = json.loads(text)
        schema = kept["schema"]
    except (ValueError, KeyError, TypeError) as error:
        raise UndoError(f"{path} is not a record that the module undo wrote ({error}). {remedy}") from None
    if not isinstance(schema, int):
        raise UndoError(f"{path} is not a record that the module undo wrote (schema {schema!r}). {remedy}")
    if schema > SCHEMA:
        raise UndoError(
            f"{path} has schema {schema}, written by a later version of this repository; this one knows {SCHEMA}. "
            f"Use that version. {remedy}"
        )
    try:
        return {role: _entry(entry) for role, entry in kept["roles"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UndoError(
            f"{path} is damaged ({type(error).__name__}: {error}), though its schema is {schema}. {remedy}"
        ) from None


def dump(record: Record) -> str:
    """Text of undo.json, for people to read, too."""
    roles = {role: _entry_to_json(entry) for role, entry in record.items() if not entry.is_empty()}
    return json.dumps({"schema": SCHEMA, "roles": roles}, indent=2, ensure_ascii=False) + "\n"


def _entry(kept: dict[str, Any]) -> Entry:
    packages = _of(dict, kept, "packages")
    return Entry(
        {kind: {name: _recorded(kind, name, one) for name, one in _of(dict, kept, kind).items()} for kind in KINDS},
        _of(list, kept, "directories"),
        {path: Share.from_json(share) for path, share in _of(dict, kept, "shares").items()},
        Packages(_of(dict, packages, "came"), packages.get("at_start")),
    )


def _of(kind: type, kept: dict[str, Any], name: str) -> Any:
    found = kept.get(name, kind())
    if not isinstance(found, kind):
        raise TypeError(f"{name}: {found!r}")
    return found


def _recorded(kind: str, name: str, kept: dict[str, Any]) -> Recorded:
    before = kept["before"]
    if not isinstance(before, dict) or not _fields(kind, before) <= before.keys():
        raise TypeError(f"{name}: {before!r}")
    return Recorded(before, kept.get("written"))


def _fields(kind: str, thing: Thing) -> set[str]:
    """Name what must be known of a thing for it to be put back."""
    if kind != "files":
        return {"units": {"enabled", "active"}, "holds": {"held"}, "values": {"text"}}[kind]
    owned = {"mode", "owner", "group"}
    of_file = owned | ({"base64"} if "base64" in thing else {"text"})
    return {"kind"} | {"file": of_file, "directory": owned, "link": {"target"}}.get(str(thing.get("kind")), set())


def _entry_to_json(entry: Entry) -> dict[str, Any]:
    things = {
        kind: {
            name: {"before": one.before} | ({} if one.written is None else {"written": one.written})
            for name, one in sorted(entry.things[kind].items())
        }
        for kind in KINDS
    }
    packages = {"came": entry.packages.came}
    return {
        name: value
        for name, value in {
            **things,
            "directories": entry.directories,
            "shares": {path: share.to_json() for path, share in entry.shares.items()},
            "packages": packages | ({} if entry.packages.at_start is None else {"at_start": entry.packages.at_start}),
        }.items()
        if value and value != {"came": {}}
    }


def fingerprint(kind: str, thing: Thing) -> Thing:
    """Reduce it to what tells whether somebody else changed it: a file's content, whether a unit is enabled."""
    if kind == "files" and thing["kind"] == "file":
        content = thing["text"].encode() if "text" in thing else thing["base64"].encode()
        return {"kind": "file", "sha256": hashlib.sha256(content).hexdigest()}
    if kind == "files" and thing["kind"] == "directory":
        return {"kind": "directory"}
    if kind == "units":
        # A service that has crashed, or that was stopped for a moment, is still as the role left it.
        return {"enabled": thing["enabled"]}
    return thing


def note_first(entry: Entry, kind: str, name: str, present: Thing) -> bool:
    """Record what is there, the first time only; return whether this was it."""
    if name in entry.things[kind]:
        return False
    entry.things[kind][name] = Recorded(present)
    return True


def note_written(entry: Entry, kind: str, name: str, present: Thing) -> bool:
    """Record what is there as the role's own work; return whether that is news."""
    one = entry.things[kind][name]
    written = fingerprint(kind, present)
    if one.written == written:
        return False
    one.written = written
    return True


def split(entry: Entry, names: Container[str]) -> tuple[Entry, Entry]:
    """Part an entry into the things of these names, and all that is left of it."""

    def things(*, named: bool) -> dict[str, dict[str, Recorded]]:
        return {
            kind: {name: one for name, one in entry.things[kind].items() if (name in names) is named} for kind in KINDS
        }

    return Entry(things(named=True)), replace(entry, things=things(named=False))


def note_start(entry: Entry, present: Mapping[str, str]) -> None:
    """Record what is installed before the role installs. A start that never ended stays, or its packages were lost."""
    if entry.packages.at_start is None:
        entry.packages.at_start = dict(present)


def note_installed(entry: Entry, present: Mapping[str, str]) -> list[str]:
    """Record what came since the start as the role's; return its names. UndoError where there was no start."""
    start = entry.packages.at_start
    if start is None:
        raise UndoError(
            "`installed: true` needs an earlier `packages: true` in the same play, before the packages came"
        )
    came = sorted(name for name, state in present.items() if state == "installed" and start.get(name) != "installed")
    for name in came:
        entry.packages.came.setdefault(name, "remove" if start.get(name) == "configuration" else "purge")
    entry.packages.at_start = None
    return came


@dataclass(frozen=True, slots=True)
class Step:
    """One thing that is put back, or, with a reason in `kept`, is not."""

    kind: str
    name: str
    before: Thing
    kept: str = ""


def way_back(entry: Entry, present: Mapping[str, Mapping[str, Thing]]) -> list[Step]:
    """Compare each recorded thing with the present state. What is as it was before needs no step."""
    steps = []
    for kind in KINDS:
        for name, one in entry.things[kind].items():
            now = present[kind][name]
            if now == one.before:
                continue
            theirs = one.written is not None and fingerprint(kind, now) not in (
                one.written,
                fingerprint(kind, one.before),
            )
            steps.append(
                Step(kind, name, one.before, f"somebody changed it since: {_words(kind, now)}" if theirs else "")
            )
    return steps


def say(step: Step) -> str:
    """One line about a step, for people."""
    if step.kept:
        return f"{step.name}: kept, {step.kept}"
    return f"{step.name}: {_words(step.kind, step.before)}, as before"


def _words(kind: str, thing: Thing) -> str:
    if kind == "units":
        return f"{thing['enabled']} and {thing['active']}"
    if kind == "holds":
        return "held" if thing["held"] else "not held"
    if kind == "values":
        return str(thing["text"]).strip()
    if thing["kind"] == "link":
        return f"a link to {thing['target']}"
    return str({"absent": "not there", "file": "a file"}.get(thing["kind"], thing["kind"]))


def without_share(content: dict[str, Any] | None, share: Share) -> tuple[dict[str, Any] | None, list[str]]:
    """Take the role's settings out of a site's JSON file (None: no file); tell what was changed since and stays."""
    if content is None:
        return None, []
    out = merge(content, share, {})
    kept = [f"{'.'.join(pointer)}: kept, somebody changed it since" for pointer in out.kept]
    return (None if share.created and not out.content else out.content), kept


@dataclass(frozen=True, slots=True)
class Installed:
    """An installed package: its name as dpkg has it (some with the architecture), what it provides and needs."""

    name: str
    provides: frozenset[str]
    """Itself, without the architecture, among them."""
    needs: tuple[frozenset[str], ...]
    """Each set is one dependency, any of whose names will do. Versions do not count here."""


def needed_by_others(installed: Iterable[Installed], going: Iterable[str]) -> dict[str, str]:
    """Those of `going` that packages need which stay, by name, with the one that needs it."""
    installed = list(installed)
    leaving = set(going)
    needed: dict[str, str] = {}
    found = True
    while found:
        found = False
        staying = [one for one in installed if one.name not in leaving]
        had: set[str] = set().union(*(one.provides for one in staying))
        for one in staying:
            for alternatives in one.needs:
                if alternatives & had:
                    continue
                for other in installed:
                    if other.name in leaving and alternatives & other.provides:
                        leaving.discard(other.name)
                        needed[other.name] = one.name
                        found = True
    return needed


def dependencies(field_text: str) -> tuple[frozenset[str], ...]:
    """Read the names in a Depends or Provides field, without versions and architectures."""
    return tuple(
        frozenset(one.split("(")[0].split("[")[0].split(":")[0].strip() for one in clause.split("|"))
        for clause in field_text.split(",")
        if clause.strip()
    )
