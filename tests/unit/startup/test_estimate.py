"""When a start will be ready: from its own pace, and from what earlier starts took."""

from itertools import pairwise

import pytest
from composed import Composed, new_reader
from hypothesis import given, settings
from hypothesis import strategies as st

from aerie.startup import Activity, History, ProcessActivity, Start, StartPhase, StartReader, parse

GB = 10**9
SETUP = Composed(tensor=2)
# Seconds in which each phase ends, as this host starts it.
TAKES = {
    StartPhase.CONFIGURING: 9.0,
    StartPhase.SPAWNING: 14.0,
    StartPhase.JOINING: 8.0,
    StartPhase.LOADING_TARGET: 800.0,
    StartPhase.LOADING_DRAFTER: 20.0,
    StartPhase.PROFILING: 40.0,
    StartPhase.COMPILING: 90.0,
    StartPhase.MEASURING_GRAPHS: 12.0,
    StartPhase.WARMING_UP: 24.0,
    StartPhase.CAPTURING_GRAPHS: 30.0,
    StartPhase.LISTENING: 3.0,
    StartPhase.ANSWERING: 2.0,
}
WHOLE = sum(TAKES.values())
LOOKS = 11


def played(
    history: History | None = None, setup: Composed = SETUP, slower: dict[StartPhase, float] | None = None
) -> list[Start]:
    """Play a start in which each phase takes its time and says its lines evenly; look at it eleven times in each."""
    says: dict[StartPhase, list[str]] = {phase: [] for phase in StartPhase}
    probe = new_reader()
    for text in setup.lines():
        said(probe, text, 0.0)
        says[probe.view(0.0).phase].append(text)
    reader, at, pictures = new_reader(history=history), 0.0, []
    for phase, texts in says.items():
        if phase is StartPhase.ANSWERING:
            reader.answered(at)
        elif not texts:
            continue
        seconds = TAKES[phase] * (slower or {}).get(phase, 1.0)
        spoken = 0
        for look in range(LOOKS):
            now = at + seconds * look / LOOKS
            while spoken < len(texts) and at + seconds * spoken / len(texts) <= now:
                said(reader, texts[spoken], at + seconds * spoken / len(texts))
                spoken += 1
            pictures.append(reader.view(now))
        for text in texts[spoken:]:
            said(reader, text, at + seconds)
        at += seconds
    reader.ready(at)
    return [*pictures, reader.view(at)]


def said(reader: StartReader, text: str, at: float) -> None:
    for line in parse(text):
        reader.say(line, at)


def at_of(start: Start) -> float:
    return start.eta - start.remaining_seconds


def current(start: Start) -> tuple[float | None, str]:
    return next((each.fraction, each.detail) for each in start.phases if each.name is start.phase)


def in_phase(pictures: list[Start], phase: StartPhase) -> list[Start]:
    return [start for start in pictures if start.phase is phase and start.ended is None]


@pytest.fixture(scope="module")
def first():
    return played()


@pytest.fixture(scope="module")
def known(first):
    return History().record(first[-1])


def test_the_story_is_played_as_it_is_told(first):
    assert {phase.name: phase.seconds for phase in first[-1].phases} == pytest.approx(TAKES, rel=0.15, abs=2)
    assert first[-1].ended == WHOLE


def test_nothing_is_promised_where_nothing_is_known(first):
    for phase in (StartPhase.CONFIGURING, StartPhase.SPAWNING, StartPhase.JOINING):
        assert {start.remaining_seconds for start in in_phase(first, phase)} == {None}


def test_the_first_start_learns_from_its_own_bar(first):
    loading = in_phase(first, StartPhase.LOADING_TARGET)
    assert loading[0].eta is None
    assert [start.eta for start in loading[3:]] == pytest.approx([WHOLE] * 8, rel=0.12)  # the rest is a guess
    assert {start.eta is None for start in in_phase(first, StartPhase.COMPILING)} == {False}


def test_a_load_that_is_short_promises_nothing_for_all_the_rest():
    pictures = played(slower={StartPhase.LOADING_TARGET: 0.01})
    assert {start.eta for start in pictures} == {None}


def test_a_second_start_knows_its_end_from_the_beginning(known):
    pictures = played(known)
    assert pictures[0].eta == pytest.approx(WHOLE, rel=0.01)
    assert [start.eta for start in pictures[:-1]] == pytest.approx([WHOLE] * (len(pictures) - 1), rel=0.08)


def test_fractions_are_shares_of_the_time_that_earlier_starts_took(known):
    for start in played(known)[:-1]:
        assert start.fraction == pytest.approx(at_of(start) / WHOLE, abs=0.06)


def test_a_slow_phase_corrects_the_estimate_upward(known):
    pictures = played(known, slower={StartPhase.LOADING_TARGET: 3.0})
    loading = in_phase(pictures, StartPhase.LOADING_TARGET)
    assert loading[-1].eta == pytest.approx(WHOLE + 2 * TAKES[StartPhase.LOADING_TARGET], rel=0.05)
    assert loading[-1].eta > loading[5].eta > loading[1].eta


def test_a_phase_without_a_bar_that_takes_longer_than_ever_corrects_it_too(known):
    pictures = played(known, slower={StartPhase.COMPILING: 5.0})
    compiling = in_phase(pictures, StartPhase.COMPILING)
    assert compiling[-1].eta >= compiling[-4].eta > compiling[0].eta + TAKES[StartPhase.COMPILING]


