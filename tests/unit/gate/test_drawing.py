"""What a terminal shows of a state."""

import re

import pytest

from aerie.gate.drawing import Style, cells, clip, frame, overview
from aerie.gate.words import Outlook, Step, clock, percent, rough

PLAIN = Style()
RETRY = "docker exec 3f2a9c1b7d20 aerie retry"
LOADING = Step("loading target", "26 of 64 shards, 41%", Outlook(0.33, 512.0))


def test_a_start_is_a_line_of_words_and_a_bar_below():
    assert frame(LOADING, 252, 80, PLAIN) == [
        "loading target  26 of 64 shards, 41%                           about 9 min left",
        "█" * 19 + "░" * 41 + "  33%  4:12",
    ]


def test_the_bar_has_other_characters_where_the_terminal_lacks_blocks():
    assert frame(LOADING, 252, 80, Style(blocks=False))[1] == "#" * 19 + "-" * 41 + "  33%  4:12"


def test_a_narrow_terminal_gets_one_line():
    assert frame(LOADING, 252, 40, PLAIN) == ["loading target 33% 9 min"]
    assert frame(LOADING, 252, 20, PLAIN) == ["loading ~ 33% 9 min"]


@pytest.mark.parametrize(
    "step",
    [
        LOADING,
        Step("加载模型" * 12, "第 26 个 / 64", Outlook(0.5, 7300.0)),
        Step("compiling", "", Outlook(None, None)),
        Step("compiling", "waiting for " + "rank 3 " * 30, Outlook(1.0, 0.0)),
        Step("failed: " + "a long reason " * 20, "the next start is at noon"),
    ],
)
def test_no_line_fills_the_terminal(step):
    for columns in [*range(2, 130), 400]:
        lines = frame(step, 3725, columns, PLAIN)
        assert 1 <= len(lines) <= 2
        assert all(cells(line) < columns for line in lines), lines


def test_colour_changes_no_character():
    coloured = frame(LOADING, 252, 80, Style(colour=True))
    assert coloured[0].startswith("\x1b[1mloading target\x1b[0m  26")
    assert [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in coloured] == frame(LOADING, 252, 80, PLAIN)


def test_what_a_log_says_cannot_steer_the_terminal():
    assert clip("a\x1b[2Jb\x07\u009bc\n", 80) == "a [2Jb  c "
    assert "\x1b" not in "".join(frame(Step("failed: \x1b]0;title\x07"), 1, 80, PLAIN))


@pytest.mark.parametrize(
    ("text", "columns", "shown"),
    [
        ("abc", 3, "abc"),
        ("abcd", 3, "ab~"),
        ("加载", 3, "加~"),
        ("e\u0301e", 2, "e\u0301e"),
        ("ab", 1, "~"),
        ("ab", 0, ""),
    ],
)
def test_a_text_that_is_too_long_is_cut_by_what_it_takes_on_the_screen(text, columns, shown):
    assert clip(text, columns) == shown


def test_numbers_as_people_read_them():
    assert [percent(each) for each in (None, 0.0, 0.29, 0.999, 1.0)] == ["", "0%", "29%", "99%", "100%"]
    assert [rough(each) for each in (0.2, 45, 89, 90, 3400, 7300)] == [
        "1 s",
        "45 s",
        "89 s",
        "2 min",
        "57 min",
        "2 h 2 min",
    ]
    assert [clock(each) for each in (0.9, 61, 3725)] == ["0:00", "1:01", "1:02:05"]


def test_the_overview_of_a_start(state):
    configured, loading, drafter = state()["start"]["phases"]
    left_out = drafter | {"name": "joining ranks"}
    phases = [configured, left_out, loading, drafter]
    assert list(overview(state(start={"phases": phases}), 80, PLAIN, RETRY)) == [
        "kimi  starting since 2026-11-29T12:00:00Z",
        "",
        "  ✓ configuring                     0:08",
        "  ▸ loading target               " + "█" * 8 + "░" * 12 + "  41%  26 of 64 shards",
        "  · loading drafter",
        "  start 33%, about 9 min left",
        "  waiting for rank 3: 41.2 GB read",
        "",
        "  engine        pid 7, starts 1, failures in a row 0",
        "  versions      aerie 0.1.0",
    ]


