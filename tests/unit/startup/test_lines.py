"""Logs from wherever people copy them, read into what each process said."""

import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aerie.startup import Line, LineReader, parse
from aerie.startup.lines import KERNEL, LONGEST_LINE

LOGS = Path(__file__).parents[2] / "fixtures" / "logs"
ERROR = Line(
    '  File "core.py", line 7', "Worker_PP0_TP1", 7, level="ERROR", clock="11-29 13:34:58", source="core.py:1010"
)
SAID = {
    '(Worker_PP0_TP1 pid=7) ERROR 11-29 13:34:58 [core.py:1010]   File "core.py", line 7': [ERROR],
    "(EngineCore_DP0 pid=7)   File x": [Line("  File x", "EngineCore_DP0", 7)],
    "(ApiServer_3 pid=7) WARNING 11-29 13:34:58 [a.py:1] x": [
        Line("x", "ApiServer_3", 7, "WARNING", "11-29 13:34:58", "a.py:1")
    ],
    "(RayWorkerWrapper pid=7, ip=192.0.2.7) x": [Line("x", "RayWorkerWrapper", 7)],
    "(VllmWorker-0 pid=7) x": [Line("x", "VllmWorker-0", 7)],
    "INFO 11-29 13:34:58 [model_executor/.../x.py:104] Triton": [
        Line("Triton", level="INFO", clock="11-29 13:34:58", source="model_executor/.../x.py:104")
    ],
    "INFO:     Application startup complete.": [Line("INFO:     Application startup complete.")],
    "Loading safetensors checkpoint shards:  33% Completed | 2/6 [00:01<00:02, 2it/s]": [
        Line("Loading safetensors checkpoint shards:  33% Completed | 2/6 [00:01<00:02, 2it/s]")
    ],
    "    raise ValueError(": [Line("    raise ValueError(")],
    "[W1129 13:37:25.984519125 utils.cpp:68] Warning: NUMA": [
        Line("[W1129 13:37:25.984519125 utils.cpp:68] Warning: NUMA")
    ],
    "Run the custom code? [y/N] (APIServer pid=1) INFO 11-29 13:37:29 [a.py:1] Starting": [
        Line("Run the custom code? [y/N]"),
        Line("Starting", "APIServer", 1, "INFO", "11-29 13:37:29", "a.py:1"),
    ],
    "(EngineCore_DP0 pid=7) half(EngineCore_DP1 pid=8) whole": [
        Line("half", "EngineCore_DP0", 7),
        Line("whole", "EngineCore_DP1", 8),
    ],
    "(EngineCore pid=7) INFO 11-29 13:34:58 [a.py:1] half INFO 11-29 13:34:59 [b.py:2] whole": [
        Line("half", "EngineCore", 7, "INFO", "11-29 13:34:58", "a.py:1"),
        Line("whole", level="INFO", clock="11-29 13:34:59", source="b.py:2"),
    ],
    "(APIServer pid=7) INFO 11-29 13:34:58 [utils.py:302] ": [],
    "(EngineCore_DP0 pid=7)": [],
    "": [],
}
CARRIED = {
    "compose": "vllm-1  | {}",
    "compose with a project's own container name": "kimi     | {}",
    "compose in colours": "\x1b[36mvllm-1  | \x1b[0m{}",
    "docker --timestamps": "2026-11-29T13:34:58.123456789Z {}",
    "compose --timestamps": "vllm-1  | 2026-11-29T13:34:58.123456789Z {}",
    "journald": "Nov  9 13:34:58 host docker[812]: {}",
    "journald without a pid": "Nov 29 13:34:58 host.example vllm: {}",
    "journald short-iso": "2026-11-29T13:34:58+0000 host docker[812]: {}",
    "journald short-iso-precise": "2026-11-29T13:34:58.123456+00:00 host aerie@kimi.service[812]: {}",
    "journald short-unix": "1764423298.123456 host docker[812]: {}",
    "journald short-monotonic": "[ 1234.567890] host docker[812]: {}",
    "kubectl --prefix": "[pod/vllm-0/vllm] {}",
    "kubectl --prefix --timestamps": "[pod/vllm-0/vllm] 2026-11-29T13:34:58.123456789Z {}",
    "CRI": "2026-11-29T13:34:58.123456789Z stdout F {}",
    "CRI, stderr, a part": "2026-11-29T13:34:58.123456789+01:00 stderr P {}",
    "compose under journald": "Nov 29 13:34:58 host docker-compose[812]: vllm-1  | {}",
}


