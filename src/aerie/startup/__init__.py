"""What a starting engine says: its output lines, read into a step, a fraction and an error. Pure, no I/O."""

from aerie.startup.reader import Report, StartupReader

__all__ = ["Report", "StartupReader"]
