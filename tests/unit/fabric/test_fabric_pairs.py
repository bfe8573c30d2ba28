"""Pairs of GPUs: each is tried, and a hang, an error or wrong bytes are told of the right one."""

import json
import time

import pytest

from aerie.fabric import pairs
from aerie.fabric.pairs import State, in_rounds, try_pairs

# Every pair works, but for what `fault` does before it.
COPIES = """
tell(step="loading torch and reaching the GPUs")
for source, destination in json.loads(arguments[0]):
    numbers = [source, destination]
    tell(step="copy 4 KiB", pair=numbers)
    wrong, offered = None, True
    {fault}
    tell(pair=numbers, offered=offered, wrong=wrong, gb_per_s=None if wrong else 10.0 * source + destination)
"""


@pytest.fixture
def attempt(stand_in, environment, said):
    def attempt(fault="pass", count=3, deadline=1.0, program=None, nodes=()):
        return try_pairs(
            count, nodes, environment, deadline, said.append, stand_in(program or COPIES.format(fault=fault))
        )

    return attempt


@pytest.mark.parametrize("count", [2, 3, 8])
def test_every_ordered_pair_comes_once_and_every_gpu_once_a_round(count):
    order = in_rounds(count)
    assert sorted(order) == [(a, b) for a in range(count) for b in range(count) if a != b]
    for first in range(0, len(order), count):
        sources, destinations = zip(*order[first : first + count], strict=True)
        assert sorted(sources) == sorted(destinations) == list(range(count))


def states(tried):
    return {pair.numbers: pair.state for pair in tried.pairs}


def test_all_work(attempt, said):
    tried = attempt()
    assert set(states(tried)) == set(in_rounds(3))
    assert set(states(tried).values()) == {State.WORKS}
    assert {pair.numbers: pair.gb_per_s for pair in tried.pairs}[2, 1] == 21.0
    assert said == ["loading torch and reaching the GPUs"]


def test_what_a_child_prints_is_no_failure(attempt):
    assert set(states(attempt("print('NCCL WARN something', flush=True)")).values()) == {State.WORKS}


def test_a_hang_names_its_pair_and_the_others_are_tried(attempt):
    tried = attempt("if numbers == [1, 2]: time.sleep(60)")
    assert states(tried).pop((1, 2)) is State.HUNG
    assert [pair.detail for pair in tried.pairs if pair.state is not State.WORKS] == [
        "copy 4 KiB: nothing moved for 1 s"
    ]
    assert len(tried.pairs) == 6


def test_an_error_of_cuda_names_its_pair_and_the_others_are_tried(attempt):
    tried = attempt("if numbers == [0, 2]: raise RuntimeError('CUDA error: unspecified launch failure')")
    failed = [pair for pair in tried.pairs if pair.state is not State.WORKS]
    assert [(pair.numbers, pair.state) for pair in failed] == [((0, 2), State.FAILED)]
    assert failed[0].detail == ("copy 4 KiB: it ended with 1: RuntimeError: CUDA error: unspecified launch failure")
    assert len(tried.pairs) == 6


def test_wrong_bytes_end_no_child(attempt):
    tried = attempt("wrong = 'copy 4 KiB: no byte arrived' if source == 1 else None")
    assert [pair.numbers for pair in tried.pairs if pair.state is State.WRONG] == [(1, 2), (1, 0)]
    assert {pair.gb_per_s for pair in tried.pairs if pair.state is State.WRONG} == {None}


def test_bytes_by_way_of_the_host_are_no_peer_traffic(attempt):
    assert set(states(attempt("offered = False")).values()) == {State.NOT_OFFERED}


def test_after_three_hangs_the_rest_stays_untried(attempt):
    began = time.monotonic()
    tried = attempt("time.sleep(60)", count=8, deadline=0.3)
    assert time.monotonic() - began < 20
    assert [pair.state for pair in tried.pairs] == [State.HUNG] * 3 + [State.UNTRIED] * 53


def test_a_dead_link_between_nodes_leaves_no_pair_of_one_node_untried(attempt):
    """After three hangs between the sockets the copying stopped, before most pairs of one socket."""
    nodes = [0, 0, 1, 1]
    tried = attempt("if source // 2 != destination // 2: time.sleep(60)", count=4, deadline=0.3, nodes=nodes)
    assert [pair.numbers for pair in tried.pairs if pair.state is State.WORKS] == [(0, 1), (2, 3), (1, 0), (3, 2)]
    assert [pair.state for pair in tried.pairs[4:]] == [State.HUNG] * 3 + [State.UNTRIED] * 5


def test_after_three_hangs_of_one_node_nothing_between_nodes_is_tried(attempt):
    tried = attempt("time.sleep(60)", count=4, deadline=0.3, nodes=[0, 0, 1, 1])
    assert [pair.state for pair in tried.pairs] == [State.HUNG] * 3 + [State.UNTRIED] * 9


def test_one_that_never_comes_to_a_pair_is_not_started_again(attempt, tmp_path):
    tried = attempt(program=f"open({str(tmp_path / 'starts')!r}, 'a').write('x'); raise ImportError('no torch')")
    assert {pair.state for pair in tried.pairs} == {State.UNTRIED}
    assert tried.pairs[0].detail.endswith(": it ended with 1: ImportError: no torch")
    assert (tmp_path / "starts").read_text() == "x"


def test_a_hang_while_loading_has_a_deadline_of_its_own(attempt, monkeypatch):
    monkeypatch.setattr(pairs, "LOADING_SECONDS", 0.5)
    tried = attempt(program="tell(step='loading torch and reaching the GPUs'); time.sleep(60)", deadline=60)
    assert tried.pairs[0].detail == "loading torch and reaching the GPUs: nothing moved for 0 s"


def test_why_no_kernel_was_tried_is_kept(attempt):
    tried = attempt(program="tell(no_kernel='no compiler')\n" + COPIES.format(fault="pass"))
    assert tried.no_kernel == "no compiler"
    assert len(json.dumps([str(pair) for pair in tried.pairs])) > 0
