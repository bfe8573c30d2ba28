"""The judge of a serving engine, shown what real engines showed: figures and processes, look by look.

The numbers are those of vLLM 0.32.0 at TP2 on the CPU: a worker that waits for a stopped one spins on a core and has no
page fault; one that computes has hundreds to hundreds of thousands a second.
"""

import itertools

import pytest

from aerie.diagnosis import Collector, Evidence, Kind
from aerie.engine_metrics import EngineMetrics, Steps
from aerie.startup.activity import Activity, ProcessActivity
from aerie.supervisor.liveness import GRACE, Hung, Judge, Observation

API, CORE, WORKER_0, WORKER_1 = 10, 11, 12, 13
NAMES = {API: "vllm", CORE: "VLLM::EngineCore", WORKER_0: "VLLM::Worker_TP0", WORKER_1: "VLLM::Worker_TP1"}
EVERY = 4.0  # seconds between two looks
LIMIT = 180  # seconds in which a hung engine must be found
STALLS = 900.0  # seconds, the limit of a start

# What a process does in a second: CPU seconds, page faults; and its state.
IDLE = (0.02, 1, "S")
SPINS = (1.0, 0, "R")
COMPUTES = (1.0, 800, "R")
STOPPED = (0.0, 0, "T")
ASLEEP = (0.0, 0, "S")


class Engine:
    """Plays an engine to a judge: time passes in looks."""

    def __init__(self):
        self.judge = Judge(API, STALLS)
        self.now = 1_796_000_000.0
        self.names = dict(NAMES)
        self.doing = dict.fromkeys(NAMES, IDLE)
        self.totals = {pid: [0.0, 0] for pid in NAMES}
        self.heartbeat, self.running, self.waiting, self.kv = 40, 0, 0, 0.0
        self.read = dict.fromkeys(NAMES, 0)
        self.others = {}
        self.own_request = None
        self.gpus_busy = self.silent = False

    def does(self, **what):
        for name, doing in what.items():
            self.doing[globals()[name.upper()]] = doing

    def look(self, seconds=EVERY):
        self.now += seconds
        for pid, (cpu, faults, _) in self.doing.items():
            self.totals[pid][0] += cpu * seconds
            self.totals[pid][1] += int(faults * seconds)
        processes = tuple(
            ProcessActivity(pid, self.names[pid], self.doing[pid][2], self.read.get(pid, 0), faults, 2**30, cpu)
            for pid, (cpu, faults) in self.totals.items()
        )
        metrics = EngineMetrics({"0": Steps(self.heartbeat, self.running, self.waiting, self.kv), **self.others})
        self.judge.saw(
            Observation(
                self.now, None if self.silent else metrics, Activity(processes), self.own_request, self.gpus_busy
            )
        )
        return self.judge.verdict({CORE: "futex_wait_queue"}.get)

    def pass_time(self, seconds, each=lambda: None):
        """Look again and again; return (verdict, seconds until it), or (None, seconds)."""
        began = self.now
        while self.now - began < seconds:
            each()
            if verdict := self.look():
                return verdict, self.now - began
        return None, self.now - began


@pytest.fixture
def engine():
    engine = Engine()
    engine.judge.served(8192)
    engine.judge.answered("0", 64, 0.08)
    engine.look()
    return engine


@pytest.fixture
def two_engines(engine):
    """Two engines behind one API, neither of which the other waits for: a dense model with --data-parallel-size 2."""
    engine.names |= {WORKER_0: "VLLM::EngineCore_DP0", WORKER_1: "VLLM::EngineCore_DP1"}
    engine.others = {"1": Steps()}
    engine.look()
    return engine


def test_an_idle_engine_lives_and_is_asked_every_half_minute(engine):
    asked = []

    def each():
        if engine.own_request:  # answered since the last look
            engine.own_request = None
            engine.heartbeat += 1
        elif to_ask := engine.judge.to_ask:
            asked.append(engine.now)
            engine.own_request = to_ask

    verdict, _ = engine.pass_time(600, each)
    assert verdict is None
    pauses = [later - earlier for earlier, later in itertools.pairwise(asked)]
    assert all(30 <= pause <= 45 for pause in pauses)
    assert len(asked) >= 12


