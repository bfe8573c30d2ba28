"""Starts as engines told them, recorded and composed, read into phases."""

import random
import sys
from itertools import groupby, pairwise
from pathlib import Path

import pytest
from composed import BARS, Composed, new_reader
from hypothesis import given, settings
from hypothesis import strategies as st

from aerie.startup import Activity, LineReader, Start, StartPhase, parse

LOGS = Path(__file__).parents[2] / "fixtures" / "logs"
PHASES = list(StartPhase)

BEGIN = ["configuring", "spawning workers", "joining ranks", "loading target 0 of 1", "loading target 1 of 1"]
DRAFTER = ["loading drafter 0 of 1", "loading drafter 1 of 1"]
COMPILED = ["compiling target", "compiling drafter", "capturing graphs (measuring)", "warming up", "capturing graphs"]
RECORDED = {
    "vllm-0.17.1-healthy-then-engine-dead": [*BEGIN, *DRAFTER, "warming up", "listening"],
    "vllm-0.17.1-layer1-whitelist": BEGIN[:1],
    "vllm-0.17.1-layer2-image-token-index": [*BEGIN, *DRAFTER],
    "vllm-0.17.1-layer3-forward-unpatched": [*BEGIN, *DRAFTER, "warming up"],
    "vllm-0.17.1-layer3-supports-eagle3": [*BEGIN, *DRAFTER],
    "vllm-0.32.0-cpu-healthy-eager": [*BEGIN, "profiling memory", "warming up", "listening"],
    "vllm-0.32.0-cpu-healthy-compiled": [*BEGIN, *DRAFTER, "compiling", "warming up", "listening"],
    "vllm-0.32.0-cpu-healthy-tp2": [*BEGIN, *DRAFTER, "profiling memory", "warming up", "listening"],
    "vllm-0.32.0-cpu-no-common-block-size": [*BEGIN, *DRAFTER, "profiling memory", "warming up"],
    "vllm-0.32.0-h200-healthy-eager": [*BEGIN, *DRAFTER, "profiling memory", "warming up", "listening"],
    "vllm-0.32.0-h200x2-healthy-tp2": [
        *BEGIN,
        *DRAFTER,
        "profiling memory",
        "compiling target",
        "compiling drafter",
        "warming up",  # its KV cache has a given size: nothing is measured
        "capturing graphs",
        "listening",
    ],
    "vllm-0.32.0-h200x2-healthy-pp2": [
        *BEGIN,  # the second stage loads the drafter, and the first draws the bars
        "profiling memory",
        "compiling target",
        "compiling drafter",
        "warming up",
        "capturing graphs",
        "listening",
    ],
    "vllm-0.32.0-h200-healthy-compiled": [*BEGIN, *DRAFTER, "profiling memory", *COMPILED, "listening"],
}


def recorded(name: str) -> bytes:
    return (LOGS / f"{name}.log").read_bytes()


def starts(log: bytes, *, second_a_line: float = 1.0) -> list[Start]:
    """Return the picture after each line, a second after the one before."""
    reader = new_reader()
    pictures = []
    for number, line in enumerate(parse(log.decode())):
        reader.say(line, number * second_a_line)
        pictures.append(reader.view(number * second_a_line))
    return pictures


def current(start: Start) -> tuple[str, float | None, str]:
    return next((str(each.name), each.fraction, each.detail) for each in start.phases if each.name is start.phase)


def told(pictures: list[Start]) -> list[str]:
    """Return the phases in their order; loading with its shards, compiling with its part."""
    words = []
    for start in pictures:
        phase, _, detail = current(start)
        if start.phase in {StartPhase.LOADING_TARGET, StartPhase.LOADING_DRAFTER} and not detail:
            continue
        if start.phase in {StartPhase.LOADING_TARGET, StartPhase.LOADING_DRAFTER, StartPhase.COMPILING}:
            phase = f"{phase} {detail.removesuffix(' shards')}".strip()
        words.append(phase)
    return [word for word, _ in groupby(words)]


