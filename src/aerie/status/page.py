"""The status page: one HTML document without script or other assets. Pure."""

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

from aerie.speculation import Speculation

_REFRESH = 3  # seconds
_COLOURS = {"ready": "#2e7d32", "starting": "#1565c0", "checking": "#1565c0", "stopping": "#616161", "stopped": "#616161"}
_TROUBLE = "#c62828"

_STYLE = """
:root { color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif; }
body { max-width: 52rem; margin: 3rem auto; padding: 0 1rem; }
h1 { color: white; padding: .5rem 1rem; border-radius: .5rem; }
progress { width: 100%; height: 1.2rem; }
dt { opacity: .7; } dd { margin: 0 0 .6rem; overflow-wrap: anywhere; } dd.line { font-family: monospace; }
"""


def render(state: Mapping[str, Any]) -> str:
    """Return the page of `state`, which has the form of `/status`."""
    phase = state["phase"]
    rows = "\n".join(f"<dt>{name}</dt><dd{kind}>{escape(text)}</dd>" for name, kind, text in _rows(state))
    bar = "" if state["progress"] is None else f'<progress value="{state["progress"]:.3f}"></progress>'
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="refresh" content="{_REFRESH}">
<meta name="viewport" content="width=device-width">
<title>{phase}: {escape(state["model"])}</title>
<style>{_STYLE}</style>
</head>
<body>
<h1 style="background: {_COLOURS.get(phase, _TROUBLE)}">{phase}</h1>
{bar}
<dl>
{rows}
</dl>
</body>
</html>
"""


def _rows(state: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield (name, attributes, text) of what there is to say, the most wanted first."""
    engine, exited, speculation = state["engine"], state["engine"]["exit"], state["speculation"]
    line = ' class="line"'
    ended = exited and (f"killed by {exited['signal']}" if exited["signal"] else f"exit code {exited['code']}")
    candidates = (
        ("Why", "", state["reason"]),
        ("Doing", "", state["step"]),
        ("Next start", "", state["next_start"]),
        ("Last error", line, state["last_error"]),
        ("Model", "", state["model"]),
        ("Since", "", state["since"]),
        ("Speculation", "", speculation and str(Speculation(**speculation))),
        ("Engine starts", "", f"{engine['starts']}, failures in a row: {state['failures']}"),
        ("Last engine ended", "", exited and f"{ended}, {exited['at']}"),
        ("Last line of the start", line, state["last_line"]),
        ("Versions", "", ", ".join(f"{name} {version}" for name, version in state["versions"].items() if version)),
    )
    for name, kind, text in candidates:
        if text:
            yield name, kind, text
