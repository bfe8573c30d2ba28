"""The reducer: what each event makes of a state."""

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from aerie.speculation import Speculation
from aerie.supervisor.state import (
    Answered,
    Ended,
    Held,
    Phase,
    Refused,
    Said,
    Served,
    Started,
    State,
    StopAsked,
    Stopped,
    reduce,
    resume,
    to_json,
)

T0 = datetime(2026, 11, 29, 12, 0, 0, 900_000, tzinfo=UTC)
DRAFTED = Speculation(10, 30, 15)


def after(*events, state=None, gap=timedelta(seconds=1)):
    """Return the state after the events, one every `gap` from T0."""
    state = state or State(since=T0, model="kimi")
    for number, event in enumerate(events):
        state = reduce(state, event, T0 + number * gap)
    return state


READY = (Started(7), Answered(), Served(DRAFTED))


def test_a_start_that_succeeds():
    state = after(*READY)
    assert (state.phase, state.pid, state.starts, state.speculation) == (Phase.READY, 7, 1, DRAFTED)
    assert state.since == T0 + timedelta(seconds=2)


def test_progress_is_told_while_it_starts():
    state = after(Started(7), Said("loading target", 0.25, "bar", None))
    assert (state.phase, state.step, state.progress, state.last_line) == (Phase.STARTING, "loading target", 0.25, "bar")


def test_what_a_serving_engine_says_is_not_shown_but_for_errors():
    state = after(*READY, Said("x", 0.5, "a prompt of somebody", "ValueError: x"))
    assert (state.step, state.progress, state.last_line, state.last_error) == ("", None, "", "ValueError: x")


def test_a_check_that_fails_leaves_it_unready_until_one_passes():
    refused = after(Started(7), Answered(), Refused("wrong name"), Answered())
    assert (refused.phase, refused.reason, refused.since) == (Phase.UNREADY, "wrong name", T0 + timedelta(seconds=2))
    ready = after(Served(None), state=refused)
    assert (ready.phase, ready.reason) == (Phase.READY, None)


def test_a_repeated_refusal_does_not_move_since():
    state = after(*READY, Refused("/health answered 503"), Refused("/health cannot be reached"))
    assert (state.since, state.reason) == (T0 + timedelta(seconds=3), "/health cannot be reached")


@pytest.mark.parametrize(
    ("status", "code", "signal", "reason"),
    [
        (1, 1, None, "vllm serve ended with exit code 1: OSError: x"),
        (0, 0, None, "vllm serve ended with exit code 0: OSError: x"),
        (-9, None, "SIGKILL", "vllm serve was killed by SIGKILL: OSError: x"),
        (-40, None, "signal 40", "vllm serve was killed by signal 40: OSError: x"),
    ],
)
def test_an_end_is_a_failure_with_its_exit_and_error(status, code, signal, reason):
    state = after(*READY, Ended(status, "OSError: x"))
    assert (state.phase, state.reason, state.pid, state.speculation) == (Phase.FAILED, reason, None, None)
    assert (state.exit.code, state.exit.signal) == (code, signal)


def test_an_end_is_not_blamed_on_an_earlier_runs_error():
    state = after(Started(7), Ended(1, "ValueError: of the first"), Started(8), Ended(-9))
    assert state.reason == "vllm serve was killed by SIGKILL"


def test_the_pause_before_the_next_start_grows_and_stays():
    pauses = []
    state = State(since=T0)
    for _ in range(5):
        state = after(Started(7), Ended(1), state=state)
        pauses.append((state.next_start - T0 - timedelta(seconds=1)).total_seconds())
    assert pauses == [10, 60, 300, 300, 300]
    assert state.failures == 5
    assert after(Started(8), state=state).next_start is None


@pytest.mark.parametrize(("minutes", "failures"), [(9.9, 3), (10, 1)])
def test_ten_minutes_of_service_forgive_earlier_failures(minutes, failures):
    state = after(*READY, state=replace(State(since=T0), failures=2))
    state = reduce(state, Served(DRAFTED), state.since + timedelta(minutes=minutes))
    assert reduce(state, Ended(1), T0).failures == failures


def test_a_usage_error_is_held_and_not_tried_again():
    state = after(Started(7), Ended(2, "vllm: error: unrecognized arguments: --x"))
    assert (state.phase, state.next_start, state.failures) == (Phase.HELD, None, 0)
    assert "unrecognized arguments: --x; correct" in state.reason


def test_a_configuration_error_is_held():
    state = after(Held("key file /x does not exist"))
    assert (state.phase, state.reason) == (Phase.HELD, "key file /x does not exist")


@pytest.mark.parametrize("late", [Answered(), Served(None), Refused("/health answered 503"), Ended(0)])
def test_nothing_leads_out_of_a_stop(late):
    assert after(*READY, StopAsked(), late).phase is Phase.STOPPING
    assert after(*READY, StopAsked(), Stopped(), late).phase is Phase.STOPPED


def test_a_stop_drops_the_next_start():
    assert after(Started(7), Ended(1), StopAsked(), Stopped()).next_start is None


def test_the_json_form_is_the_contract():
    state = to_json(after(*READY, Ended(-9)), {"aerie": "1", "vllm": None})
    assert json.loads(json.dumps(state)) == {
        "schema": 1,
        "phase": "failed",
        "step": "",
        "progress": None,
        "reason": "vllm serve was killed by SIGKILL",
        "since": "2026-11-29T12:00:03Z",
        "model": "kimi",
        "engine": {
            "pid": None,
            "starts": 1,
            "started": "2026-11-29T12:00:00Z",
            "exit": {"code": None, "signal": "SIGKILL", "at": "2026-11-29T12:00:03Z"},
        },
        "last_error": None,
        "last_line": "",
        "next_start": "2026-11-29T12:00:13Z",
        "failures": 1,
        "speculation": None,
        "versions": {"aerie": "1", "vllm": None},
    }
    assert to_json(after(*READY), {})["speculation"] == {"drafts": 10, "draft_tokens": 30, "accepted_tokens": 15}


def saved(**changes):
    return to_json(after(Started(7), Ended(1)), {}) | changes


def test_a_killed_supervisor_goes_on_with_its_back_off():
    state = resume(saved(), State(since=T0 + timedelta(seconds=5)))
    assert (state.phase, state.failures) == (Phase.FAILED, 1)
    assert state.next_start == datetime(2026, 11, 29, 12, 0, 11, tzinfo=UTC)


@pytest.mark.parametrize(
    ("changes", "later"),
    [({"phase": "stopped"}, 5), ({}, 3600), ({}, -3600), ({"next_start": None}, 5), ({"next_start": "soon"}, 5)],
)
def test_a_person_or_time_ends_the_pause_but_the_count_stays(changes, later):
    state = resume(saved(**changes), State(since=T0 + timedelta(seconds=later)))
    assert (state.phase, state.failures, state.next_start) == (Phase.STARTING, 1, None)


@pytest.mark.parametrize("content", [{}, {"failures": "many"}, {"failures": -1}])
def test_an_unreadable_state_counts_as_none(content):
    fresh = State(since=T0)
    assert resume(content, fresh) == fresh