def test_between_two_shards_it_counts_down_and_up_once_the_next_is_late():
    reader = new_reader()
    bar = "Loading safetensors checkpoint shards:  10% Completed | {}/10 [00:10<01:30, 100.00s/it]"
    for done in range(6):
        said(reader, bar.format(done), done * 100.0)
    left = [reader.view(500.0 + later).remaining_seconds for later in (0, 50, 100, 200, 300)]
    assert left[0] - left[1] == pytest.approx(50)
    assert left[1] - left[2] == pytest.approx(50)
    assert left[4] > left[3] > left[2]


def test_another_kind_of_start_is_not_comparable(known):
    other = played(known, Composed(tensor=1))
    spawned = [start for start in other if start.kind]
    assert spawned[0].eta is None
    assert spawned[0].kind != first_kind(known)


def first_kind(history: History) -> str:
    return next(iter(history.starts))


@given(st.dictionaries(st.sampled_from(list(StartPhase)), st.floats(min_value=0.01, max_value=20), max_size=4))
@settings(max_examples=5, deadline=None)
def test_whatever_a_start_takes_the_estimate_is_sane(known, slower):
    for pictures in (played(slower=slower), played(known, slower=slower)):
        for before, after in pairwise(pictures):
            assert before.fraction <= after.fraction <= 1
            assert after.remaining_seconds is None or after.remaining_seconds >= 0


def activity(*held: int, gpus: bool = True) -> Activity:
    processes = tuple(
        ProcessActivity(SETUP.pid(rank), f"VLLM::{rank}", "R", size, 0, 0 if gpus else size, 0.0)
        for rank, size in zip(SETUP.ranks, held, strict=True)
    )
    return Activity(processes, held if gpus else ())


@pytest.mark.parametrize("gpus", [True, False])
def test_the_phase_is_as_far_as_the_slowest_rank(gpus):
    reader = new_reader()
    for text in [line for stage in SETUP.stages()[:5] for said in stage.values() for line in said]:
        said(reader, text, 1.0)
    reader.observe(activity(GB, GB, gpus=gpus), 2.0)
    bar = "Loading safetensors checkpoint shards:  50% Completed | 32/64 [00:10<00:10, 1.00it/s]"
    reader.observe(activity(41 * GB, 11 * GB, gpus=gpus), 10.0)
    said(reader, bar, 10.0)
    start = reader.view(10.0)
    assert current(start) == (0.125, "32 of 64 shards")
    assert start.waiting_for == "rank 1: 10.0 GB loaded, rank 0 40.0 GB"
    reader.observe(activity(41 * GB, 38 * GB, gpus=gpus), 11.0)  # stages of a pipeline differ so much
    start = reader.view(11.0)
    assert current(start) == (0.5, "32 of 64 shards")
    assert start.waiting_for is None


def test_a_bar_that_falls_takes_nothing_back():
    reader = new_reader()
    bar = "Loading safetensors checkpoint shards:  50% Completed | {}/64 [00:10<00:10, 1.00it/s]"
    for at, done in ((1.0, 0), (2.0, 32), (3.0, 16)):
        said(reader, bar.format(done), at)
    assert current(reader.view(3.0))[0] == 0.5


def test_the_drafter_does_not_begin_where_the_target_ended():
    reader = new_reader()
    for text in [line for stage in SETUP.stages()[:7] for told in stage.values() for line in told]:
        said(reader, text, 1.0)
    reader.observe(activity(0, 0), 2.0)
    start = reader.view(2.0)
    assert (start.phase, *current(start)) == (StartPhase.LOADING_DRAFTER, None, "")


def test_what_ranks_hold_is_not_compared_before_it_is_much():
    reader = new_reader()
    for text in [line for stage in SETUP.stages()[:5] for said in stage.values() for line in said]:
        said(reader, text, 1.0)
    reader.observe(activity(0, 0), 2.0)
    reader.observe(activity(GB // 2, 0), 3.0)
    assert reader.view(3.0).waiting_for is None


def test_what_a_rank_held_before_loading_is_no_weight():
    reader = new_reader()
    reader.observe(activity(0, 0), 0.0)
    reader.observe(activity(9 * GB, 1 * GB), 1.0)
    for text in [line for stage in SETUP.stages()[:5] for told in stage.values() for line in told]:
        said(reader, text, 1.0)
    reader.observe(activity(19 * GB, 11 * GB), 2.0)
    assert reader.view(2.0).waiting_for is None


def test_gpus_of_which_nobody_knows_the_rank_are_not_compared():
    reader = new_reader()
    for text in [line for stage in SETUP.stages()[:5] for said in stage.values() for line in said]:
        said(reader, text, 1.0)
    for at, held in ((2.0, 0), (3.0, 40 * GB)):
        reader.observe(Activity(activity(held, 0, gpus=False).processes, (held,)), at)
    assert reader.view(3.0).waiting_for is None


def test_a_rank_that_draws_no_bar_shows_what_has_been_read():
    reader = new_reader()
    said(reader, "Loading model from scratch...", 1.0)
    reader.observe(activity(0, 0), 2.0)
    reader.observe(activity(30 * GB, 12 * GB), 10.0)
    assert current(reader.view(10.0)) == (None, "42.0 GB read")