def test_an_engine_that_has_answered_between_two_looks_is_not_asked_again(engine):
    engine.pass_time(36)
    engine.judge.answered(engine.judge.to_ask, 64, 0.08)
    assert engine.judge.to_ask is None


def test_a_busy_engine_lives_and_is_never_asked(engine):
    engine.does(core=IDLE, worker_0=SPINS, worker_1=SPINS)  # decoding on GPUs faults as little as spinning
    engine.gpus_busy = True
    engine.running, engine.waiting = 128, 400

    def each():
        engine.heartbeat += 80
        assert engine.judge.to_ask is None

    assert engine.pass_time(3600, each)[0] is None


def test_requests_too_short_to_be_seen_running_keep_an_engine_busy(engine):
    def each():
        engine.heartbeat += 1
        assert engine.judge.to_ask is None

    assert engine.pass_time(600, each)[0] is None


def test_a_worker_stopped_under_a_request_is_found_and_named(engine):
    engine.running, engine.kv = 1, 0.0015
    engine.does(core=ASLEEP, worker_0=SPINS, worker_1=STOPPED)
    verdict, seconds = engine.pass_time(LIMIT)
    assert isinstance(verdict, Hung)
    assert seconds <= 110
    assert "VLLM::Worker_TP1 (pid 13) is stopped (state T) since " in verdict.reason
    assert "requests running: 1, waiting: 0;" in verdict.reason
    text = "\n".join(verdict.evidence)
    assert "vllm:iteration_tokens_total_count stands at 40" in text
    assert "VLLM::EngineCore (pid 11) does nothing (state S, in futex_wait_queue)" in text
    assert "VLLM::Worker_TP0 (pid 12) computes nothing and waits in a loop (state R)" in text


@pytest.mark.parametrize(("rank", "signature"), [(STOPPED, "engine-hangs-process-stopped"), (SPINS, "engine-hangs")])
def test_what_the_judge_says_is_known_to_the_diagnosis(engine, rank, signature):
    engine.running = 1
    engine.does(core=ASLEEP, worker_0=SPINS, worker_1=rank)
    verdict, _ = engine.pass_time(LIMIT)
    said = [Evidence("supervisor", engine.now, text, kind=Kind.HUNG) for text in (verdict.reason, *verdict.evidence)]
    assert Collector().diagnose(verdict.reason, said, Kind.HUNG).signature == signature


def idle_then(engine, limit=LIMIT, **what):
    """An engine that comes to harm just after it has answered; return (verdict, seconds)."""
    engine.does(**what)

    def each():
        engine.own_request = engine.own_request or engine.judge.to_ask

    return engine.pass_time(limit, each)


@pytest.mark.parametrize("stopped", ["worker_1", "core"])
def test_a_process_stopped_while_idle_is_found_by_our_own_request(engine, stopped):
    verdict, _ = idle_then(engine, **{stopped: STOPPED})
    assert "our own: 1;" in verdict.reason
    assert "is stopped (state T)" in verdict.reason


@pytest.mark.parametrize("others", [IDLE, COMPUTES])
def test_a_stopped_api_server_is_found_whatever_the_engine_still_computes(engine, others):
    engine.does(api=STOPPED, worker_0=others, worker_1=others)
    engine.silent = True
    verdict, _ = engine.pass_time(LIMIT)
    assert "the API server does not answer; vllm (pid 10) is stopped" in verdict.reason


def test_an_api_server_too_busy_to_answer_lives(engine):
    engine.does(api=SPINS)
    engine.silent = True
    engine.running = 128
    assert engine.pass_time(1800)[0] is None


def test_ranks_that_spin_on_gpus_without_any_step_are_found(engine):
    engine.running, engine.gpus_busy = 8, True
    engine.does(core=ASLEEP, worker_0=SPINS, worker_1=SPINS)
    verdict, seconds = engine.pass_time(LIMIT)
    assert verdict
    assert seconds >= GRACE + 2 * 8192 * 0.08 / 64


def test_ranks_that_spin_from_idle_on_are_found(engine):
    verdict, _ = idle_then(engine, core=ASLEEP, worker_0=SPINS, worker_1=SPINS)
    assert verdict


