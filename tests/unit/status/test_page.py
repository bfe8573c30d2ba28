"""The page for people, from a state."""

from html.parser import HTMLParser

import pytest

from aerie.status.page import render
from aerie.supervisor.state import Phase

STATE = {
    "phase": "starting",
    "step": "loading target",
    "progress": 0.5,
    "reason": None,
    "since": "2026-11-29T12:00:00Z",
    "model": "kimi",
    "engine": {"pid": 7, "starts": 1, "started": None, "exit": None},
    "last_error": None,
    "last_line": "",
    "next_start": None,
    "failures": 0,
    "speculation": None,
    "versions": {},
}


class Reader(HTMLParser):
    """Collects tags, and refuses one that is closed before it was opened."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.attributes, self.open = [], [], []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.mark.parametrize("phase", Phase)
def test_every_phase_has_a_whole_page_that_loads_nothing(phase):
    page = Reader(render(STATE | {"phase": str(phase)}))
    assert page.open == []
    assert "script" not in page.tags
    assert not {name for name, _ in page.attributes} & {"src", "href"}
    assert ("http-equiv", "refresh") in page.attributes


def test_the_reason_is_on_the_page_as_it_is():
    assert "the engine's reason" in render(STATE | {"phase": "failed", "reason": "the engine's reason"})


def test_what_an_engine_says_cannot_become_markup():
    page = render(STATE | {"last_error": "<script>alert('x')</script> &", "model": "</title><b>"})
    assert "&lt;script&gt;" in page
    assert Reader(page).tags.count("script") == Reader(page).tags.count("b") == 0


def test_a_bar_only_where_there_is_a_fraction():
    assert '<progress value="0.500">' in render(STATE)
    assert "<progress" not in render(STATE | {"progress": None})
