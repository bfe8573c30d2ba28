"""The status page: one HTML document without script or other assets. Pure."""

from collections.abc import Mapping
from html import escape
from typing import Any

from aerie.gate.report import rows

_REFRESH = 3  # seconds
_GOING_WELL = "#1565c0"
_TROUBLE = "#c62828"
_COLOURS = {
    "ready": "#2e7d32",
    "starting": _GOING_WELL,
    "checking": _GOING_WELL,
    "stopping": "#616161",
    "stopped": "#616161",
}
_STYLE = """
:root { color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif; }
body { max-width: 52rem; margin: 3rem auto; padding: 0 1rem; }
h1 { color: white; padding: .5rem 1rem; border-radius: .5rem; }
progress { width: 100%; height: 1.2rem; }
dt { opacity: .7; } dd { margin: 0 0 .6rem; overflow-wrap: anywhere; }
"""


def render(state: Mapping[str, Any]) -> str:
    """Return the page of `state`, which has the form of `/status`."""
    phase = state["phase"]
    texts = "\n".join(f"<dt>{name}</dt><dd>{escape(text, quote=False)}</dd>" for name, text in rows(state))
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
{texts}
</dl>
</body>
</html>
"""