def test_the_grace_grows_with_what_one_step_may_have_to_process(engine):
    engine.judge.served(131_072)
    engine.running = 1
    engine.does(worker_0=SPINS, worker_1=SPINS)
    assert engine.pass_time(GRACE + 300)[0] is None, "131,072 tokens at 1.25 ms, twice"
    assert engine.pass_time(60)[0]


def test_a_stopped_rank_gets_no_more_grace_for_a_long_prompt(engine):
    engine.judge.served(131_072)
    engine.running = 1
    engine.does(worker_0=SPINS, worker_1=STOPPED)
    assert engine.pass_time(LIMIT)[1] <= 110


def test_one_prompt_that_takes_minutes_on_a_cpu_is_left_alone(engine):
    """No figure moves and the gauges even say that nobody is served: only the worker shows that it computes."""
    verdict, _ = idle_then(engine, worker_0=COMPUTES, worker_1=COMPUTES)
    assert verdict is None
    assert engine.own_request, "an engine whose gauges say idle is asked"
    assert engine.pass_time(3600)[0] is None


def test_pieces_of_a_long_prompt_move_the_cache_and_nothing_else(engine):
    engine.running, engine.gpus_busy = 1, True
    engine.does(worker_0=SPINS, worker_1=SPINS)
    looks = 0

    def each():
        nonlocal looks
        looks += 1
        engine.kv += 0.02 * (looks % 5 == 0)

    assert engine.pass_time(900, each)[0] is None


def test_time_in_which_we_did_not_look_counts_little(engine):
    engine.running = 1
    engine.does(api=ASLEEP, core=ASLEEP, worker_0=SPINS, worker_1=SPINS)
    engine.look()
    assert engine.look(3600) is None, "the host slept, or the container was paused"
    assert engine.pass_time(60)[0] is None
    engine.now -= 7200  # and its clock was set
    assert engine.look() is None
    assert engine.pass_time(LIMIT)[0]


def test_late_figures_are_no_death_of_a_working_engine(engine):
    engine.running = 64
    engine.does(api=COMPUTES, worker_0=SPINS, worker_1=SPINS)
    looks = 0

    def each():
        nonlocal looks
        looks += 1
        engine.heartbeat += 9
        engine.silent = looks % 12 != 0

    assert engine.pass_time(1800, each)[0] is None


def begins(engine, name, pid, doing):
    engine.names[pid], engine.doing[pid], engine.totals[pid] = name, doing, [0.0, 0]


def test_processes_that_vllm_begins_and_that_compute_work(engine):
    """A kernel that is compiled at its first use is compiled by new processes, each of which takes a while."""
    engine.running = 1
    engine.does(worker_0=ASLEEP, worker_1=ASLEEP)
    begins(engine, "cicc", 1000, COMPUTES)
    assert engine.pass_time(900)[0] is None


@pytest.mark.parametrize(("name", "doing"), [("sh", COMPUTES), ("VLLM::Helper", SPINS)])
def test_what_comes_and_goes_is_no_work(engine, name, doing):
    engine.running = 1
    engine.does(worker_0=SPINS, worker_1=SPINS)
    pids = itertools.count(1000)

    def each():
        for pid in set(engine.doing) - set(NAMES):
            del engine.doing[pid], engine.totals[pid]
        begins(engine, name, next(pids), doing)

    assert engine.pass_time(LIMIT, each)[0]


@pytest.mark.parametrize(("bytes_a_look", "hangs"), [(4096, True), (2**20 - 1, True), (2**20, False)])
def test_reading_is_work_from_a_mebibyte_a_look_on(engine, bytes_a_look, hangs):
    """Under memory pressure the kernel takes pages of code from a spinning process and reads them again."""
    engine.running = 1
    engine.does(worker_0=SPINS, worker_1=SPINS)

    def each():
        engine.read[WORKER_0] += bytes_a_look

    assert bool(engine.pass_time(LIMIT, each)[0]) is hangs