def test_every_recorded_log_has_its_story():
    assert {path.stem for path in LOGS.glob("*.log")} == set(RECORDED)


@pytest.mark.parametrize("name", RECORDED)
def test_a_recorded_start_is_told_phase_by_phase(name):
    assert told(starts(recorded(name))) == RECORDED[name]


@pytest.mark.parametrize("name", RECORDED)
@pytest.mark.parametrize("size", [7, 4096])
def test_pieces_of_any_size_tell_the_same(name, size):
    log = recorded(name)
    reader, lines = LineReader(), []
    for at in range(0, len(log), size):
        lines += reader.feed(log[at : at + size])
    assert lines + reader.end() == parse(log.decode())


@pytest.mark.parametrize("name", RECORDED)
def test_nothing_of_a_recorded_start_goes_backwards(name):
    assert_forward(starts(recorded(name)))


def assert_forward(pictures: list[Start]) -> None:
    for before, after in pairwise(pictures):
        assert PHASES.index(before.phase) <= PHASES.index(after.phase)
        assert before.fraction <= after.fraction <= 1
        if before.phase is after.phase:
            fractions = current(before)[1], current(after)[1]
            assert fractions[0] is None or fractions[0] <= fractions[1] <= 1
    for start in pictures:
        assert start.remaining_seconds is None or start.remaining_seconds >= 0
        begun = [phase for phase in start.phases if phase.began is not None]
        assert [phase.ended for phase in begun[:-1]] == [phase.began for phase in begun[1:]], (
            "one ends, the next begins"
        )
        assert [phase.fraction for phase in begun[:-1]] == [1.0] * (len(begun) - 1)


SETUPS = {
    "TP8": Composed(),
    "TP8 eager": Composed(eager=True),
    "TP8 without a drafter": Composed(drafter=False),
    "TP1": Composed(tensor=1),
    "TP2 V1": Composed(tensor=2, runner="V1"),
    "TP4 0.16": Composed(tensor=4, runner="V1", release="0.16.0"),
    "TP4 PP2": Composed(tensor=4, pipeline=2),
    "TP1 PP2": Composed(tensor=1, pipeline=2),
    "DP2": Composed(tensor=1, data=2),
    "DP2 TP2": Composed(tensor=2, data=2),
    "TP2 CPU": Composed(tensor=2, device="cpu", runner="V1"),
    "TP2 CPU eager": Composed(tensor=2, device="cpu", runner="V1", eager=True),
    "TP2 CPU 0.16": Composed(tensor=2, device="cpu", runner="V1", release="0.16.0"),
    **{loader: Composed(tensor=2, loader=loader) for loader in BARS},
}


def expected(setup: Composed) -> list[str]:
    """Return the phases that this start has."""
    cuda, captures = setup.device == "cuda", setup.device == "cuda" and not setup.eager
    old = setup.release < "0.20"
    had = {
        "configuring": True,
        "spawning workers": True,
        "joining ranks": True,
        "loading target": True,
        "loading drafter": setup.drafter and (setup.runner == "V2" or cuda or BARS[setup.loader] is not None),
        "profiling memory": cuda,
        "compiling": not setup.eager and (cuda or not old),
        "capturing graphs (measuring)": captures and not old,
        "warming up": True,
        "capturing graphs": captures,
        "listening": True,
    }
    return [phase for phase, has in had.items() if has]


def log_of(lines: list[str]) -> bytes:
    return "".join(f"{line}\n" for line in lines).encode()


def phases(pictures: list[Start]) -> list[str]:
    return [phase for phase, _ in groupby(str(start.phase) for start in pictures)]


@pytest.mark.parametrize("name", SETUPS)
def test_every_way_to_start_is_told_in_its_phases(name):
    assert phases(starts(log_of(SETUPS[name].lines()))) == expected(SETUPS[name])