@pytest.mark.parametrize("written", SAID)
def test_a_line_is_read(written):
    assert parse(f"{written}\n") == SAID[written]


@pytest.mark.parametrize("how", CARRIED)
def test_what_carried_a_line_leaves_no_trace(how):
    read = {written: parse(CARRIED[how].format(written)) for written in SAID}
    assert {written: [line._replace(carrier="") for line in lines] for written, lines in read.items()} == SAID


@pytest.mark.parametrize("how", CARRIED)
@pytest.mark.parametrize("name", ["vllm-0.17.1-healthy-then-engine-dead", "vllm-0.32.0-h200x2-healthy-tp2"])
def test_a_whole_log_reads_the_same_however_it_was_carried(how, name):
    log = (LOGS / f"{name}.log").read_bytes().decode()
    carried = "\n".join(CARRIED[how].replace("{}", line) for line in log.split("\n"))
    assert [line._replace(carrier="") for line in parse(carried)] == parse(log)


@pytest.mark.parametrize(
    ("how", "carrier"),
    [
        ("compose", "vllm-1"),
        ("compose --timestamps", "vllm-1"),
        ("compose under journald", "vllm-1"),
        ("journald", "docker"),
        ("journald short-iso-precise", "aerie@kimi.service"),
        ("kubectl --prefix --timestamps", "pod/vllm-0/vllm"),
        ("CRI", ""),
    ],
)
def test_whose_output_a_line_was_taken_from_is_kept(how, carrier):
    assert {line.carrier for line in parse(CARRIED[how].format("(EngineCore pid=7) x"))} == {carrier}


def test_a_service_of_a_swarm_is_one_carrier():
    assert parse("kimi_vllm.1.abc@node1    | x") == [Line("x", carrier="kimi_vllm.1.abc@node1")]


@pytest.mark.parametrize("time", ["2026-11-29T13:34:57+0000", "Nov 29 13:34:57", "Nov 29 13:34:57.123456"])
def test_the_kernels_lines_keep_their_time(time):
    written = f"{time} host1 kernel: NVRM: Xid (PCI:0000:41:00): 79, GPU has fallen off the bus."
    assert parse(written) == [Line(written, KERNEL)]
    assert parse(f"{time} host1 docker[7]: kernel: x") != [Line(f"{time} host1 docker[7]: kernel: x", KERNEL)]


@pytest.mark.parametrize(
    "coloured",
    [
        "\x1b[0;36m(EngineCore pid=7)\x1b[0;0m \x1b[31mERROR\x1b[0m \x1b[90m11-29 13:34:58\x1b[0m [a.py:1] x",
        "^[[0;36m(EngineCore pid=7)^[[0;0m ^[[31mERROR^[[0m ^[[90m11-29 13:34:58^[[0m ^[[90m[a.py:1]^[[0m x",
        "[0;36m(EngineCore pid=7)[0;0m [31mERROR[0m [90m11-29 13:34:58[0m [90m[a.py:1][0m x",
        "\x1b[2K\x1b[1A\x1b[1;36m(EngineCore pid=7)\x1b[0;0m ERROR 11-29 13:34:58 [a.py:1] x\x1b[K",
    ],
)
def test_colours_go(coloured):
    assert parse(coloured) == [Line("x", "EngineCore", 7, "ERROR", "11-29 13:34:58", "a.py:1")]


def test_what_looks_like_a_colour_stays():
    assert parse("rate(errors[30m]) [10] [0;1]") == [Line("rate(errors[30m]) [10] [0;1]")]


