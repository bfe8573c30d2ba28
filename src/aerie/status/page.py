"""The status page: one HTML document that loads nothing, made of page.html, page.css and page.js. Pure."""

import re
from base64 import b64encode
from collections.abc import Mapping
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from aerie.diagnosis import Evidence, Kind
from aerie.diagnosis.diagnosis import Diagnosis, End, conclude
from aerie.diagnosis.signatures import Where, signatures
from aerie.engine_metrics import Speculation
from aerie.gate.container import in_container
from aerie.gate.words import how_it_is, percent, rough

_HERE = Path(__file__).parent
_REFRESH = 3  # seconds, where JavaScript is off
_QUIET = 300  # seconds without a movement until it is said what to look at; as in monitoring/alerts.yaml
_STYLE = Markup((_HERE / "page.css").read_text(encoding="utf-8"))  # noqa: S704 - our own file, as it is
_SCRIPT = Markup((_HERE / "page.js").read_text(encoding="utf-8"))  # noqa: S704 - our own file, as it is

# What a phase is called, and its tone: a colour and a shape, so that neither is needed to tell one from another.
_PHASES = {
    "starting": ("Starting", "going"),
    "checking": ("Checking", "going"),
    "ready": ("Ready", "good"),
    "unready": ("Not ready", "warn"),
    "failed": ("Failed", "trouble"),
    "held": ("Held", "trouble"),
    "stopping": ("Stopping", "idle"),
    "stopped": ("Stopped", "idle"),
}
_UNDER_WAY = frozenset({"starting", "checking"})
_DOWN = frozenset({"failed", "held"})
_ICONS = {
    "going": '<circle cx="12" cy="12" r="9" fill="none" stroke="currentColor" stroke-width="4" opacity=".3"/>'
    '<path d="M12 3a9 9 0 0 1 9 9" fill="none" stroke="currentColor" stroke-width="4" stroke-linecap="round"/>',
    "good": '<path fill="currentColor" fill-rule="evenodd" d="M12 1a11 11 0 1 1 0 22 11 11 0 0 1 0-22Zm5.7 6.8-1.8-1.5'
    '-5.4 6.5-2.6-2.6-1.7 1.7 4.4 4.4Z"/>',
    "warn": '<path fill="currentColor" fill-rule="evenodd" d="M12 1.5 23.5 22H.5Zm-1.2 7 .4 6.5h1.6l.4-6.5Zm1.2 8a1.4'
    ' 1.4 0 1 0 0 2.8 1.4 1.4 0 0 0 0-2.8Z"/>',
    "trouble": '<path fill="currentColor" fill-rule="evenodd" d="M7.5 1h9L23 7.5v9L16.5 23h-9L1 16.5v-9Zm.9 5.7'
    "-1.7 1.7L10.3 12l-3.6 3.6 1.7 1.7 3.6-3.6 3.6 3.6 1.7-1.7L13.7 12l3.6-3.6-1.7-1.7"
    'L12 10.3Z"/>',
    "idle": '<rect x="3" y="3" width="18" height="18" rx="4" fill="currentColor"/>',
    "next": '<circle cx="12" cy="12" r="8" fill="none" stroke="currentColor" stroke-width="2"/>',
}
# As in page.css; a tab's background is not ours to know, so these stand out on light and dark alike.
_ICON_COLOURS = {"going": "#3b7de9", "good": "#2a9d55", "warn": "#c98511", "trouble": "#e0483e", "idle": "#858b94"}
_MOVED_BY = {"read": "bytes read from disk", "faults": "page faults", "log": "a log line", "gpu memory": "GPU memory"}


def _source(text: str) -> str:
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"


CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        f"style-src {_source(_STYLE)}",
        f"script-src {_source(_SCRIPT)}",
        "connect-src 'self'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
"""What the page may do: its own style and script, this very server, the icon in the page."""


