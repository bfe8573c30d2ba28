"""A role's share of a JSON file that belongs to the site: single settings, merged in and taken out again. Pure.

The file is not the role's, so it is neither written nor restored as a whole. For each setting that the role makes, its
share remembers what stood there before and what the role put there. A setting that somebody changed since is theirs
again: from then on that value is what stood there before.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

Object = dict[str, Any]
"""A JSON object."""
Pointer = tuple[str, ...]
"""The keys from the top of the file to one setting. A list is one setting, and so is an object without keys."""


class _Missing:
    """What stands where no setting is."""


MISSING = _Missing()


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting of the role: what stood there before, and what it put there."""

    before: Any
    ours: Any


@dataclass(slots=True)
class Share:
    """What a role has in a file; `created`: the file was not there before; `text`: its text before the first merge."""

    created: bool
    settings: dict[Pointer, Setting] = field(default_factory=dict)
    text: str = ""

    def to_json(self) -> Object:
        """As undo.json keeps it."""
        return {
            "created": self.created,
            "text": self.text,
            "settings": [
                {"setting": list(pointer), "ours": setting.ours}
                | ({} if setting.before is MISSING else {"before": setting.before})
                for pointer, setting in self.settings.items()
            ],
        }

    @classmethod
    def from_json(cls, kept: Object) -> Share:
        """Read what `to_json` wrote."""
        return cls(
            kept["created"],
            {tuple(one["setting"]): Setting(one.get("before", MISSING), one["ours"]) for one in kept["settings"]},
            kept["text"],
        )


@dataclass(frozen=True, slots=True)
class Merge:
    """What becomes of a file. `replaced`: settings of the site that the role's take the place of."""

    content: Object
    share: Share
    replaced: dict[Pointer, Setting]
    kept: dict[Pointer, Any]
    """Settings that were the role's once and that somebody changed since, by their present value; they stay."""


def merge(content: Object | None, share: Share | None, wanted: Object) -> Merge:
    """Put `wanted` into the content of a file (None: there is none), and take out what the role no longer wants."""
    share = share or Share(created=content is None)
    result = deepcopy(content or {})
    settings: dict[Pointer, Setting] = {}
    kept: dict[Pointer, Any] = {}
    for pointer, setting in share.settings.items():
        present = _get(result, pointer)
        if _same(present, setting.ours):
            _put(result, pointer, setting.before)
        elif present is not MISSING:
            kept[pointer] = present
    replaced: dict[Pointer, Setting] = {}
    for pointer, ours in _settings(wanted, result):
        was = _get(result, pointer)
        settings[pointer] = Setting(was, ours)
        if was is not MISSING and not _same(was, ours):
            replaced[pointer] = settings[pointer]
        kept.pop(pointer, None)
        _put(result, pointer, ours)
    return Merge(_in_order_of(result, content or {}), Share(share.created, settings, share.text), replaced, kept)


def _settings(wanted: Object, content: Any, at: Pointer = ()) -> list[tuple[Pointer, Any]]:
    """Each setting in `wanted`. Where the file has something else than an object, an object replaces it whole."""
    found: list[tuple[Pointer, Any]] = []
    for key, value in wanted.items():
        there = content.get(key, {}) if isinstance(content, dict) else {}
        if isinstance(value, dict) and value and isinstance(there, dict):
            found += _settings(value, there, (*at, key))
        else:
            found.append(((*at, key), value))
    return found


def _get(content: Any, pointer: Pointer) -> Any:
    for key in pointer:
        if not isinstance(content, dict) or key not in content:
            return MISSING
        content = content[key]
    return content


def _put(content: Object, pointer: Pointer, value: Any) -> None:
    """Set it, or with MISSING take it out, and with it the objects that would be left empty."""
    *parents, key = pointer
    if value is MISSING:
        if parents:
            parent = _get(content, tuple(parents))
            if isinstance(parent, dict):
                parent.pop(key, None)
                if not parent:
                    _put(content, tuple(parents), MISSING)
        else:
            content.pop(key, None)
        return
    for name in parents:
        if not isinstance(content.get(name), dict):
            content[name] = {}
        content = content[name]
    content[key] = deepcopy(value)


def _same(one: Any, other: Any) -> bool:
    """Equal as JSON, where true is not 1."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    return isinstance(one, bool) == isinstance(other, bool) and bool(one == other)


def _in_order_of(result: Object, content: Object) -> Object:
    """Order keys as the site has them, new ones behind, so that a second merge writes the same file."""
    ordered: Object = {}
    for key in [*(key for key in content if key in result), *(key for key in result if key not in content)]:
        value, model = result[key], content.get(key)
        ordered[key] = _in_order_of(value, model) if isinstance(value, dict) and isinstance(model, dict) else value
    return ordered
