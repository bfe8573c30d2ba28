"""What a starting engine says and does, read into phases, an estimate of their end, and a stall. Pure, no I/O."""

from aerie.startup.activity import Activity, ProcessActivity
from aerie.startup.history import History
from aerie.startup.lines import Line, LineReader, parse
from aerie.startup.phases import Phase, Start, StartPhase
from aerie.startup.start import StartReader

__all__ = [
    "Activity",
    "History",
    "Line",
    "LineReader",
    "Phase",
    "ProcessActivity",
    "Start",
    "StartPhase",
    "StartReader",
    "parse",
]
