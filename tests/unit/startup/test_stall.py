"""A start that is silent and works, and one that is dead."""

from dataclasses import replace

import pytest
from composed import STALL_TIMEOUT, new_reader

from aerie.startup import Activity, ProcessActivity, Start, StartReader, parse

MIB = 2**20
IDLE = Activity(
    tuple(ProcessActivity(pid, f"VLLM::Worker_TP{pid}", "R", 10**9, 10**6, 40 * 2**30, 100.0) for pid in range(8)),
    gpu_used_bytes=(71 * 2**30,) * 8,
)
HEARTBEAT = "(Worker_TP3 pid=403) INFO 11-29 13:34:58 [shm_broadcast.py:871] "
HEARTBEATS = {
    "shared memory": f"{HEARTBEAT}No available shared memory broadcast block found in 60 seconds. This typically",
    "a probe": 'INFO:     127.0.0.1:43372 - "GET /health HTTP/1.1" 503 Service Unavailable',
    "statistics": "(APIServer pid=7) INFO 11-29 13:34:58 [loggers.py:273] Engine 000: Avg prompt throughput: 0.0",
    "waiting": "(APIServer pid=7) DEBUG 11-29 13:34:58 [utils.py:1407] Waiting for 1 local, 0 remote core engine "
    "proc(s) to start.",
    "a line said before": "(EngineCore pid=300) INFO 11-29 13:34:58 [x.py:1] connection 17 refused, trying again",
}


def changed(activity: Activity, pid: int, **by: float) -> Activity:
    processes = (
        replace(each, **{what: getattr(each, what) + more for what, more in by.items()}) if each.pid == pid else each
        for each in activity.processes
    )
    return replace(activity, processes=tuple(processes))


def say(reader: StartReader, text: str, at: float) -> None:
    for line in parse(text):
        reader.say(line, at)


def watched(*activities: Activity, every: float = 5.0) -> StartReader:
    reader = new_reader()
    for number, activity in enumerate(activities):
        reader.observe(activity, number * every)
    return reader


def looked_at(reader: StartReader, since: int, until: float, by: int = 1) -> Start:
    """Let time pass in looks and return what the last one shows."""
    for at in range(since, int(until), by):
        reader.view(float(at))
    return reader.view(float(until))


def test_a_start_in_which_nothing_moves_has_stalled_after_the_timeout_and_not_before():
    reader = new_reader()
    say(reader, "(EngineCore pid=300) INFO 11-29 13:34:58 [x.py:1] last words", 100.0)
    before, after = looked_at(reader, 100, 100 + STALL_TIMEOUT - 1), reader.view(100.0 + STALL_TIMEOUT)
    assert (before.stalled, after.stalled) == (False, True)
    assert (after.moved, after.moved_by, after.silent_seconds) == (100.0, "log", STALL_TIMEOUT)


def test_the_timeout_can_be_chosen():
    assert new_reader(stall_timeout=10.0).view(10.0).stalled


@pytest.mark.parametrize("jump", [3600, -3600])
def test_a_machine_that_slept_and_a_clock_that_was_set_are_no_stall(jump):
    reader = new_reader()
    looked_at(reader, 0, 100)
    after = reader.view(100.0 + jump)
    assert not after.stalled
    assert after.silent_seconds <= 115
    assert looked_at(reader, 100 + jump, 100 + jump + STALL_TIMEOUT).stalled, "and from then on the time counts again"


def test_somebody_who_looks_every_ten_seconds_sees_all_of_the_time():
    assert looked_at(new_reader(), 0, STALL_TIMEOUT, by=10).stalled


@pytest.mark.parametrize("what", HEARTBEATS)
def test_a_heartbeat_is_no_sign_of_life(what):
    reader = new_reader()
    say(reader, HEARTBEATS["a line said before"], 1.0)
    for minute in range(1, 60):
        say(reader, HEARTBEATS[what].replace("60", str(minute)).replace("17", str(minute)), minute * 60.0)
    assert reader.view(3600.0).moved == 1.0


def test_a_line_that_differs_by_an_address_was_said_before():
    reader = new_reader()
    for minute in range(60):
        say(reader, f"still waiting at 0x7f{minute:04x}, {minute}.5 s", minute * 60.0)
    assert reader.view(3600.0).moved == 0.0


