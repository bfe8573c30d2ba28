"""Draws the state for a terminal: lines of text that fit its width. Pure."""

import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from aerie.gate.state import State
from aerie.gate.words import Outlook, Step, clock, how_it_is, percent, plain, rough

_NARROW = 48  # columns below which one line must do
_WIDEST_BAR = 60
_PHASE_BAR = 20
_NUMBERS = 6  # columns for a percentage
_NAMES = 28  # columns for the names of phases
_DOWN = frozenset({"failed", "held"})
_COLOURS = {"ready": "1;32", "starting": "1;36", "checking": "1;36"}


@dataclass(frozen=True, slots=True)
class Style:
    """What a terminal can show: `colour` for SGR sequences, `blocks` for more than ASCII."""

    colour: bool = False
    blocks: bool = True

    def paint(self, text: str, code: str) -> str:
        """Return `text` in the SGR `code` where there is colour."""
        return f"\x1b[{code}m{text}\x1b[0m" if self.colour and text else text

    def bar(self, fraction: float, columns: int) -> str:
        """Return a bar of so many columns."""
        full, empty = ("█", "░") if self.blocks else ("#", "-")
        filled = int(min(max(fraction, 0.0), 1.0) * columns)
        return self.paint(full * filled, "36") + self.paint(empty * (columns - filled), "2")

    def mark(self, name: str) -> str:
        """Return the mark of a phase that is `done`, `current` or `ahead`."""
        good, plain = {"done": ("✓", "x"), "current": ("▸", ">"), "ahead": ("·", ".")}[name]
        return good if self.blocks else plain


def cells(text: str) -> int:
    """Return how many columns a terminal needs for `text`."""
    return sum(_cells_of(character) for character in text)


def clip(text: str, columns: int) -> str:
    """Return `text` without control characters, cut to so many columns."""
    text = plain(text)
    if cells(text) <= columns:
        return text
    kept, used = [], 0
    for character in text:
        used += _cells_of(character)
        if used > columns - 1:
            break
        kept.append(character)
    return "".join(kept) + "~"[: max(0, columns)]


def _cells_of(character: str) -> int:
    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def frame(step: Step, elapsed: float, columns: int, style: Style) -> list[str]:
    """Return the one or two lines that show what a service does, `elapsed` seconds after the wait began.

    They are one column narrower than the terminal, since some wrap a line that fills it.
    """
    room = max(1, columns - 1)
    if step.outlook is None:
        return [clip(f"{clock(elapsed)} {step}", room)]
    fraction, seconds = step.outlook.fraction, step.outlook.seconds
    left = "" if seconds is None else rough(seconds)
    if columns < _NARROW:
        numbers = " ".join(filter(None, (percent(fraction), left)))
        return [clip(f"{clip(step.name, max(1, room - len(numbers) - 1))} {numbers}", room)]
    left = left and f"about {left} left"
    name = clip(step.name, room)
    first = clip(f"{name}  {step.progress}", room - len(left) - 2)
    gap = " " * (room - cells(first) - len(left))
    numbers = f" {percent(fraction):>4}  {clock(elapsed)}"
    bar = style.bar(fraction or 0.0, min(_WIDEST_BAR, room - len(numbers)))
    return [f"{style.paint(first[: len(name)], '1')}{first[len(name) :]}{gap}{left}", f"{bar}{numbers}"]


def overview(state: State, columns: int, style: Style, retry: str) -> Iterator[str]:
    """Yield the lines of `aerie status`, but for a diagnosis; `retry` is the command that starts a service anew."""
    phase, start = state["phase"], state["start"]
    since = f"since {state['since']}"
    model = clip(state["model"], max(1, columns - len(phase) - len(since) - 3))
    yield f"{model}  {style.paint(phase, _COLOURS.get(phase, '1;31'))} {since}".strip()
    if reason := how_it_is(state):
        yield clip(f"  {reason}", columns)
    if start and not start["ended"] and phase not in _DOWN:
        yield ""
        yield from (_phase_line(each, start["phase"], columns, style) for each in _phases(start))
        yield from (clip(f"  {text}", columns) for text in _prospects(start))
    yield ""
    yield from (clip(f"  {name:<13} {text}", columns) for name, text in _facts(state, retry))


def _phases(start: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the phases of a start, without those that it left out: eager engines compile nothing."""
    last = max((number for number, phase in enumerate(start["phases"]) if phase["began"]), default=-1)
    return [phase for number, phase in enumerate(start["phases"]) if phase["began"] or number > last]


def _phase_line(phase: Mapping[str, Any], current: str, columns: int, style: Style) -> str:
    if phase["ended"]:
        began, ended = (datetime.fromisoformat(phase[name]) for name in ("began", "ended"))
        took = clock((ended - began).total_seconds())
        return clip(f"  {style.mark('done')} {phase['name']:<{_NAMES}} {took:>7}  {phase['detail']}".rstrip(), columns)
    if phase["name"] != current:
        return clip(f"  {style.mark('ahead')} {phase['name']}", columns)
    name = f"  {style.mark('current')} {phase['name']:<{_NAMES}} "
    told = f" {percent(phase['fraction']):>4}  {phase['detail']}".rstrip()
    if phase["fraction"] is None or columns < len(name) + _PHASE_BAR + _NUMBERS:
        return style.paint(clip(f"{name}{told.strip()}".rstrip(), columns), "1")
    bar = style.bar(phase["fraction"], _PHASE_BAR)
    return f"{style.paint(name, '1')}{bar}{clip(told, columns - len(name) - _PHASE_BAR)}"


def _prospects(start: Mapping[str, Any]) -> Iterator[str]:
    if whole := str(Outlook(start["fraction"], start["remaining_seconds"])):
        yield whole
    if start["waiting_for"]:
        yield f"waiting for {start['waiting_for']}"
    if start["stalled"]:
        yield f"stalled: nothing has moved for {rough(start['silent_seconds'])}"


def _facts(state: State, retry: str) -> Iterator[tuple[str, str]]:
    serving, speculation, engine = state["serving"], state["speculation"], state["engine"]
    start, ended = state["start"], engine["exit"]
    if state["next_start"]:
        yield "next start", state["next_start"]
    if state["phase"] in _DOWN:
        yield ("start now" if state["next_start"] else "to go on"), retry
        if start and not start["ended"]:
            yield "ended in", start["phase"]
    if serving:
        yield "requests", f"{serving['requests_running']} running, {serving['requests_waiting']} waiting"
        yield "KV cache", f"{serving['kv_cache_usage']:.0%} in use"
        yield "tokens", f"{serving['generation_tokens_per_second']:.1f} a second"
    if speculation and speculation["drafts"]:
        length = 1 + speculation["accepted_tokens"] / speculation["drafts"]
        yield "speculation", f"{length:.2f} tokens a step over {speculation['drafts']} drafts"
    yield "engine", f"pid {engine['pid'] or '-'}, starts {engine['starts']}, failures in a row {state['failures']}"
    if ended:
        how = f"killed by {ended['signal']}" if ended["signal"] else f"exit code {ended['code']}"
        yield "last exit", f"{how} at {ended['at']}"
    if state["last_line"]:
        yield "last line", state["last_line"]
    yield "versions", ", ".join(f"{name} {version}" for name, version in state["versions"].items() if version)
