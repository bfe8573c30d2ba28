"""The old address of `Speculation`, until its users have moved to `aerie.engine_metrics`."""

from aerie.engine_metrics import Speculation, read_metrics


def read_counters(metrics: str) -> Speculation | None:
    """Return the counters of speculation, None where the engine does not speculate."""
    return read_metrics(metrics).speculation


__all__ = ["Speculation", "read_counters"]
