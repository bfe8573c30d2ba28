"""JSON files with a field that is of another form than its reader expects."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from hypothesis import strategies as st

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    Path = tuple[str | int, ...]


def replaced(content: Any, path: Path, value: Any) -> Any:
    """Return a copy with one field set, or taken out with `...`."""
    content = copy.deepcopy(content)
    part = content
    for name in path[:-1]:
        part = part[name]
    if value is ...:
        del part[path[-1]]
    else:
        part[path[-1]] = value
    return content


def paths(part: Any, above: Path = ()) -> Iterator[Path]:
    """Yield where each field stands, at any depth."""
    items = part.items() if isinstance(part, dict) else enumerate(part) if isinstance(part, list) else ()
    for name, value in items:
        yield (*above, name)
        yield from paths(value, (*above, name))


def nested(depth: int) -> Any:
    """Return a list in a list, and so on."""
    content: Any = 1
    for _ in range(depth):
        content = [content]
    return content


ODD = st.one_of(
    st.sampled_from([
        ..., None, True, False, "", "7", "re:(", "re:[[a]", "\ud800", "\0", "x" * 2000, -1, 0, 1, 2, 7, 128, 1.5, 1e308,
        float("inf"), float("nan"), 10**6, 2**31 - 1, 10**30, [], [1], [2, 2], ["a"], [{}], {}, {"a": 1}, {"g": None},
        {"9" * 5000: {"content": "a"}}, nested(40), list(range(9)), list(range(2000)), [10**30], [0, 0], [58, 30, 2],
    ]),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
        max_leaves=5,
    ),
)  # fmt: skip


def mutations(contents: Sequence[Any]) -> st.SearchStrategy[Any]:
    """Return one of them with one field or two replaced."""
    one = st.sampled_from([(content, path) for content in contents for path in paths(content)])
    first = st.builds(lambda chosen, value: replaced(*chosen, value), one, ODD)

    def again(content: Any) -> st.SearchStrategy[Any]:
        return st.builds(lambda path, value: replaced(content, path, value), st.sampled_from([*paths(content)]), ODD)

    return first | first.filter(bool).flatmap(again)
