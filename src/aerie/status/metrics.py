"""The state as Prometheus metrics. Pure."""

from collections.abc import Iterable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from aerie.supervisor.state import Phase


class _StateCollector(Collector):
    def __init__(self, state: Mapping[str, Any]) -> None:
        self._state = state

    def collect(self) -> Iterable[Metric]:
        phase = self._state["phase"]
        yield GaugeMetricFamily("aerie_ready", "1 while the service can be used.", value=phase == Phase.READY)
        phases = GaugeMetricFamily("aerie_phase", "1 for what the service is doing, 0 for the rest.", labels=["phase"])
        for each in Phase:
            phases.add_metric([each], phase == each)
        yield phases
        starts = self._state["engine"]["starts"]
        yield CounterMetricFamily("aerie_engine_starts", "Engines started since the container started.", value=starts)
        failures = self._state["failures"]
        yield GaugeMetricFamily("aerie_engine_failures", "Failures in a row, which set the back-off.", value=failures)


def exposition(state: Mapping[str, Any]) -> bytes:
    """Return the metrics of `state` (the form of `/status`) in Prometheus' text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_StateCollector(state))
    return generate_latest(registry)
