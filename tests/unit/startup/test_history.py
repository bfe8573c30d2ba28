"""What is kept of earlier starts."""

from dataclasses import replace

import pytest
from composed import Composed, new_reader
from hypothesis import given, settings
from hypothesis import strategies as st

from aerie.startup import History, Phase, Start, StartPhase, parse
from aerie.startup.history import kind_of

LOADING, COMPILING = StartPhase.LOADING_TARGET, StartPhase.COMPILING


def start(kind: str = "a", **seconds: float) -> Start:
    """A finished start whose phases took so long."""
    phases = [Phase(StartPhase[name], 0.0, took, 1.0) for name, took in seconds.items()]
    picture = new_reader().view(0.0)
    return replace(picture, phases=(*phases, Phase(StartPhase.PROFILING)), kind=kind, ended=sum(seconds.values()))


def recorded(*starts: Start) -> History:
    history = History()
    for each in starts:
        history = history.record(each)
    return history


def test_the_middle_of_the_last_starts_counts():
    history = recorded(*(start(COMPILING=took) for took in (900.0, 60.0, 62.0, 61.0)))
    assert history.expected("a") == {COMPILING: 61.5}


def test_a_slow_first_start_is_forgotten():
    history = recorded(*(start(COMPILING=took) for took in (900.0, 900.0, 900.0, 60.0, 60.0, 60.0)))
    assert history.expected("a") == {COMPILING: 60.0}


def test_phases_that_a_start_leaves_out_are_not_expected_of_the_next():
    history = recorded(start(COMPILING=60.0, LOADING_TARGET=800.0), start(LOADING_TARGET=900.0))
    assert history.expected("a") == {LOADING: 850.0}


def test_kinds_do_not_mix_and_an_unknown_one_knows_nothing():
    history = recorded(start("a", LOADING_TARGET=800.0), start("b", LOADING_TARGET=80.0))
    assert history.expected("a") == {LOADING: 800.0}
    assert history.expected("c") == {}
    assert History().expected("") == {}


def test_before_the_engine_has_told_the_newest_kind_is_expected():
    history = recorded(start("a", LOADING_TARGET=800.0), start("b", LOADING_TARGET=80.0))
    assert history.expected("") == {LOADING: 80.0}
    assert history.record(start("a", LOADING_TARGET=800.0)).expected("") == {LOADING: 800.0}


@pytest.mark.parametrize("unfinished", [replace(start(LOADING_TARGET=1.0), ended=None), start("", LOADING_TARGET=1.0)])
def test_a_start_that_did_not_end_teaches_nothing(unfinished):
    assert recorded(unfinished) == History()


def test_only_so_much_is_kept():
    history = recorded(*(start(f"kind {number // 10}", LOADING_TARGET=float(number)) for number in range(400)))
    assert len(history.starts) == 16
    assert {len(starts) for starts in history.starts.values()} == {5}
    assert "kind 39" in history.starts
    assert "kind 0" not in history.starts


def test_it_survives_being_written_and_read():
    history = recorded(start("a", LOADING_TARGET=800.25, COMPILING=60.0), start("b", LOADING_TARGET=80.0))
    assert History.from_json(history.to_json()) == history


@pytest.mark.parametrize(
    "data",
    [
        None,
        [],
        {},
        {"schema": 2, "starts": {"a": [{"compiling": 1.0}]}},
        {"schema": 1, "starts": []},
        {"schema": 1, "starts": {"a": {}}},
        {"schema": 1, "starts": {"a": [7, "x", None]}},
    ],
)
def test_what_is_no_history_is_none(data):
    assert History.from_json(data) == History()


def test_what_is_wrong_in_a_history_is_left_out():
    times = {
        "compiling": 1.0,
        "loading target": -1.0,
        "listening": True,
        "answering": "x",
        "dreaming": 3.0,
        "joining ranks": 1e9,
    }
    assert History.from_json({"schema": 1, "starts": {"a": [times]}}).expected("a") == {COMPILING: 1.0}
    assert History.from_json({"schema": 1, "starts": {"a": [{"compiling": float("nan")}]}}).expected("a") == {}


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.floats(), st.integers(), st.sampled_from(["a", "compiling"])),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(["a", "compiling", "x"]), inner)
    ),
    max_leaves=10,
)


@given(JSON)
@settings(max_examples=80, deadline=None)
def test_a_damaged_history_breaks_nothing(damage):
    for data in (damage, {"schema": 1, "starts": damage}, {"schema": 1, "starts": {"a": damage}}):
        history = History.from_json(data)
        assert all(seconds >= 0 for seconds in history.expected("").values())
        assert History.from_json(history.to_json()).expected("") == pytest.approx(history.expected(""), abs=0.001)


def kind(setup: Composed) -> str:
    (line,) = parse(setup.stages()[1][setup.engines[0]][0])
    return kind_of(line.text)


def test_a_kind_is_what_decides_how_long_a_start_takes():
    assert kind(Composed(drafter=False)) == (
        "0.32.0 data_parallel_size=1 device_config=cuda enforce_eager=False load_format=auto model='/models/kimi' "
        "pipeline_parallel_size=1 quantization=compressed-tensors speculative_config=None tensor_parallel_size=8"
    )
    kinds = [
        kind(setup)
        for setup in (
            Composed(),
            Composed(tensor=4),
            Composed(pipeline=2),
            Composed(release="0.31.0"),
            Composed(eager=True),
            Composed(drafter=False),
            Composed(device="cpu"),
        )
    ]
    assert len(set(kinds)) == len(kinds)


def test_a_line_that_lists_no_configuration_is_of_no_kind():
    assert kind_of("nothing of the sort") == ""
