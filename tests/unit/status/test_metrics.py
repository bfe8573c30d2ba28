"""The state for Prometheus."""

import re
from datetime import UTC, datetime
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from states import EXAMPLES, Examples

import aerie
from aerie.status.metrics import exposition

NOW = datetime(2026, 11, 29, 22, 0, tzinfo=UTC)
EXAMPLE = Examples(NOW)


def samples(state):
    families = text_string_to_metric_families(exposition(state, NOW).decode())
    return {(each.name, *each.labels.values()): each.value for family in families for each in family.samples}


def names(state):
    return {name for name, *_labels in samples(state)}


@pytest.mark.parametrize("name", EXAMPLES)
def test_exactly_one_phase_is_on(name):
    state = getattr(EXAMPLE, name)()
    on = [labels for (metric, *labels), value in samples(state).items() if metric == "aerie_phase" and value]
    assert on == [[state["phase"]]]
    assert samples(state)["aerie_ready",] == (state["phase"] == "ready")


def test_counts_and_versions():
    found = samples(EXAMPLE.failed() | {"hangs": 3})
    assert found["aerie_engine_starts_total",] == 2
    assert found["aerie_engine_failures",] == 2
    assert found["aerie_engine_hangs_total",] == 3
    assert found["aerie_build_info", aerie.__version__, "0.32.0"] == 1


def test_a_start_under_way_is_measured():
    found = samples(EXAMPLE.loading())
    assert found["aerie_start_progress_ratio",] == pytest.approx(0.34, abs=0.005)
    assert found["aerie_start_remaining_seconds",] == pytest.approx(706, abs=1)
    assert found["aerie_start_silent_seconds",] == 1
    assert found["aerie_start_stalled",] == 0
    assert found["aerie_start_phase_seconds", "spawning workers"] == 14
    assert found["aerie_start_phase_seconds", "loading target"] == pytest.approx(333, abs=1)
    assert ("aerie_start_phase_seconds", "loading drafter") not in found


def test_a_phase_that_comes_twice_is_one_sum():
    state = EXAMPLE.loading()
    state["start"]["phases"][1]["name"] = "configuring"
    assert samples(state)["aerie_start_phase_seconds", "configuring"] == 9 + 14


def test_a_stall_is_seen():
    assert samples(EXAMPLE.stalled())["aerie_start_stalled",] == 1


@pytest.mark.parametrize("name", ["ready", "failed", "held"])
def test_after_a_start_nothing_of_it_moves_on(name):
    state = getattr(EXAMPLE, name)()
    assert not names(state) & {"aerie_start_remaining_seconds", "aerie_start_silent_seconds", "aerie_start_stalled"}
    assert "aerie_start_phase_seconds" in names(state)


def test_the_phase_that_failed_ends_with_the_failure():
    assert samples(EXAMPLE.failed())["aerie_start_phase_seconds", "loading drafter"] == 21 * 0.5


def test_no_start_has_no_measures():
    assert not {name for name in names(EXAMPLE.refused()) if name.startswith("aerie_start_")}


def test_the_last_failure_names_its_signature():
    assert samples(EXAMPLE.held())["aerie_last_failure_info", "configuration", "eagle3-target-not-listed"] == 1
    assert samples(EXAMPLE.failed())["aerie_last_failure_info", "crash", "unknown"] == 1
    assert "aerie_last_failure_info" not in names(EXAMPLE.ready())


def test_the_documentation_has_these_metrics():
    text = exposition(EXAMPLE.starting_again(), NOW).decode()
    told = {}
    for line in text.splitlines():
        if line.startswith("# HELP"):
            name, meaning = line.split(" ", 3)[2:]
        elif line.startswith("# TYPE"):
            told[name] = [set(), line.split()[3], meaning]
        else:
            told[name][0] |= set(re.findall(r'(\w+)="', line))
    page = (Path(__file__).parents[3] / "docs/monitoring.md").read_text()
    documented = {
        name: [set(re.findall(r"\w+", labels)), kind, meaning]
        for name, labels, kind, meaning in re.findall(
            r"^\| `(aerie_\w+)` \| (.*) \| (\w+) \| (.*) \|$", page, re.MULTILINE
        )
    }
    assert documented == told
