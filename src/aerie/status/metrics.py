"""The state as Prometheus metrics. Pure.

How much of the drafts is accepted is not here: vLLM's own counters on the API port tell it over any span of time, where
a mean since the engine's start would hide each change (monitoring/alerts.yaml uses them).
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from aerie.supervisor.state import Phase


class _StateCollector(Collector):
    def __init__(self, state: Mapping[str, Any], now: datetime) -> None:
        self._state, self._now = state, now

    def collect(self) -> Iterable[Metric]:
        state = self._state
        yield InfoMetricFamily(
            "aerie_build",
            "The versions that run.",
            {name: version or "" for name, version in state["versions"].items()},
        )
        phase = state["phase"]
        yield GaugeMetricFamily("aerie_ready", "1 while the service can be used.", phase == Phase.READY)
        phases = GaugeMetricFamily("aerie_phase", "1 for what the service is doing, 0 for the rest.", labels=["phase"])
        for each in Phase:
            phases.add_metric([each], phase == each)
        yield phases
        yield CounterMetricFamily(
            "aerie_engine_starts", "Engines started since the container started.", state["engine"]["starts"]
        )
        yield GaugeMetricFamily(
            "aerie_engine_failures", "Failures in a row, which set the back-off.", state["failures"]
        )
        yield CounterMetricFamily(
            "aerie_engine_hangs", "Engines ended because they hung, since the container started.", state["hangs"]
        )
        failure = InfoMetricFamily(
            "aerie_last_failure",
            "What ended the last engine, from its end until the service has been ready again.",
            labels=["signature", "kind"],
        )
        if diagnosis := state["diagnosis"]:
            failure.add_metric([], {"signature": diagnosis["signature"] or "unknown", "kind": diagnosis["kind"]})
        yield failure
        if state["start"]:
            yield from self._start(state["start"])

    def _start(self, start: Mapping[str, Any]) -> Iterable[Metric]:
        """Yield how far the last start is or came; what only a start under way has is missing after it."""
        under_way = self._state["phase"] in {Phase.STARTING, Phase.CHECKING}
        until = self._now if under_way else datetime.fromisoformat(self._state["since"])
        seconds: defaultdict[str, float] = defaultdict(float)  # a phase can come twice
        for phase in start["phases"]:
            if phase["began"]:
                ended = datetime.fromisoformat(phase["ended"]) if phase["ended"] else until
                seconds[phase["name"]] += max(0.0, (ended - datetime.fromisoformat(phase["began"])).total_seconds())
        spent = GaugeMetricFamily(
            "aerie_start_phase_seconds", "How long each phase of the last start took so far.", labels=["phase"]
        )
        for name, value in seconds.items():
            spent.add_metric([name], value)
        yield spent
        if start["fraction"] is not None:
            yield GaugeMetricFamily(
                "aerie_start_progress_ratio", "How much of the last start is done.", start["fraction"]
            )
        if not under_way:
            return
        if start["remaining_seconds"] is not None:
            yield GaugeMetricFamily(
                "aerie_start_remaining_seconds",
                "The estimate of what the start will still take.",
                start["remaining_seconds"],
            )
        yield GaugeMetricFamily(
            "aerie_start_silent_seconds", "For how long nothing of the start has moved.", start["silent_seconds"]
        )
        yield GaugeMetricFamily(
            "aerie_start_stalled", "1 once nothing has moved for the whole stall timeout.", start["stalled"]
        )


def exposition(state: Mapping[str, Any], now: datetime) -> bytes:
    """Return the metrics of `state` (the form of `/status`) at `now` in Prometheus' text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_StateCollector(state, now))
    return generate_latest(registry)