@pytest.mark.parametrize(
    "text",
    [
        "vllm serve: error: unrecognized arguments: --x",
        "RuntimeError: Engine core initialization failed.",
        "process EngineCore pid=7 died",
        "2 | raise",
        "+----------+ | GPU  Name |",
        "NVRM: Xid (PCI:0000:41:00): 79, pid=7, GPU has fallen off the bus.",
    ],
)
@pytest.mark.parametrize("how", ["docker --timestamps", "journald short-iso", "CRI"])
def test_a_text_that_resembles_a_prefix_is_kept(how, text):
    assert [line.text for line in parse(CARRIED[how].format(text))] == [text]


def test_bars_end_in_carriage_returns():
    assert [line.text for line in parse("\rA:  1%\rA:  2%\r\n\nB\r\n")] == ["A:  1%", "A:  2%", "B"]


def test_the_head_before_a_carriage_return_names_who_draws_the_bar():
    read = parse("(EngineCore_DP0 pid=7) \rLoading:  1%\n\rLoading:  2%\n(EngineCore_DP0 pid=7) \n\rLoading:  3%\n")
    assert [(line.process, line.pid) for line in read] == [("EngineCore_DP0", 7), ("", None), ("", None)]


def test_an_empty_line_names_nobody_for_the_next():
    assert parse("(EngineCore_DP0 pid=7) \nplain\n(EngineCore_DP0 pid=7)\r\nplain\n") == [Line("plain"), Line("plain")]


def test_an_unfinished_line_comes_at_the_end():
    reader = LineReader()
    assert reader.feed(b"whole\nha") == [Line("whole")]
    assert (reader.end(), reader.end()) == ([Line("ha")], [])


@given(st.lists(st.sampled_from([*SAID, "ä€😀", "\r", "\x1b[31m", "vllm-1  | ", "x" * 50]), max_size=12), st.data())
@settings(max_examples=60, deadline=None)
def test_pieces_of_any_size_give_the_same_lines(parts, data):
    log = "\n".join(parts).encode()
    reader, lines, at = LineReader(), [], 0
    while at < len(log):
        size = data.draw(st.integers(min_value=1, max_value=len(log) - at))
        lines += reader.feed(log[at : at + size])
        at += size
    assert lines + reader.end() == parse(log.decode())


@given(st.binary(max_size=2000))
@settings(max_examples=100, deadline=None)
def test_any_bytes_are_read(data):
    reader = LineReader()
    for line in reader.feed(data) + reader.end():
        assert line.text.strip()
        assert "\n" not in line.text


def test_an_endless_line_is_not_kept_in_memory():
    reader = LineReader()
    lines = [line for _ in range(64) for line in reader.feed(b"x" * 4000)]
    assert {len(line.text) for line in lines} == {LONGEST_LINE}
    assert sum(map(len, reader._rest)) < LONGEST_LINE


@pytest.mark.parametrize("size", [1, 1000, 70_000])
def test_where_an_endless_line_is_cut_does_not_depend_on_the_pieces(size):
    log = b"x" * (2 * LONGEST_LINE) + b"y\n"
    reader, lines = LineReader(), []
    for at in range(0, len(log), size):
        lines += reader.feed(log[at : at + size])
    assert [len(line.text) for line in lines] == [LONGEST_LINE, LONGEST_LINE, 1]


HEADS = b"INFO 11-29 13:34:58 [a.py:1] x "


@pytest.mark.parametrize(
    "hostile",
    [b"(" * 400, b"a " * 400, b"(A pid=1) " * 80, b"vllm-1  | " * 80, b"\x1b[" * 400, b"\r" * 400, HEADS * 40],
)
@pytest.mark.parametrize("size", [1, 512])
def test_twice_as_much_is_twice_the_work(hostile, size):
    assert work(hostile * 2, size) <= 2.2 * work(hostile, size)


def work(log: bytes, size: int) -> int:
    """Return the characters that are searched and the lines of Python that run, which no other process disturbs."""
    count = 0

    def counting(frame, event, argument):
        nonlocal count
        if event == "line":
            count += 1
        elif event == "call" and "text" in frame.f_locals:
            count += len(frame.f_locals["text"]) - frame.f_locals.get("start", 0)
        return counting

    before = sys.gettrace()
    sys.settrace(counting)
    try:
        reader = LineReader()
        for at in range(0, len(log), size):
            reader.feed(log[at : at + size])
        reader.end()
    finally:
        sys.settrace(before)
    return count