def test_one_hung_engine_among_several_is_found(two_engines):
    two_engines.running, two_engines.others = 4, {"1": Steps(9, 2, 1, 0.5)}
    two_engines.does(worker_0=COMPUTES, worker_1=SPINS)

    def each():
        two_engines.heartbeat += 40

    verdict, _ = two_engines.pass_time(LIMIT, each)
    assert " of engine 1, requests running: 2, waiting: 1" in verdict.reason
    assert "vllm:iteration_tokens_total_count stands at 9" in verdict.evidence[0]


def test_one_idle_engine_among_several_is_asked_and_found(two_engines):
    two_engines.running = 4
    two_engines.does(worker_1=SPINS)
    asked = []

    def each():
        two_engines.heartbeat += 40
        if to_ask := two_engines.own_request or two_engines.judge.to_ask:
            two_engines.own_request = to_ask
            asked.append(to_ask)

    verdict, _ = two_engines.pass_time(LIMIT, each)
    assert set(asked) == {"1"}
    assert " of engine 1, requests running: 0, waiting: 0, our own: 1" in verdict.reason


def test_an_engine_lives_while_another_one_has_nothing_to_do(two_engines):
    two_engines.running = 4
    two_engines.own_request = "0"

    def each():
        two_engines.heartbeat += 1

    assert two_engines.pass_time(1800, each)[0] is None


@pytest.mark.parametrize("rank", [SPINS, ASLEEP, STOPPED])
def test_a_first_completion_that_hangs_is_found_in_time(rank):
    """It has a little longer than others, for copies of kernels may be read from a disk that is slow to answer."""
    engine = Engine()
    engine.own_request = ""
    engine.does(worker_0=rank, worker_1=rank)
    assert engine.pass_time(140)[0] is None
    verdict, _ = engine.pass_time(LIMIT - 140)
    assert verdict


def test_a_first_completion_that_compiles_has_all_the_time_that_it_takes():
    engine = Engine()
    engine.own_request = ""
    engine.does(worker_0=COMPUTES, worker_1=SPINS)
    assert engine.pass_time(3600)[0] is None


def test_an_api_server_that_spins_and_answers_nobody_lives_only_where_callers_may_keep_it_busy(engine):
    engine.does(api=SPINS)
    engine.silent = True
    assert engine.pass_time(2 * STALLS)[0] is None
    engine.judge = Judge(API, STALLS)
    verdict, seconds = engine.pass_time(2 * STALLS)
    assert verdict
    assert seconds >= STALLS


@pytest.mark.parametrize("seconds", [0.08, 0.17, 1.0, 60.0])
def test_a_hang_from_idle_on_is_found_in_time_at_any_pace(engine, seconds):
    """A step of a usual size has its limit, however slow an answer to 64 tokens is."""
    engine.judge = Judge(API, STALLS)
    engine.judge.served(16_384)
    engine.judge.answered("0", 64, seconds)
    engine.gpus_busy = True
    verdict, _ = idle_then(engine, core=ASLEEP, worker_0=SPINS, worker_1=SPINS)
    assert verdict


@pytest.mark.parametrize("most", [4.0, 90.0, 400.0])
def test_a_prompt_of_maximum_length_is_never_killed(engine, most):
    """262,144 tokens in pieces of 8192, each of which takes longer than the one before."""
    engine.running, engine.gpus_busy = 1, True
    engine.does(worker_0=SPINS, worker_1=SPINS)
    pieces = 262_144 // 8192
    for piece in range(pieces):
        seconds = most * (piece + 1) / pieces
        assert engine.pass_time(seconds)[0] is None, f"piece {piece} takes {seconds:.0f} s"
        engine.kv += 1 / pieces


def test_a_prompt_that_is_one_step_has_the_time_of_its_length(engine):
    engine.judge.served(262_144)
    engine.running, engine.gpus_busy = 1, True
    engine.does(worker_0=SPINS, worker_1=SPINS)
    assert engine.pass_time(2 * 262_144 * 0.08 / 64)[0] is None


def test_the_longest_grace_ends_before_vllms_own_deadline_of_a_step(engine):
    engine.judge = Judge(API, STALLS)
    engine.judge.served(1_048_576)
    engine.judge.answered("0", 64, 9.0)
    verdict, seconds = idle_then(engine, 1800, worker_0=SPINS, worker_1=SPINS)
    assert verdict
    assert seconds > 1500
