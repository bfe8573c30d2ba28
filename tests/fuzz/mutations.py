"""Logs that no engine ever wrote: real ones cut, doubled, interleaved, spoilt; and what must hold for each of them."""

import json
from collections.abc import Callable
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

from hypothesis import strategies as st

from aerie.diagnosis import Collector, parse_kernel
from aerie.diagnosis.signatures import signatures
from aerie.startup import History, LineReader, StartReader

LOGS = Path(__file__).parents[1] / "fixtures/logs"
_LINES = 40  # of a real log in one seed
_LONGEST = 100_000  # bytes of a mutated log
_WIDTH = 100


def seeds() -> list[bytes]:
    """Every real log in pieces, and every signature's excerpt."""
    pieces = [known.excerpt.encode() for known in signatures()]
    pieces += [_reported(piece) for piece in pieces[::8]]
    for path in sorted(LOGS.glob("*.log")):
        lines = path.read_bytes().splitlines(keepends=True)
        pieces += [b"".join(lines[begin : begin + _LINES]) for begin in range(0, len(lines), _LINES)]
    return pieces


def _reported(log: bytes) -> bytes:
    """Write a log as a container's: with its supervisor's words and report, and the kernel's line."""
    collector, kernel = (
        Collector(carried=True),
        b"Nov 29 13:34:57 host1 kernel: NVRM: Xid (PCI:0000:41:00): 79, pid=7, x\n",
    )
    reader = LineReader()
    collector.feed(reader.feed(log))
    collector.feed(reader.end())
    report = collector.diagnose("vllm serve ended with exit code 1", parse_kernel(kernel.decode()))
    assert report
    end = f"aerie: failed; vllm serve ended with exit code 1; next start 13:35:10 UTC\n{report.text()}\n"
    return b"aerie: starting\n" + log + kernel + end.encode()


SEEDS = seeds()


class Cut(NamedTuple):
    """A log in three parts, another log, and a few bytes."""

    before: bytes
    inside: bytes
    after: bytes
    other: bytes
    junk: bytes


def _interleave(cut: Cut) -> bytes:
    pairs = zip_longest(cut.inside.splitlines(keepends=True), cut.other.splitlines(keepends=True), fillvalue=b"")
    return cut.before + b"".join(line for pair in pairs for line in pair) + cut.after


def _within(old: bytes, new: bytes) -> Callable[[Cut], bytes]:
    return lambda cut: cut.before + cut.inside.replace(old, new) + cut.after


MUTATIONS: dict[str, Callable[[Cut], bytes]] = {
    "drop": lambda cut: cut.before + cut.after,
    "keep": lambda cut: cut.inside,
    "double": lambda cut: cut.before + cut.inside + cut.inside + cut.after,
    "turn": lambda cut: cut.after + cut.before + cut.inside,
    "splice": lambda cut: cut.before + cut.other + cut.after,
    "interleave": _interleave,
    "insert": lambda cut: cut.before + cut.junk + cut.inside + cut.after,
    "half a character": lambda cut: cut.before + "😀".encode()[: 1 + len(cut.inside) % 3] + cut.inside + cut.after,
    "huge line": lambda cut: cut.before + cut.junk * 9000 + cut.after,
    "one line": _within(b"\n", b" "),
    "returns": _within(b"\n", b"\r"),
    "no indentation": _within(b"  ", b""),
    "margin": _within(b"\n", b"\n  | "),
    "prefix": _within(b"\n", b"\nvllm-1  | "),
}

_part = st.floats(0, 1, allow_nan=False)
_mutation = st.tuples(st.sampled_from(sorted(MUTATIONS)), _part, _part, st.sampled_from(SEEDS), st.binary(max_size=8))


@st.composite
def logs(draw: st.DrawFn) -> bytes:
    """A real log with up to five things done to it."""
    log = draw(st.sampled_from(SEEDS))
    for name, first, last, other, junk in draw(st.lists(_mutation, max_size=5)):
        begin, end = sorted((int(first * len(log)), int(last * len(log))))
        log = MUTATIONS[name](Cut(log[:begin], log[begin:end], log[end:], other, junk))[:_LONGEST]
    return log


def check(log: bytes, size: int) -> None:
    """Read a log in pieces of `size` bytes; whatever it holds, what is made of it has its form."""
    reader, collector, start = LineReader(), Collector(carried=True), StartReader(0.0, History(), stall_timeout=1800.0)
    at = 0.0
    for begin in range(0, len(log), size):
        lines = reader.feed(log[begin : begin + size])
        collector.feed(lines)
        for line in lines:
            at += 0.1
            start.say(line, at)
    last = reader.end()
    collector.feed(last)
    for line in last:
        start.say(line, at)
    json.dumps(start.view(at).to_json())
    told = collector.diagnose()
    assert told or not collector.dying
    for diagnosis in (told, collector.diagnose("ended", parse_kernel(log.decode(errors="replace")))):
        if diagnosis:
            json.dumps(diagnosis.to_json())
            lines = diagnosis.text().split("\n")
            assert max(map(len, lines)) <= _WIDTH
            assert all(line.isprintable() for line in lines)
