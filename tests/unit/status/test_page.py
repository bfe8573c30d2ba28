"""The page for people, from a state."""

import copy
import re
from datetime import UTC, datetime, timedelta
from html.parser import HTMLParser

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from states import EXAMPLES, Examples

from aerie.diagnosis.signatures import signatures
from aerie.startup import StartPhase
from aerie.status.page import _code, _duration, render
from aerie.supervisor.state import Phase

NOW = datetime(2026, 11, 29, 22, 0, tzinfo=UTC)
EXAMPLE = Examples(NOW)
VOID = {"meta", "link"}
INLINE = {"a", "b", "code", "span", "time"}
# What is no text of an engine's: names that are looked up, and times.
FIXED = {"phase", "since", "began", "ended", "eta", "moved", "started", "at", "next_start"}


class Page(HTMLParser):
    """The page's elements, texts and attributes; refuses a tag that is closed before it was opened."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.attributes, self.open, self.text = [], [], [], ""
        self.feed(html)
        self.text = " ".join(self.text.split())

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        self.open += {tag} - VOID
        self.text += "" if tag in INLINE else " "

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if not set(self.open) & {"script", "style"}:
            self.text += data


def page(state, now=NOW, container=None):
    return Page(render(state, now, container))


def texts(node, path=()):
    """Yield the path of each text in a state that is free to be anything."""
    if isinstance(node, dict | list):
        for key, child in node.items() if isinstance(node, dict) else enumerate(node):
            yield from texts(child, (*path, key))
    elif isinstance(node, str) and (path[-1] not in FIXED or path == ("start", "phase")):
        yield path


def put(state, path, value):
    for key in path[:-1]:
        state = state[key]
    state[path[-1]] = value


@pytest.mark.parametrize("name", EXAMPLES)
def test_each_state_has_a_whole_page_that_loads_nothing(name):
    found = page(getattr(EXAMPLE, name)())
    assert found.open == []
    assert {value.split(":")[0] for key, value in found.attributes if key in {"src", "srcset", "data"}} == set()
    links = {value for key, value in found.attributes if key == "href"}
    assert {"status", "ready", "metrics"} <= links
    assert all(re.match(r"data:image/svg|status$|ready$|metrics$|https://github.com/", link) for link in links)
    assert "url(" not in render(getattr(EXAMPLE, name)(), NOW)


@pytest.mark.parametrize("phase", Phase)
def test_every_phase_has_a_page_before_anything_else_is_known(phase):
    nothing = EXAMPLE.refused() | {"phase": str(phase), "reason": None}
    assert page(nothing).open == []


def test_without_javascript_it_refreshes_itself():
    html = render(EXAMPLE.loading(), NOW)
    assert '<noscript><meta http-equiv="refresh" content="3"></noscript>' in html


@settings(deadline=None)
@given(
    name=st.sampled_from(EXAMPLES),
    hostile=st.text("<>&'\"`/ab\n", min_size=1, max_size=20).map(lambda text: f"</title><script>{text}</script>"),
)
def test_no_text_of_the_engine_becomes_markup(name, hostile):
    plain = getattr(EXAMPLE, name)()
    state = copy.deepcopy(plain)
    for path in texts(plain):
        put(state, path, hostile)
    found = page(state)
    assert found.open == []
    assert found.tags.count("script") == 1
    assert found.tags.count("title") == 1
    assert not [key for key, _value in found.attributes if key.startswith("on")]


def test_a_source_that_is_no_web_address_is_no_link():
    state = EXAMPLE.held()
    state["diagnosis"] |= {"source": "javascript:alert(1)"}
    found = page(state)
    assert ("href", "javascript:alert(1)") not in found.attributes
    assert "javascript:alert(1)" in found.text


def test_a_start_tells_where_it_is():
    state = EXAMPLE.loading()
    html, text = render(state, NOW), page(state).text
    assert "<title>34% · Starting · kimi-k2.5</title>" in html
    assert "26 of 64 shards" in text
    assert "Waiting for rank 3: 41.2 GB read" in text
    assert "for 6 min 4 s" in text
    assert "about 12 min left, ready near 22:11 UTC" in text
    assert "Last movement 1 s ago, a log line" in text
    assert re.search(r'<progress max="1" aria-label="Loading target" value="0.410">', html)
    assert html.count('aria-current="step"') == 1


def test_a_later_start_is_told():
    assert "start number 4 of this container" in page(EXAMPLE.starting_again()).text
    assert "start number" not in page(EXAMPLE.loading()).text


def test_a_bar_without_a_fraction_has_no_value():
    html = render(EXAMPLE.compiling(), NOW)
    assert '<progress max="1" aria-label="Compiling">' in html


@pytest.mark.parametrize("name", ["loading", "ready", "failed"])
def test_phases_that_a_start_left_out_are_not_shown(name):
    state = getattr(EXAMPLE, name)()
    assert "Spawning workers: done" in page(state).text
    state["start"]["phases"][1] |= {"began": None, "ended": None, "fraction": None}
    text = page(state).text
    assert "Spawning workers" not in text
    assert "Joining ranks: done" in text
    assert ("Compiling: to come" in text) == (name != "ready")


def test_the_phase_that_a_start_failed_in_is_marked():
    assert "Loading drafter: ended here" in page(EXAMPLE.failed()).text


def test_a_stall_is_said_with_what_comes_next_and_what_to_look_at():
    html, text = render(EXAMPLE.stalled(), NOW), page(EXAMPLE.stalled()).text
    assert "· Stalled · kimi-k2.5</title>" in html
    assert re.search(r'<h1 id="headline"><svg .*</svg>Stalled</h1>', html)
    assert "Nothing moves while joining ranks" in text
    assert "nothing has moved for 15 min 1 s" in text
    assert "this start is given up, and the next one follows by itself" in text
    (known,) = (known for known in signatures() if known.id == "start-stalled-joining-ranks")
    assert known.title in text
    assert f"What to look at {known.remedy.replace('`', '')}" in text


@pytest.mark.parametrize(("silent", "said"), [(299, False), (301, True)])
def test_a_start_that_is_quiet_for_long_says_what_to_look_at(silent, said):
    state = EXAMPLE.loading()
    state["start"]["silent_seconds"] = silent
    text = page(state).text
    assert ("Loading the weights has stopped" in text) is said
    assert ("is given up and tried again by itself" in text) is said
    assert "Stalled" not in text


@pytest.mark.parametrize("phase", StartPhase)
def test_a_stall_of_any_phase_has_something_to_look_at(phase):
    state = EXAMPLE.stalled()
    state["start"]["phase"] = str(phase)
    assert "What to look at" in page(state).text


def test_a_crash_tells_cause_place_and_next_start():
    text = page(EXAMPLE.failed(), container="3f2a9c1b7d20").text
    assert "IndexError: index 7168 is out of bounds" in text
    assert "Worker_TP3 (pid 412) · vllm/model_executor/models/llama_eagle3.py:217 in load_weights" in text
    assert "the cause is not known" in text
    assert "Next start in 48 s (22:00:48 UTC), after 2 failures in a row" in text
    assert "At once, on the host: docker exec 3f2a9c1b7d20 aerie retry" in text
    assert "/var/lib/aerie/crashes/2026-11-29T21-59-48Z.txt" in text


@pytest.mark.parametrize("name", ["failed", "held", "killed", "out_of_memory"])
def test_how_it_ended_does_not_repeat_why(name):
    state = getattr(EXAMPLE, name)()
    how = "vllm serve ended with exit code 1" if state["engine"]["exit"] else state["reason"].partition(": ")[0]
    assert re.search(f"How it ended {re.escape(how)} (Source|Report)", page(state).text)


@pytest.mark.parametrize(
    ("name", "title"),
    [
        ("failed", "Seen at the same time; not taken as the cause kernel: pcieport"),
        ("out_of_memory", "What shows it kernel: Memory cgroup out of memory"),
    ],
)
def test_evidence_says_whether_it_is_the_cause(name, title):
    assert title in page(getattr(EXAMPLE, name)()).text


@pytest.mark.parametrize(
    ("known", "kind", "title"),
    [
        (False, "hardware", "What shows it"),
        (False, "crash", "Seen at the same time; not taken as the cause"),
        (False, "hung", "Seen outside the engine's output"),
        (True, "configuration", "Seen at the same time; not taken as the cause"),
    ],
)
def test_evidence_is_headed_by_what_the_diagnosis_made_of_it(known, kind, title):
    state = EXAMPLE.held()
    state["diagnosis"] |= {"known": known, "kind": kind, "evidence": ["seen"]}
    assert f"{title} seen" in page(state).text


@pytest.mark.parametrize("name", ["starting_again", "unready", "stopping"])
def test_an_earlier_failure_does_not_pass_for_what_is_now(name):
    state = getattr(EXAMPLE, name)() | {"diagnosis": EXAMPLE.failed()["diagnosis"]}
    html, text = render(state, NOW), page(state).text
    assert "<summary>Why the last engine failed: The engine crashed, and the cause is not known</summary>" in html
    assert re.search('<p class="lead" role="status">(.*)</p>', html)[1] == (state["reason"] or "Loading target")
    assert "How it ended" not in text


def test_a_start_after_failures_counts_them():
    assert "start number 4 of this container, after 3 failures in a row" in page(EXAMPLE.starting_again()).text
    assert "failures" not in page(EXAMPLE.loading()).text


@pytest.mark.parametrize(
    ("innermost", "said"), [("vllm/a.py:1 in f", False), ("torch/b.py:2 in g", True), (None, False)]
)
def test_the_line_that_raised_is_told_where_it_is_another(innermost, said):
    state = EXAMPLE.held()
    state["diagnosis"]["root"] |= {"file": "vllm/a.py", "line": 1, "function": "f", "innermost": innermost}
    text = page(state).text
    assert "APIServer (pid 21258) · vllm/a.py:1 in f" in text
    assert ("raised in" in text) is said


def test_held_tells_how_to_go_on_before_the_details():
    found = page(EXAMPLE.held(), container="3f2a9c1b7d20")
    order = ["vLLM refuses this target model for EAGLE-3", "Use the image of this repository",
             "docker exec 3f2a9c1b7d20 aerie retry", "APIServer (pid 21258)", "docs/troubleshooting.md#"]  # fmt: skip
    assert sorted(order, key=found.text.index) == order
    assert found.text.count("Use the image of this repository") == 1
    assert "docs/troubleshooting.md#eagle3-target-not-listed Signature eagle3-target-not-listed" in found.text
    assert ("href", "https://github.com/vllm-project/vllm/issues/31254") in found.attributes


def test_a_refusal_before_any_start_is_said():
    assert "/etc/aerie/secrets/api-keys: no key in it" in page(EXAMPLE.refused()).text


def test_ready_tells_speculation_and_load():
    text = page(EXAMPLE.ready()).text
    assert "Mean acceptance length 2.61 tokens a step" in text
    assert "1st drafted token 76%" in text
    assert "3rd drafted token 34%" in text
    assert "Drafted tokens accepted 53% of 2,754,699 tokens" in text
    assert "Generating 1,193 tokens/s" in text
    assert "Running 23 requests" in text
    assert "Waiting 4 requests" in text
    assert "KV cache in use 62%" in text
    assert "vLLM 0.32.0" in text
    assert "The start took 17 min 50 s" in text


def test_ready_tells_of_the_restarts_before_it():
    text = page(EXAMPLE.ready_again()).text
    assert "Engine restarts 2 Of them after a hang 1 Failures in a row 1, forgotten" in text
    assert "Last end killed by SIGSEGV, 21:40:40 UTC" in text
    assert "Engine restarts" not in page(EXAMPLE.ready()).text


def test_an_engine_that_has_drafted_nothing_says_so():
    zero = {"drafts": 0, "draft_tokens": 0, "accepted_tokens": 0, "accepted_by_position": [0, 0]}
    assert "Nothing has been drafted yet" in page(EXAMPLE.ready_idle() | {"speculation": zero}).text
    assert "reports no speculation" in page(EXAMPLE.ready_idle()).text


def test_an_engine_that_has_served_is_not_quoted():
    """The state keeps its words back, since they may quote a request; its last line is kept back here."""
    text = page(EXAMPLE.failed_while_serving(), container="3f2a9c1b7d20").text
    assert "IndexError Worker_TP3 (pid 412) · vllm/v1/sample/rejection_sampler.py:131 in forward" in text
    assert "on the host: docker exec 3f2a9c1b7d20 cat /var/lib/aerie/crashes/2026-11-29T21-59-58Z.txt" in text
    assert "out of bounds" not in text
    assert "SECRET" not in render(EXAMPLE.ready() | {"last_line": "SECRET"}, NOW)


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (-3, "0 s"),
        (0.9, "0 s"),
        (59, "59 s"),
        (60, "1 min"),
        (75, "1 min 15 s"),
        (3600, "1 h"),
        (3661, "1 h 1 min"),
        (90061, "1 d 1 h"),
    ],
)
def test_a_measured_time_has_two_units_at_most(seconds, words):
    assert _duration(seconds) == words


def test_a_time_of_another_day_has_its_date():
    state = EXAMPLE.held()
    assert "Failed 21:00:00 UTC" in page(state).text
    assert "Failed 2026-11-29 21:00 UTC" in page(state, NOW + timedelta(days=1)).text


def test_backquotes_set_code_and_nothing_else():
    assert _code("set `A<B` & `C`, not `") == "set <code>A&lt;B</code> &amp; <code>C</code>, not `"


@pytest.mark.parametrize(
    ("warming", "text"),
    [
        ({"state": "reading", "warmed_bytes": 312_400_000_000, "total_bytes": 595 * 10**9}, "312 of 595 GB read ahead"),
        ({"state": "skipped", "text": "nothing was read ahead: so little memory"}, "so little memory"),
    ],
)
def test_a_start_shows_what_is_read_ahead(warming, text):
    starting = EXAMPLE.loading()
    assert text in page(starting | {"warming": warming}).text
    assert "Page cache" not in page(starting | {"warming": None}).text