@given(setup=st.sampled_from(list(SETUPS.values())), seed=st.integers(min_value=0))
@settings(max_examples=15, deadline=None)
def test_ranks_that_talk_across_each_other_change_nothing(setup, seed):
    chance = random.Random(seed)  # noqa: S311
    lines = []
    for stage in setup.stages():
        queues = [list(said) for said in stage.values()]
        while talking := [queue for queue in queues if queue]:
            lines.append(chance.choice(talking).pop(0))
    pictures = starts(log_of(lines))
    assert phases(pictures) == expected(setup)
    assert_forward(pictures)


@pytest.mark.parametrize("loader", [loader for loader, bar in BARS.items() if bar])
def test_every_loader_shows_how_far_it_is(loader):
    pictures = starts(log_of(Composed(loader=loader).lines()))
    loading = [current(start) for start in pictures if start.phase is StartPhase.LOADING_TARGET]
    fractions = [fraction for _, fraction, _ in loading if fraction is not None]
    _, counted, total = BARS[loader]
    assert fractions[0] == 0
    assert len(set(fractions)) == total + 1
    assert loading[-1][2].startswith(f"{counted.format(total, total).replace('/', ' of ')}")


def test_a_loader_without_a_bar_shows_no_fraction_of_its_own():
    pictures = starts(log_of(Composed(loader="dummy").lines()))
    assert {current(start)[1] for start in pictures if start.phase is StartPhase.LOADING_TARGET} == {None}


@pytest.mark.parametrize("counted", ["0/0", "1/1.2.3", "./.", "1/?"])
def test_what_is_drawn_like_a_bar_and_counts_nothing_is_none(counted):
    bar = f"Loading safetensors checkpoint shards:   0% Completed | {counted} [00:00<?, ?it/s]"
    assert current(starts(f"{bar}\n".encode())[-1]) == ("configuring", None, "")


def test_what_the_slowest_rank_has_prefetched_is_shown():
    reader = new_reader()
    for rank, percent in enumerate((40, 20, 30)):
        text = f"Prefetching checkpoint files: {percent}% ({percent // 10}/10)"
        for line in parse(
            f"Loading model from scratch...\n(Worker_TP{rank} pid={rank}) INFO 11-29 13:34:58 [x.py:1] {text}"
        ):
            reader.say(line, 1.0)
    assert current(reader.view(1.0)) == ("loading target", None, "20% prefetched")


def test_the_drafters_bar_is_not_the_targets():
    pictures = starts(log_of(Composed().lines()))
    assert (
        current([start for start in pictures if start.phase is StartPhase.LOADING_TARGET][-1])[2] == "64 of 64 shards"
    )
    assert current([start for start in pictures if start.phase is StartPhase.LOADING_DRAFTER][-1])[2] == "1 of 1 shards"


@pytest.mark.parametrize(
    "said",
    [
        ("0% Completed | 0/64", "15% Completed | 10/64", "0% Completed | 0/64"),  # a loader that tries another way
        ("0% Completed | 0/64", "100% Completed | 64/64", "100% Completed | 64/64"),
    ],
)
def test_a_bar_that_is_drawn_again_is_not_the_drafters(said):
    setup = Composed(tensor=1, device="cpu", runner="V1", release="0.16.0")
    lines = [line for stage in setup.stages()[:5] for said in stage.values() for line in said]
    lines += [f"Loading fastsafetensors checkpoint shards: {bar} [00:10<00:10, 1.00it/s]" for bar in said]
    assert starts(log_of(lines))[-1].phase is StartPhase.LOADING_TARGET


def test_the_drafters_bar_waits_for_the_rank_that_still_loads_the_target():
    setup = Composed(tensor=2)
    *before, drafter, bar = setup.stages()[:8]
    lines = [line for stage in before for said in stage.values() for line in said]
    (first,), (second,) = drafter.values()
    assert "Using Eagle3" in first
    start = starts(log_of([*lines, first, *bar[""]]))[-1]
    assert current(start)[:2] == ("loading target", 1.0)
    assert starts(log_of([*lines, first, *bar[""], second]))[-1].phase is StartPhase.LOADING_DRAFTER


