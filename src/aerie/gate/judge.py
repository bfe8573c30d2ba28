"""Judges a service by what it says over time: a deadline follows progress, not the clock. Pure.

The judge keeps nothing: what it must remember between two looks goes in and comes out as `Memory`. So a wait can be cut
into pieces by whoever may lose the connection, and goes on as if it had never been cut.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from enum import IntEnum
from typing import Any

from aerie.gate.state import NoState, State
from aerie.gate.words import Step, rough, step_of

# Seconds.
_NOBODY = 60.0  # without an answer until nobody is there
_UNREADY = 25.0  # of an engine that answers and fails the readiness check, which is asked anew every 10 s
_TOLD_AGAIN = 15.0  # between two lines that differ only in how far a step is


class Verdict(IntEnum):
    """How a wait ended: the exit codes of `aerie wait`; 2 is argparse's."""

    READY = 0
    FAILED = 1
    STALLED = 3
    NOBODY = 4


@dataclass(frozen=True, slots=True)
class Memory:
    """What is remembered between two looks; times in seconds of one clock, which may start anew with the machine."""

    began: float
    moved: float
    seen: str = ""
    """Digest of all that counts as a movement."""
    failures: int | None = None
    """Failures in a row that are no answer, for they began before the first look."""
    unready_since: float | None = None
    silent_since: float | None = None
    told: tuple[str, str] = ("", "")
    """Digests of name and progress of the step that was told last: the words may not be for everybody who sees `ps`."""
    told_at: float = 0.0

    @classmethod
    def at(cls, now: float) -> "Memory":
        """Return the memory of a wait that begins now."""
        return cls(began=now, moved=now)

    @classmethod
    def from_text(cls, text: str) -> "Memory":
        """Return what `to_text` wrote. Raises ValueError for any other text."""
        try:
            fields = json.loads(text)
            memory = cls(**fields | {"told": tuple(fields["told"])})
            _ = memory.began + memory.moved + memory.told_at
        except (LookupError, TypeError) as error:
            raise ValueError(f"not the memory of a wait: {error}") from None
        return memory

    def to_text(self) -> str:
        """Return it as one line of text."""
        return json.dumps(asdict(self), separators=(",", ":"))


@dataclass(frozen=True, slots=True)
class Judgement:
    """What one look came to: `verdict` None for wait on."""

    verdict: Verdict | None
    step: Step
    diagnosis: Mapping[str, Any] | None = None
    """The state's, where it is the reason for the verdict."""


def judge(memory: Memory, look: State | NoState, now: float, stall_timeout: float) -> tuple[Memory, Judgement]:
    """Return the new memory and the judgement of what was seen at `now`; times in seconds."""
    if memory.moved > now:  # the machine was started anew, and its clock with it
        memory = replace(memory, moved=now, unready_since=None, silent_since=None, told_at=now)
    if isinstance(look, NoState):
        return _judge_silence(memory, look, now)
    memory = _remember(replace(memory, silent_since=None), look, now)
    step = step_of(look)
    verdict = _verdict(memory, look, now, stall_timeout)
    match verdict:
        case None:
            return memory, Judgement(None, step)
        case Verdict.READY:
            return memory, Judgement(verdict, Step(f"ready after {max(0.0, now - memory.began):.0f} s"))
        case Verdict.STALLED:
            silent = max(now - memory.moved, (look["start"] or {}).get("silent_seconds") or 0.0)
            step = Step(f"nothing has moved for {rough(silent)}", str(step))
        case Verdict.FAILED if look["phase"] in {"starting", "checking"}:
            step = Step("the engine failed and is starting again", str(step))
    return memory, Judgement(verdict, step, _diagnosis(look, verdict))


def tell(memory: Memory, step: Step, now: float) -> tuple[Memory, bool]:
    """Return whether `step` is worth a line of its own, after those that were told before, and the new memory."""
    told = (_digest(step.name), _digest(step.progress))
    if told == memory.told or (told[0] == memory.told[0] and now - memory.told_at < _TOLD_AGAIN):
        return memory, False
    return replace(memory, told=told, told_at=now), True


def _judge_silence(memory: Memory, look: NoState, now: float) -> tuple[Memory, Judgement]:
    # From the first look without an answer, not from the last answer: nobody may have looked in between.
    since = now if memory.silent_since is None else memory.silent_since
    verdict = Verdict.NOBODY if look.final or now - since >= _NOBODY else None
    lasted = "" if verdict is None or look.final else f", for {rough(now - since)}"
    return replace(memory, silent_since=since), Judgement(verdict, Step(look.why + lasted))


def _remember(memory: Memory, state: State, now: float) -> Memory:
    unready = state["phase"] == "unready"
    # A failure from before may be mended by the next start, and an engine that was already dying when we came is one; a
    # failure that begins after the first look is an answer, also where nobody was looking when it began. Fewer
    # failures than before: somebody asked for a new beginning.
    before = state["failures"] + unready
    failures = before if memory.failures is None else min(memory.failures, before)
    since = (now if memory.unready_since is None else memory.unready_since) if unready else None
    # How long a start may stand still is the supervisor's to say, which sees more. As long as it looks, its
    # `silent_seconds` go up or back to zero; this judge gives up on a supervisor that has itself come to a halt.
    start = state["start"] or {}
    moving = [
        state["phase"],
        state["reason"],
        state["engine"]["starts"],
        start.get("moved"),
        start.get("silent_seconds"),
    ]
    seen = _digest(json.dumps(moving))
    moved = memory.moved if seen == memory.seen else now
    return replace(memory, seen=seen, moved=moved, failures=failures, unready_since=since)


def _verdict(memory: Memory, state: State, now: float, stall_timeout: float) -> Verdict | None:
    phase = state["phase"]
    if phase == "ready":
        return Verdict.READY
    stalled = bool(state["start"] and state["start"]["stalled"])
    if memory.failures is not None and state["failures"] > memory.failures:
        return Verdict.STALLED if stalled else Verdict.FAILED
    if phase in {"held", "stopping", "stopped"}:
        return Verdict.FAILED
    if memory.unready_since is not None and now - memory.unready_since >= _UNREADY:
        return Verdict.FAILED
    if (stalled and phase in {"starting", "checking"}) or now - memory.moved >= stall_timeout:
        return Verdict.STALLED
    return None


def _diagnosis(state: State, verdict: Verdict) -> Mapping[str, Any] | None:
    """Return the state's diagnosis where it is of this failure, and not of one before the start that is judged."""
    diagnosis: Mapping[str, Any] | None = state["diagnosis"]
    if diagnosis is None or state["phase"] in {"stopping", "stopped"}:
        return None
    if verdict is Verdict.STALLED and state["phase"] != "failed":
        if state["start"] is None:
            return None
        began, at = (datetime.fromisoformat(text) for text in (state["start"]["began"], diagnosis["at"]))
        return diagnosis if at >= began else None
    return diagnosis


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