def test_a_bar_that_moves_is_a_sign_of_life_and_one_that_is_only_drawn_again_is_none():
    reader = new_reader()
    bar = "Loading safetensors checkpoint shards:  {}% Completed | {}/64 [{:02}:00<20:00, 10.00s/it]"
    say(reader, bar.format(1, 1, 1), 60.0)
    say(reader, bar.format(3, 2, 2), 120.0)
    say(reader, bar.format(3, 2, 3), 180.0)
    assert reader.view(200.0).moved == 120.0


def test_the_drafters_bar_and_the_second_capturing_may_say_what_was_said_before():
    reader = new_reader()
    bar = "Loading safetensors checkpoint shards: 100% Completed | 1/1 [00:00<00:00, 10.00it/s]"
    say(reader, f"Loading model from scratch...\n{bar}", 10.0)
    say(reader, "Loading drafter model...", 20.0)
    say(reader, bar, 30.0)
    assert reader.view(30.0).moved == 30.0


@pytest.mark.parametrize(
    ("activity", "moved_by"),
    [
        (changed(IDLE, 3, read_bytes=64 * MIB), "read"),
        (changed(IDLE, 3, faults=5000), "faults"),
        (changed(IDLE, 3, rss_bytes=64 * MIB), "memory"),
        (changed(changed(IDLE, 3, rss_bytes=64 * MIB), 4, rss_bytes=-900 * MIB), "memory"),
        (replace(IDLE, gpu_used_bytes=(71 * 2**30,) * 7 + (72 * 2**30,)), "gpu memory"),
        (replace(IDLE, gpu_used_bytes=(71 * 2**30,) * 7 + (70 * 2**30,)), "gpu memory"),
        (replace(IDLE, processes=(*IDLE.processes, ProcessActivity(99, "ptxas", "R", 0, 9000, 0, 0.0))), "faults"),
    ],
)
def test_what_works_in_silence_has_not_stalled(activity, moved_by):
    start = watched(IDLE, IDLE, activity).view(20.0)
    assert (start.moved, start.moved_by) == (10.0, moved_by)


@pytest.mark.parametrize(
    "activity",
    [
        changed(IDLE, 3, cpu_seconds=5.0),  # a hang spins
        changed(IDLE, 3, faults=12),
        changed(IDLE, 3, read_bytes=4096),
        changed(IDLE, 3, rss_bytes=MIB),
        changed(IDLE, 3, rss_bytes=-900 * MIB),  # memory pressure, somebody else's
        replace(IDLE, processes=IDLE.processes[1:]),
        replace(IDLE, processes=()),
    ],
)
def test_what_spins_or_breathes_or_ends_does_not_move(activity):
    start = watched(IDLE, IDLE, activity).view(20.0)
    assert (start.moved, start.moved_by) == (0.0, "log")


def test_faults_count_by_their_rate_however_often_one_looks():
    dripping = [changed(IDLE, 3, faults=10 * number) for number in range(100)]
    assert watched(*dripping, every=1.0).view(100.0).moved == 0.0
    assert watched(*dripping, every=0.1).view(10.0).moved == 0.0
    rarely_seen = [changed(IDLE, 3, faults=600 * number) for number in range(10)]
    assert watched(*rarely_seen, every=60.0).view(600.0).moved == 0.0
    pouring = [changed(IDLE, 3, faults=5000 * number) for number in range(100)]
    assert watched(*pouring, every=1.0).view(100.0).moved == 99.0


def test_slow_growth_adds_up():
    """A checkpoint that trickles in is read, and memory that fills by the page is filled."""
    assert watched(*(changed(IDLE, 3, read_bytes=number * MIB // 4) for number in range(100))).view(500.0).moved > 470
    assert watched(*(changed(IDLE, 3, rss_bytes=number * MIB) for number in range(100))).view(500.0).moved > 470


def test_what_was_said_is_not_remembered_without_end():
    reader = new_reader()
    for number in range(5000):
        say(reader, "word " * (number % 40) + chr(0x4E00 + number), float(number))
    assert len(reader._movement._said) <= 1024