def test_workers_are_counted_as_they_arrive():
    setup = Composed()
    arrivals = setup.stages()[2]
    lines = [line for stage in setup.stages()[:2] for said in stage.values() for line in said]
    lines += [line for rank, said in arrivals.items() if rank != "Worker_TP5" for line in said]
    start = starts(log_of(lines))[-1]
    assert (*current(start), start.waiting_for) == ("spawning workers", 7 / 8, "7 of 8 ranks", "rank 5")
    start = starts(log_of(lines + arrivals["Worker_TP5"]))[-1]
    assert (*current(start), start.waiting_for) == ("joining ranks", None, "8 ranks", "8 ranks to connect")


def test_loading_ends_when_the_last_rank_has_loaded():
    setup = Composed(drafter=False)
    lines = [line for stage in setup.stages()[:7] for said in stage.values() for line in said]
    late, early = lines.pop(), lines
    assert "Model loading took" in late
    compiling = setup.stages()[7]["Worker_TP0"]
    start = starts(log_of(early + compiling))[-1]
    assert (start.phase, start.waiting_for) == (StartPhase.LOADING_TARGET, "rank 7")
    assert starts(log_of([*early, *compiling, late]))[-1].phase is StartPhase.PROFILING


def test_listening_begins_with_the_last_engine():
    setup = Composed(tensor=1, data=2)
    *before, said, _, _ = setup.stages()
    lines = [line for stage in before for lines in stage.values() for line in lines]
    first, last = (line for lines in said.values() for line in lines)
    assert starts(log_of([*lines, first]))[-1].phase is StartPhase.CAPTURING_GRAPHS
    assert starts(log_of([*lines, first, last]))[-1].phase is StartPhase.LISTENING


def test_the_second_capturing_knows_its_whole_from_the_first():
    pictures = starts(recorded("vllm-0.32.0-h200-healthy-compiled"))
    assert {current(start)[1] for start in pictures if start.phase is StartPhase.MEASURING_GRAPHS} == {None}
    final = [current(start) for start in pictures if start.phase is StartPhase.CAPTURING_GRAPHS]
    assert ("capturing graphs", 0.2, "CUDA graphs (PIECEWISE): 51 of 51") in final
    assert final[-1] == ("capturing graphs", 1.0, "decode CUDA graphs (FULL): 51 of 51")


@pytest.mark.parametrize(
    ("setup", "left_out"),
    [
        (Composed(), set()),
        (Composed(drafter=False), {"loading drafter"}),
        (Composed(eager=True), {"compiling", "capturing graphs (measuring)", "capturing graphs"}),
        (Composed(device="cpu", runner="V1"), {"capturing graphs (measuring)", "capturing graphs"}),
    ],
)
def test_what_a_configuration_leaves_out_is_not_announced(setup, left_out):
    lines = [line for stage in setup.stages()[:2] for said in stage.values() for line in said]
    start = starts(log_of(lines))[-1]
    assert {str(phase) for phase in StartPhase} - {phase.name for phase in start.phases} == left_out


def test_a_start_ends_when_it_is_ready_and_stays_as_it_was():
    reader = new_reader(100.0)
    for line in parse(recorded("vllm-0.32.0-h200-healthy-eager").decode()):
        reader.say(line, 150.0)
    reader.answered(160.0)
    answering = reader.view(161.0)
    assert (answering.phase, answering.ended, answering.waiting_for) == ("answering", None, "a first completion")
    assert answering.fraction < 1
    reader.ready(163.0)
    ended = reader.view(170.0)
    assert (ended.ended, ended.fraction, ended.stalled, ended.eta, ended.remaining_seconds) == (
        163.0,
        1,
        False,
        None,
        None,
    )
    assert {phase.ended is None for phase in ended.phases if phase.began is not None} == {False}
    for line in parse("Loading model from scratch...\n"):
        reader.say(line, 10_000.0)
    reader.observe(Activity(gpu_used_bytes=(7,)), 10_000.0)
    reader.answered(10_000.0)
    reader.ready(10_000.0)
    assert reader.view(20_000.0) == ended