def test_the_overview_of_a_stalled_start(state):
    shown = list(overview(state(start={"stalled": True, "silent_seconds": 1900}), 80, PLAIN, RETRY))
    assert "  stalled: nothing has moved for 32 min" in shown


def test_the_overview_of_a_failure(state):
    ended = {"code": None, "signal": "SIGKILL", "at": "12:00"}
    failed = state(
        phase="failed", reason="vllm serve was killed by SIGKILL", next_start="2026-11-29T12:01:00Z", failures=2,
        start={"ended": "2026-11-29T12:00:10Z"}, last_line="Loading", engine={"pid": None, "starts": 2, "exit": ended},
    )  # fmt: skip
    assert list(overview(failed, 80, PLAIN, RETRY)) == [
        "kimi  failed since 2026-11-29T12:00:00Z",
        "  vllm serve was killed by SIGKILL",
        "",
        "  next start    2026-11-29T12:01:00Z",
        "  start now     docker exec 3f2a9c1b7d20 aerie retry",
        "  engine        pid -, starts 2, failures in a row 2",
        "  last exit     killed by SIGKILL at 12:00",
        "  last line     Loading",
        "  versions      aerie 0.1.0",
    ]


def test_the_overview_of_a_held_service_has_the_way_on_and_no_phases(state):
    held = state(phase="held", reason="no key", failures=1)
    assert list(overview(held, 80, PLAIN, RETRY)) == [
        "kimi  held since 2026-11-29T12:00:00Z",
        "  no key",
        "",
        "  to go on      docker exec 3f2a9c1b7d20 aerie retry",
        "  ended in      loading target",
        "  engine        pid 7, starts 1, failures in a row 1",
        "  versions      aerie 0.1.0",
    ]


@pytest.mark.parametrize("cause", ["no key", "KeyError: 'x'"])
def test_the_overview_leaves_the_cause_to_the_diagnosis(state, diagnosis, cause):
    told = diagnosis | {"title": "no key", "root": {"text": "KeyError: 'x'\nof y"}}
    failed = state(phase="failed", reason=f"vllm serve ended with exit code 1: {cause}", diagnosis=told)
    assert list(overview(failed, 80, PLAIN, RETRY))[1] == "  vllm serve ended with exit code 1"


@pytest.mark.parametrize("phase", ["starting", "checking", "ready", "unready", "stopping", "stopped"])
def test_only_a_service_that_is_down_can_be_started_anew(state, phase):
    assert "aerie retry" not in "\n".join(overview(state(phase=phase), 80, PLAIN, RETRY))


def test_the_overview_of_a_service_at_work(state):
    serving = {"requests_running": 3, "requests_waiting": 1, "kv_cache_usage": 0.123,
               "generation_tokens_per_second": 93.14, "prompt_tokens_per_second": 10.0}  # fmt: skip
    speculation = {"drafts": 10, "draft_tokens": 30, "accepted_tokens": 17, "accepted_by_position": [8, 6, 3]}
    ready = state(phase="ready", start={"ended": "x"}, serving=serving, speculation=speculation)
    assert list(overview(ready, 80, Style(colour=True), RETRY))[:1] == [
        "kimi  \x1b[1;32mready\x1b[0m since 2026-11-29T12:00:00Z"
    ]
    assert list(overview(ready, 80, PLAIN, RETRY))[2:6] == [
        "  requests      3 running, 1 waiting",
        "  KV cache      12% in use",
        "  tokens        93.1 a second",
        "  speculation   2.70 tokens a step over 10 drafts",
    ]


@pytest.mark.parametrize("columns", [10, 30, 50, 100])
def test_no_line_of_the_overview_is_wider_than_the_terminal(state, columns):
    assert all(cells(line) <= max(columns, 43) for line in overview(state(last_line="x" * 300), columns, PLAIN, RETRY))
