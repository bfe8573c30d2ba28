"""One verdict from pairs and all-reduces, and how it is shown."""

import json

import pytest

from aerie.fabric.all_reduce import Reduction
from aerie.fabric.all_reduce import State as Reduced
from aerie.fabric.pairs import Pair, State, Tried, in_rounds
from aerie.fabric.report import Gpu, Report, Verdict, lines_of
from aerie.fabric.sizes import REDUCTIONS
from aerie.supervisor.tree import Survivor


def reduction(state=Reduced.WORKS, detail="", slower=1.0, ranks=4):
    seconds = {size: size / 20e9 * slower + 20e-6 for size in REDUCTIONS} if state is Reduced.WORKS else {}
    return Reduction("nccl", ranks, state, detail, seconds)


def report(peer=None, fallback=None, count=4, nodes=(-1,) * 8, **states):
    """`states` are pairs, as p01=State.HUNG."""
    tried = []
    for source, destination in in_rounds(count):
        state = states.get(f"p{source}{destination}", State.WORKS)
        tried.append(Pair(source, destination, state, "" if state is State.WORKS else "copy 4 KiB: it says why", 50.0))
    gpus = [Gpu("RTX PRO 6000", f"0000:0{number}:00.0", nodes[number]) for number in range(count)]
    return Report("nccl", gpus, {}, Tried(tried), peer or reduction(), fallback)


WORKS, HANGS = reduction(), reduction(Reduced.HUNG, "all 4 ranks: all-reduce of 14 KiB: nothing moved for 60 s")
SLOW = reduction(slower=4.0)
LOST = reduction(Reduced.FAILED, "rank 0: it ended with 1")
UNTRIED = {f"p{a}{b}": State.UNTRIED for a, b in in_rounds(4)}
ALL = "12 pairs of 4 GPUs"
TWO = (0, 0, 1, 1)


@pytest.mark.parametrize(
    ("found", "verdict", "peer", "why"),
    [
        (report(), "works", "works", f"bytes arrive between all {ALL}, and NCCL reduces over all of them"),
        (report(HANGS, SLOW), "dead", "dead", f"bytes arrive between all {ALL}, but NCCL's all-reduce"),
        (report(HANGS, LOST), "failed", "unproven", "without peer traffic neither: rank 0: it ended with 1"),
        (report(HANGS), "failed", "unproven", "nothing moved for 60 s"),
        (report(WORKS, SLOW, p01=State.HUNG, p10=State.HUNG), "dead", "dead", f"2 of {ALL} are dead, the first 0 to 1"),
        (report(HANGS, SLOW, p23=State.WRONG), "dead", "dead", f"1 of {ALL} are dead, the first 2 to 3 (copy 4 KiB"),
        (report(WORKS, SLOW, p12=State.NOT_OFFERED), "dead", "dead", f"offers no peer access between 1 of {ALL}"),
        (
            report(WORKS, nodes=TWO, p02=State.HUNG, p20=State.UNTRIED),
            "limited",
            "limited",
            f"1 of {ALL} are dead, the first 0 to 2",
        ),
        (
            report(WORKS, nodes=TWO, p13=State.NOT_OFFERED),
            "limited",
            "limited",
            "over all GPUs with NCCL_P2P_LEVEL=PHB",
        ),
        (report(HANGS, SLOW, nodes=TWO, p02=State.HUNG), "dead", "dead", "the fallback works"),
        (report(WORKS, SLOW, nodes=TWO, p02=State.HUNG, p01=State.HUNG), "dead", "dead", f"2 of {ALL} are dead"),
        (report(WORKS, SLOW, nodes=(0, 1, 2, 3), p02=State.HUNG), "dead", "dead", f"1 of {ALL} are dead"),
        (report(WORKS, SLOW, **UNTRIED), "failed", "unproven", f"none of {ALL} could be tried"),
        (Report("nccl", untried="no GPU is to be seen here"), "unproven", "unproven", "no GPU is to be seen here"),
        (Report("gloo", peer=WORKS), "works", "unproven", "proves nothing about GPUs"),
        (Report("gloo", peer=HANGS), "failed", "unproven", "nothing moved for 60 s"),
        (Report("nccl"), "unproven", "unproven", "it was interrupted"),
    ],
)
def test_the_verdict_follows_from_what_was_found(found, verdict, peer, why):
    assert (found.verdict, found.peer_to_peer) == (Verdict(verdict), peer)
    assert why in found.why
    told = list(lines_of(found))
    assert any(line.lower().startswith(f"{verdict}: ") for line in told)
    assert ("  The first alone hangs later." in told) == (peer == "dead")


def test_the_fallback_is_told_with_its_price():
    found = report(WORKS, SLOW, p01=State.HUNG)
    price = found.price
    assert price["ratio"] == pytest.approx(0.25, abs=0.01)
    assert price["peer_gb_per_s"] == pytest.approx(30, abs=0.5)
    assert found.why.endswith(f"the fallback works, at {price['fallback_gb_per_s']:.1f} GB/s against 29.9")
    assert any(
        "without peer traffic: 112 MiB are reduced at 7.5 GB/s against 29.9 (0.25)" in line for line in lines_of(found)
    )


def test_without_a_working_peer_there_is_no_price_but_a_figure():
    found = report(HANGS, SLOW)
    assert found.price is None
    assert found.why.endswith("the fallback works, at 7.5 GB/s")


def test_the_matrix_has_every_pair_in_its_place():
    lines = list(
        lines_of(report(WORKS, SLOW, p01=State.HUNG, p23=State.WRONG, p32=State.NOT_OFFERED, p13=State.UNTRIED))
    )
    rows = [line.split() for line in lines[1:6]]
    assert rows == [
        ["0", "1", "2", "3"],
        ["0", "-", "HUNG", "50.0", "50.0"],
        ["1", "50.0", "-", "50.0", "?"],
        ["2", "50.0", "50.0", "-", "WRONG"],
        ["3", "50.0", "50.0", "host", "-"],
    ]
    assert "  0 to 1 hung: copy 4 KiB: it says why" in lines


def test_eight_gpus_fit_a_terminal_and_dead_pairs_are_not_told_without_end():
    everything = {f"p{a}{b}": State.HUNG for a, b in in_rounds(8)}
    lines = list(lines_of(report(HANGS, SLOW, count=8, **everything)))
    assert max(len(line) for line in lines[:10]) <= 80
    assert "  and 48 more" in lines


def test_a_process_that_cannot_be_ended_is_told_with_what_to_do():
    found = report(HANGS)
    found.peer = Reduction("nccl", 4, Reduced.HUNG, "all", survivors=[Survivor(7, "python", "D", "uvm_lock")])
    assert "restart the host" in "\n".join(lines_of(found))
    assert found.to_json()["survivors"] == ["python (pid 7, state D, waits in uvm_lock)"]


@pytest.mark.parametrize("found", [report(), report(HANGS, SLOW, p01=State.HUNG), Report("nccl", untried="none")])
def test_the_json_has_its_schema_and_can_be_written(found):
    written = json.loads(json.dumps(found.to_json()))
    assert set(written) == {
        "schema", "verdict", "peer_to_peer", "why", "backend", "gpus", "pairs", "no_kernel", "all_reduce", "price",
        "environment", "survivors", "seconds",
    }  # fmt: skip
    assert written["schema"] == 1
    assert all(set(pair) == {"from", "to", "state", "detail", "gb_per_s"} for pair in written["pairs"])