def test_a_service_that_answers_without_a_word_is_ready_too():
    reader = new_reader()
    reader.ready(5.0)
    assert [phase.name for phase in reader.view(9.0).phases if phase.ended is not None] == ["configuring", "answering"]


def test_a_clock_that_is_set_back_moves_nothing_back():
    reader = new_reader(1000.0)
    for number, line in enumerate(parse(recorded("vllm-0.32.0-h200-healthy-compiled").decode())):
        reader.say(line, 1000.0 - number)
    start = reader.view(500.0)
    assert {phase.began for phase in start.phases if phase.began is not None} == {1000.0}
    assert start.silent_seconds == 0


@pytest.mark.parametrize(
    "line",
    [
        "(EngineCore pid=7) ERROR 11-29 14:06:10 [core.py:1] KV cache size: none",
        "(EngineCore pid=7) WARNING 11-29 14:06:10 [core.py:1] Application startup complete.",
    ],
)
def test_an_error_or_a_warning_is_no_step_forward(line):
    assert starts(f"{line}\n".encode())[-1].phase is StartPhase.CONFIGURING


SAID = recorded("vllm-0.32.0-h200-healthy-compiled").splitlines(keepends=True)


@given(st.lists(st.one_of(st.binary(max_size=80), st.sampled_from(SAID)), max_size=60))
@settings(max_examples=40, deadline=None)
def test_lines_that_nobody_knows_break_nothing(pieces):
    reader, lines = LineReader(), []
    for piece in pieces:
        lines += reader.feed(piece)
    lines += reader.end()
    start = new_reader()
    pictures = []
    for number, line in enumerate(lines):
        start.say(line, float(number))
        pictures.append(start.view(float(number)))
    assert_forward(pictures)


def test_twice_the_log_is_twice_the_work():
    log = b"".join(SAID[:60])
    once, twice = steps(log), steps(log * 2)
    assert twice <= 2.1 * once
    assert steps(log * 4) <= 2.1 * twice


def steps(log: bytes) -> int:
    """Return how many lines of Python it takes to read a log: a measure that no other process disturbs."""
    count = 0

    def counting(frame, event, argument):
        nonlocal count
        count += event == "line"
        return counting

    before = sys.gettrace()
    sys.settrace(counting)
    try:
        starts(log)
    finally:
        sys.settrace(before)
    return count


def test_the_json_is_what_status_shows():
    reader = new_reader(1_764_367_200.0)
    for line in parse(recorded("vllm-0.32.0-cpu-healthy-eager").decode()):
        reader.say(line, 1_764_367_230.5)
    shown = reader.view(1_764_367_232.0).to_json()
    assert shown["phases"][0] == {
        "name": "configuring",
        "began": "2025-11-28T22:00:00.000Z",
        "ended": "2025-11-28T22:00:30.500Z",
        "fraction": 1.0,
        "detail": "",
    }
    assert shown["phases"][-1] == {"name": "answering", "began": None, "ended": None, "fraction": None, "detail": ""}
    del shown["phases"]
    assert shown == {
        "phase": "listening",
        "fraction": shown["fraction"],
        "began": "2025-11-28T22:00:00.000Z",
        "ended": None,
        "eta": None,
        "remaining_seconds": None,
        "moved": "2025-11-28T22:00:30.500Z",
        "moved_by": "log",
        "silent_seconds": 1.5,
        "stalled": False,
        "waiting_for": None,
    }
    assert 0 < shown["fraction"] < 1
