"""The reducer: what each event makes of a state."""

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from aerie.engine_metrics import Serving, Speculation
from aerie.supervisor.state import (
    Answered,
    Ended,
    Held,
    Phase,
    Progressed,
    Refused,
    RetryAsked,
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
DRAFTED = Speculation(10, 30, 15, (8, 5, 2))
BUSY = Serving(3, 1, 0.12, 93.1, 10.0)
LOADING = {"phase": "loading target", "fraction": 0.25}
WRONG = {"kind": "configuration", "title": "wrong"}
BROKEN = {"kind": "crash", "title": "broken"}
HUNG = {"kind": "hung", "title": "hung"}
CRASH = Ended("vllm serve ended with exit code 1: broken", 1, BROKEN)


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
    state = after(Started(7), Progressed(LOADING, "bar"))
    assert (state.phase, state.start, state.last_line) == (Phase.STARTING, LOADING, "bar")


def test_a_start_is_told_to_its_end_and_stays_but_not_what_a_serving_engine_says():
    done = LOADING | {"phase": None}
    state = after(Started(7), Progressed(LOADING, "bar"), *READY[1:], Progressed(done, "a prompt of somebody"))
    assert (state.start, state.last_line) == (done, "bar")
    state = after(CRASH, state=state)
    assert state.start == done
    assert after(Started(8), state=state).start is None


def test_a_check_that_fails_leaves_it_unready_until_one_passes():
    refused = after(Started(7), Answered(), Refused("wrong name"), Answered())
    assert (refused.phase, refused.reason, refused.since) == (Phase.UNREADY, "wrong name", T0 + timedelta(seconds=2))
    ready = after(Served(None), state=refused)
    assert (ready.phase, ready.reason) == (Phase.READY, None)


def test_a_repeated_refusal_does_not_move_since():
    state = after(*READY, Refused("/health answered 503"), Refused("/health cannot be reached"))
    assert (state.since, state.reason) == (T0 + timedelta(seconds=3), "/health cannot be reached")


@pytest.mark.parametrize(
    ("status", "code", "signal"), [(1, 1, None), (0, 0, None), (-9, None, "SIGKILL"), (-40, None, "signal 40")]
)
def test_an_end_is_a_failure_with_its_exit_and_diagnosis(status, code, signal):
    state = after(*READY, Ended("it ended so: broken", status, BROKEN))
    assert (state.phase, state.reason, state.diagnosis) == (Phase.FAILED, "it ended so: broken", BROKEN)
    assert (state.pid, state.speculation, state.serving) == (None, None, None)
    assert (state.exit.code, state.exit.signal) == (code, signal)


def test_an_engine_that_the_supervisor_ended_has_no_exit_of_its_own():
    state = after(Started(7), CRASH, Started(8), Ended("VLLM::Worker_TP1 (pid 9) is gone", None, BROKEN))
    assert (state.exit, state.phase) == (None, Phase.FAILED)


def test_a_diagnosis_stays_until_the_service_has_been_ready_again():
    state = after(Started(7), CRASH, Started(8), Answered())
    assert state.diagnosis == BROKEN
    assert after(Served(None), state=state).diagnosis is None
    assert after(Ended("it ended so", 0), state=state).diagnosis is None, "another failure's diagnosis"


def test_hangs_are_counted():
    assert after(*READY, Ended("hung: x", None, HUNG), Started(8), CRASH).hangs == 1


def test_the_pause_before_the_next_start_grows_and_stays():
    pauses = []
    state = State(since=T0)
    for _ in range(5):
        state = after(Started(7), CRASH, state=state)
        pauses.append((state.next_start - T0 - timedelta(seconds=1)).total_seconds())
    assert pauses == [10, 60, 300, 300, 300]
    assert state.failures == 5
    assert after(Started(8), state=state).next_start is None


@pytest.mark.parametrize(("minutes", "failures"), [(9.9, 3), (10, 1)])
def test_ten_minutes_of_service_forgive_earlier_failures(minutes, failures):
    state = after(*READY, state=replace(State(since=T0), failures=2))
    state = reduce(state, Served(DRAFTED), state.since + timedelta(minutes=minutes))
    assert reduce(state, CRASH, T0).failures == failures


@pytest.mark.parametrize("ended", [Ended("usage", 2, BROKEN), Ended("wrong", 1, WRONG), Ended("wrong", None, WRONG)])
def test_what_another_start_cannot_cure_is_held_and_not_tried_again(ended):
    state = after(Started(7), ended)
    assert (state.phase, state.reason, state.diagnosis) == (Phase.HELD, ended.reason, ended.diagnosis)
    assert (state.next_start, state.failures) == (None, 0)


@pytest.mark.parametrize("ended", [Ended("usage", 2, BROKEN), Ended("wrong", 1, WRONG), Ended("wrong", None, WRONG)])
def test_what_has_served_is_tried_again_whatever_its_end_looks_like(ended):
    state = after(*READY, Refused("/health answered 503"), ended)
    assert (state.phase, state.failures) == (Phase.FAILED, 1)
    assert state.next_start
    assert after(Started(8), Answered(), ended, state=state).phase is Phase.HELD, "that start has never been ready"


def test_a_stuck_driver_is_held_though_the_engine_has_served():
    assert after(*READY, CRASH, Held("pid 9 survives SIGKILL", BROKEN)).phase is Phase.HELD


def test_a_retry_ends_a_hold_and_a_pause_and_touches_nothing_else():
    for ended in (CRASH, Ended("wrong", 1, WRONG)):
        state = after(Started(7), ended)
        retried = after(RetryAsked(), state=state)
        assert (retried.phase, retried.reason, retried.next_start) == (Phase.STARTING, None, None)
        assert (retried.failures, retried.diagnosis) == (state.failures, state.diagnosis)
    assert after(*READY, RetryAsked()) == after(*READY)


def test_a_stuck_driver_is_held_though_a_start_was_due():
    state = after(Started(7), CRASH, Held("pid 9 survives SIGKILL", BROKEN | {"evidence": ["pid 9"]}))
    assert (state.phase, state.next_start) == (Phase.HELD, None)
    assert state.diagnosis["evidence"] == ["pid 9"]


def test_what_a_check_refuses_is_not_explained_by_an_older_crash():
    assert after(Started(7), CRASH, Held("key file /x does not exist")).diagnosis is None


def test_a_configuration_error_is_held():
    state = after(Held("key file /x does not exist"))
    assert (state.phase, state.reason) == (Phase.HELD, "key file /x does not exist")


@pytest.mark.parametrize("late", [Answered(), Served(None), Refused("/health answered 503"), Ended("ended", 0)])
def test_nothing_leads_out_of_a_stop(late):
    assert after(*READY, StopAsked(), late).phase is Phase.STOPPING
    assert after(*READY, StopAsked(), Stopped(), late).phase is Phase.STOPPED


def test_a_stop_drops_the_next_start():
    assert after(Started(7), CRASH, StopAsked(), Stopped()).next_start is None


def test_the_json_form_is_the_contract():
    events = (Started(7), Progressed(LOADING, "bar"), Answered(), Served(DRAFTED, BUSY))
    state = to_json(after(*events, Ended("killed", -9, BROKEN)), {"aerie": "1", "vllm": None}, supervisor=5)
    assert json.loads(json.dumps(state)) == {
        "schema": 2,
        "phase": "failed",
        "since": "2026-11-29T12:00:04Z",
        "reason": "killed",
        "model": "kimi",
        "models": [],
        "start": LOADING,
        "warming": None,
        "loader": None,
        "supervisor": {"pid": 5},
        "engine": {
            "pid": None,
            "starts": 1,
            "started": "2026-11-29T12:00:00Z",
            "exit": {"code": None, "signal": "SIGKILL", "at": "2026-11-29T12:00:04Z"},
        },
        "diagnosis": BROKEN,
        "serving": None,
        "speculation": None,
        "last_line": "bar",
        "next_start": "2026-11-29T12:00:14Z",
        "failures": 1,
        "hangs": 0,
        "versions": {"aerie": "1", "vllm": None},
    }
    state = to_json(after(*events), {}, 5)
    assert json.loads(json.dumps(state["speculation"])) == {
        "drafts": 10,
        "draft_tokens": 30,
        "accepted_tokens": 15,
        "accepted_by_position": [8, 5, 2],
    }
    assert state["serving"] == {
        "requests_running": 3,
        "requests_waiting": 1,
        "kv_cache_usage": 0.12,
        "generation_tokens_per_second": 93.1,
        "prompt_tokens_per_second": 10.0,
    }


def saved(**changes):
    return to_json(after(Started(7), CRASH), {}, 5) | changes


def test_a_killed_supervisor_goes_on_with_its_back_off():
    state = resume(saved(), State(since=T0 + timedelta(seconds=5)))
    assert (state.phase, state.failures, state.diagnosis) == (Phase.FAILED, 1, BROKEN)
    assert state.next_start == datetime(2026, 11, 29, 12, 0, 11, tzinfo=UTC)


@pytest.mark.parametrize(
    ("changes", "later"),
    [({"phase": "stopped"}, 5), ({}, 3600), ({}, -3600), ({"next_start": None}, 5), ({"next_start": "soon"}, 5)],
)
def test_a_person_or_time_ends_the_pause_but_the_count_stays(changes, later):
    state = resume(saved(**changes), State(since=T0 + timedelta(seconds=later)))
    assert (state.phase, state.failures, state.next_start) == (Phase.STARTING, 1, None)


@pytest.mark.parametrize("content", [{}, saved(failures="many"), saved(failures=-1), saved(schema=1), {"schema": 2}])
def test_an_unreadable_state_counts_as_none(content):
    fresh = State(since=T0)
    assert resume(content, fresh) == fresh