def render(state: Mapping[str, Any], now: datetime, container: str | None = None) -> str:
    """Return the page of `state`, which has the form of `/status`, as it stands at `now` (with a time zone).

    `container` is the one that the service runs in, by a name that Docker knows; None where it runs in none.
    """
    phase, start, diagnosis = state["phase"], state["start"], state["diagnosis"]
    speculation = Speculation(**state["speculation"]) if state["speculation"] else None
    starting = phase in _UNDER_WAY
    stalled = bool(phase == "starting" and start and start["stalled"])
    title, tone = ("Stalled", "warn") if stalled else _PHASES[phase]
    quiet = bool(phase == "starting" and start and start["phase"] and start["silent_seconds"] >= _QUIET)
    return _PAGE.render(
        state=state,
        now=now,
        now_iso=now.astimezone(UTC).isoformat(timespec="seconds"),
        title=title,
        tone=tone,
        icons={name: Markup(svg) for name, svg in _ICONS.items()},  # noqa: S704 - our own, as they are
        favicon=_FAVICONS[tone],
        style=_STYLE,
        script=_SCRIPT,
        refresh=_REFRESH,
        starting=starting,
        stalled=stalled,
        down=phase in _DOWN,
        overall=start["fraction"] if starting and start else None,
        lead=_lead(state),
        lasting=_duration((now - _time(state["since"])).total_seconds()),
        elapsed=_lasted(start, now) if start else "",
        movement=_movement(start) if start else "",
        warming=_warming(state.get("warming")),
        expected=_stall(start) if stalled or quiet else None,
        until_next_start=_until(state["next_start"], now) if state["next_start"] else "",
        place=_place(diagnosis["root"]) if diagnosis and diagnosis["root"] else "",
        evidence_title=_evidence_title(diagnosis) if diagnosis else "",
        ending=how_it_is(state),
        retry=in_container("aerie retry", container),
        show_report=in_container(f"cat {diagnosis['report']}", container) if diagnosis and diagnosis["report"] else "",
        serving=state["serving"] if phase == "ready" else None,
        phases=_phases(start, under_way=starting) if start else [],
        speculation=speculation,
    )


def _lead(state: Mapping[str, Any]) -> str:
    """Return the one sentence that says where it is; it is read out when it changes, so it has no counting figure."""
    phase, start, diagnosis = state["phase"], state["start"], state["diagnosis"]
    if phase == "starting":
        if start is None or not start["phase"]:
            return "The engine is being started"
        return f"Nothing moves while {start['phase']}" if start["stalled"] else _sentence(start["phase"])
    if phase == "checking":
        return "The server answers; the first completion is asked for"
    if phase == "ready":
        return "Requests are served"
    if phase == "stopped":
        return "The engine has ended, and this page with the container"
    return diagnosis["title"] if diagnosis and phase in _DOWN else state["reason"] or ""


def _stall(start: Mapping[str, Any]) -> Diagnosis:
    """Return what the diagnosis will be if nothing moves any more."""
    words = f"the start has stalled: nothing moved for {start['silent_seconds']:.0f} s while {start['phase']}"
    end = End(words, Kind.HUNG, (Evidence("supervisor", None, words, kind=Kind.HUNG),), silent=True)
    return conclude(None, end, signatures(), ())


def _evidence_title(diagnosis: Mapping[str, Any]) -> str:
    """Return the heading of what was seen outside the engine's output, which may or may not be the cause."""
    kind = diagnosis["kind"]
    if diagnosis["known"]:
        by_evidence = {known.id for known in signatures() if known.where is Where.EVIDENCE}
        taken = diagnosis["signature"] in by_evidence
    else:
        taken = kind in {Kind.HARDWARE, Kind.MEMORY}  # which nothing else makes them, where no signature fits
    if taken:
        return "What shows it"
    # Of a process that could not speak, what was seen is all there is.
    silent = kind in {Kind.KILLED, Kind.HUNG}
    return "Seen outside the engine's output" if silent else "Seen at the same time; not taken as the cause"


