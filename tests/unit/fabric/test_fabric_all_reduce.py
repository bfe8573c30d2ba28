"""The all-reduce's ranks: a result, or the name of the one for which the others wait."""

import os
import signal
import threading
import time

import pytest

from aerie.fabric.all_reduce import State, all_reduce
from aerie.fabric.sizes import REDUCTIONS

RANK = f"""
sizes = {list(REDUCTIONS)}
rank = int(os.environ["RANK"])
tell(step="loading torch and reaching the GPUs")
{{before}}
tell(step="joining the others")
for size in sizes:
    tell(step=f"all-reduce of {{{{size}}}}")
    wrong = 0
    {{during}}
    tell(reduced=size, wrong=wrong)
    tell(timed=size, seconds=0.001 * (1 + rank))
tell(step="parting")
{{after}}
"""


@pytest.fixture
def reduce(stand_in, environment, said):
    def reduce(before="pass", during="pass", after="pass", ranks=3, deadline=1.0):
        program = stand_in(RANK.format(before=before, during=during, after=after))
        return all_reduce("nccl", ranks, environment, deadline, said.append, program)

    return reduce


def test_the_slowest_rank_s_time_counts(reduce, said):
    reduction = reduce()
    assert (reduction.state, reduction.detail) == (State.WORKS, "")
    assert reduction.seconds == dict.fromkeys(REDUCTIONS, 0.003)
    assert said == [
        "loading torch and reaching the GPUs", "joining the others",
        *(f"all-reduce of {size}" for size in REDUCTIONS), "parting",
    ]  # fmt: skip


def test_what_a_rank_prints_is_no_failure(reduce):
    assert reduce(during="print('NCCL WARN something', flush=True)").state is State.WORKS


def test_the_bus_bandwidth_is_what_each_rank_sends_in_a_ring(reduce):
    reduction = reduce(ranks=4)
    large = REDUCTIONS[-1]
    assert reduction.gb_per_s(large) == pytest.approx(large / 0.004 * 6 / 4 / 1e9)


def test_a_rank_that_never_joins_is_named(reduce):
    reduction = reduce(before="time.sleep(60 if rank == 1 else 0)", during="time.sleep(60)")
    assert reduction.state is State.HUNG
    assert reduction.detail == (
        "rank 1 did not get past 'loading torch and reaching the GPUs' within 1 s; the others wait: "
        f"all-reduce of {REDUCTIONS[0]}"
    )


def test_ranks_that_all_wait_are_told_as_such(reduce):
    reduction = reduce(during="time.sleep(60)")
    assert reduction.state is State.HUNG
    assert reduction.detail == f"all 3 ranks: all-reduce of {REDUCTIONS[0]}: nothing moved for 1 s"


def test_a_stopped_rank_is_named_and_ended(reduce, tmp_path, gone):
    files = f"open({str(tmp_path)!r} + f'/{{rank}}', 'w').write(str(os.getpid())); time.sleep(3)"

    def stop():
        file = tmp_path / "2"
        while not (file.exists() and file.read_text()):
            time.sleep(0.01)
        os.kill(int(file.read_text()), signal.SIGSTOP)

    thread = threading.Thread(target=stop)
    thread.start()
    reduction = reduce(before=files, during="time.sleep(60)", deadline=2)
    thread.join()
    assert reduction.state is State.HUNG
    assert reduction.detail.startswith("rank 2 did not get past 'loading torch")
    assert all(gone(int((tmp_path / str(rank)).read_text())) for rank in range(3))


def test_a_rank_that_fails_is_named_with_what_it_said_last(reduce):
    reduction = reduce(during="time.sleep(0 if rank == 2 else 60)\n    if rank == 2: sys.exit('ncclSystemError')")
    assert reduction.state is State.FAILED
    assert reduction.detail == f"rank 2, all-reduce of {REDUCTIONS[0]}: it ended with 1: ncclSystemError"


def test_wrong_sums_are_counted(reduce):
    reduction = reduce(during="wrong = 7 if rank == 1 and size == sizes[1] else 0")
    assert reduction.state is State.WRONG
    assert reduction.detail == f"all-reduce of {REDUCTIONS[1]}: 7 of {REDUCTIONS[1] // 2:,} sums are wrong on rank 1"
    assert reduction.seconds == {}


def test_a_rank_that_ends_in_the_middle_is_no_success(reduce):
    assert reduce(after="sys.exit(4)").state is State.FAILED
    assert reduce(before="sys.exit(0) if rank == 1 else None", during="time.sleep(60)").state is not State.WORKS