def _movement(start: Mapping[str, Any]) -> str:
    by = _MOVED_BY.get(start["moved_by"], start["moved_by"])
    return f"{_duration(start['silent_seconds'])} ago" + (f", {by}" if by else "")


def _warming(warming: Mapping[str, Any] | None) -> str:
    """Return how far the weights are read ahead of the engine."""
    if not warming:
        return ""
    if warming["state"] != "reading":
        return str(warming["text"])
    return f"{warming['warmed_bytes'] / 1e9:.0f} of {warming['total_bytes'] / 1e9:.0f} GB read ahead of the engine"


def _place(root: Mapping[str, Any]) -> str:
    """Return where the root cause arose: the process, the line of vLLM or the model, and the one that raised."""
    process = root["process"] and root["process"] + (f" (pid {root['pid']})" if root["pid"] else "")
    line = root["file"] and f"{root['file']}:{root['line']}" + (f" in {root['function']}" if root["function"] else "")
    beneath = root["innermost"] if root["innermost"] != line else None
    return " · ".join(filter(None, (process, line, beneath and f"raised in {beneath}")))


def _until(iso: str, now: datetime) -> str:
    left = (_time(iso) - now).total_seconds()
    return f"Next start in {_duration(left)}" if left > 0 else "Next start now"


def _phases(start: Mapping[str, Any], *, under_way: bool) -> list[tuple[str, Mapping[str, Any]]]:
    """Return what became of each phase, and the phase; those that this start left out are left out here too."""
    last = max((number for number, phase in enumerate(start["phases"]) if phase["began"]), default=-1)
    return [
        ("done" if phase["ended"] else "next" if number > last else "now" if under_way else "cut", phase)
        for number, phase in enumerate(start["phases"])
        if phase["began"] or (number > last and not start["ended"])
    ]


# --- How things are written ---


def _time(iso: str) -> datetime:
    return datetime.fromisoformat(iso)


def _clock(iso: str, now: datetime, seconds: bool = True) -> str:  # noqa: FBT001, FBT002 - called by the template
    """Return a time of day, with its date where that is not today's, and without seconds where it is an estimate."""
    time, today = _time(iso).astimezone(UTC), now.astimezone(UTC).date()
    if time.date() != today:
        return f"{time:%Y-%m-%d %H:%M} UTC"
    return f"{time:%H:%M:%S} UTC" if seconds else f"{time:%H:%M} UTC"


def _duration(seconds: float) -> str:
    """Return `seconds` in the two largest units: 8 s, 5 min 12 s, 2 h 3 min, 3 d 4 h."""
    left, parts = max(0, int(seconds)), list[str]()
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        count, left = divmod(left, size)
        if parts or count or unit == "s":
            parts.append(f"{count} {unit}")
    return " ".join(part for part in parts[:2] if not part.startswith("0 ") or len(parts) == 1)


def _lasted(span: Mapping[str, Any], now: datetime) -> str:
    """Return how long `span`, which has `began` and `ended`, took until its end or `now`."""
    return _duration(((_time(span["ended"]) if span["ended"] else now) - _time(span["began"])).total_seconds())


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.1f}"  # noqa: PLR2004 - three digits do


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _code(text: str) -> Markup:
    """Return `text` with what stands in backquotes set as code."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))  # noqa: S704 - escaped right here


def _is_web_address(text: str) -> bool:
    return text.startswith(("https://", "http://"))


def _favicon(tone: str) -> str:
    svg = _ICONS[tone].replace("currentColor", _ICON_COLOURS[tone])
    return "data:image/svg+xml," + quote(f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 24 24">{svg}</svg>')


def _page_template() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(_HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {
        "clock": _clock,
        "code": _code,
        "duration": _duration,
        "lasted": _lasted,
        "number": _number,
        "percent": percent,
        "rough": rough,
        "sentence": _sentence,
    }
    environment.tests["web_address"] = _is_web_address
    return environment


_FAVICONS = {tone: _favicon(tone) for tone in _ICON_COLOURS}
_PAGE = _page_template().get_template("page.html")
