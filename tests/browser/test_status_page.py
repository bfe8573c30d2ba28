"""The status page in a real browser: what it looks like, how it keeps itself up to date, and whom it leaves out."""

from __future__ import annotations

import re

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import expect
from states import EXAMPLES, Examples

# Name, width and colour scheme.
SCREENS = [("light", 1000, "light"), ("dark", 1000, "dark"), ("phone", 360, "light"), ("phone-dark", 360, "dark")]
HOSTILE = "<img src=x onerror=\"document.title='taken'\"></title><script>document.title='taken'</script>"
MOMENT = 5000  # ms in which the page must show what has changed
AXE = Axe()


def violations(page):
    return AXE.run(page, options={"resultTypes": ["violations"]}).response["violations"]


@pytest.mark.parametrize("name", EXAMPLES)
def test_each_state_on_each_screen(opened, served, screenshots, name):
    """Nothing but this port is asked, nothing is complained of, nothing sticks out, and axe finds no barrier."""
    served.state = getattr(Examples(), name)()
    page = opened()
    for screen, width, scheme in SCREENS:
        page.set_viewport_size({"width": width, "height": 760})
        page.emulate_media(color_scheme=scheme)
        page.screenshot(path=screenshots / f"{name}-{screen}.png", full_page=True)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), f"{screen} scrolls sideways"
    page.evaluate("document.querySelectorAll('details').forEach((each) => (each.open = true))")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "what was opened scrolls sideways"
    assert violations(page) == []
    page.emulate_media(color_scheme="light")
    page.set_viewport_size({"width": 1000, "height": 760})
    assert violations(page) == []
    assert page.complaints == []
    assert [url for url in page.asked if not url.startswith(("data:image/svg", served.url))] == []


def test_dark_mode_turns_the_colours_round(opened):
    def lightness(**options):
        page = opened(**options)
        colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
        return sum(int(part) for part in re.findall(r"\d+", colour)[:3]) / 3

    assert lightness(color_scheme="light") > 230
    assert lightness(color_scheme="dark") < 40


def test_without_javascript_the_essentials_are_there_and_it_refreshes(opened, served):
    page = opened(java_script_enabled=False)
    expect(page.get_by_role("heading", level=1)).to_have_text("Starting")
    expect(page.locator("li[aria-current=step]")).to_contain_text("26 of 64 shards")
    served.state = Examples().ready()
    expect(page.get_by_role("heading", level=1)).to_have_text("Ready", timeout=MOMENT)


def test_it_goes_from_starting_to_ready_without_a_reload(opened, served):
    page = opened()
    page.evaluate("window.stays = true")
    expect(page.get_by_role("progressbar", name="Loading target")).to_have_attribute("value", "0.410")
    served.state = Examples().ready()
    expect(page.get_by_role("heading", level=1)).to_have_text("Ready", timeout=MOMENT)
    expect(page.get_by_role("meter", name="KV cache in use")).to_have_attribute("value", "0.620")
    expect(page).to_have_title("Ready · kimi-k2.5")
    assert page.evaluate("window.stays")
    assert page.complaints == []


def test_an_update_keeps_scroll_focus_selection_and_what_was_opened(opened, served):
    served.state = Examples().failed()
    page = opened(viewport={"width": 700, "height": 400})
    page.get_by_text("The lines themselves").click()
    page.get_by_role("link", name="metrics").focus()
    page.evaluate("scrollTo(0, 300); getSelection().selectAllChildren(document.querySelector('figure pre'))")
    before = page.locator("footer time").text_content()
    nodes = page.evaluate("window.pre = document.querySelector('figure pre'); scrollY")
    served.state |= {"failures": 3}
    expect(page.get_by_text("after 3 failures in a row")).to_be_visible(timeout=MOMENT)
    expect(page.locator("footer time")).not_to_have_text(before, timeout=MOMENT)
    assert page.evaluate("scrollY") == nodes == 300
    assert page.evaluate("document.querySelector('figure pre') === window.pre")
    assert page.evaluate("document.activeElement.textContent") == "metrics"
    assert "IndexError" in page.evaluate("getSelection().toString()")
    expect(page.locator("#diagnosis details")).to_have_attribute("open", "")


def test_only_what_changed_is_read_out(opened, served):
    """The announced sentence stays untouched while figures count, and changes with the phase."""
    page = opened()
    page.evaluate(
        "window.said = []; new MutationObserver(() => said.push(document.querySelector('[role=status]').textContent))"
        ".observe(document.querySelector('[role=status]'), {subtree: true, childList: true, characterData: true})"
    )
    served.state["start"]["phases"][3]["fraction"] = 0.5
    expect(page.get_by_role("progressbar", name="Loading target")).to_have_attribute("value", "0.500", timeout=MOMENT)
    assert page.evaluate("said") == []
    served.state = Examples().compiling()
    expect(page.get_by_role("status")).to_have_text("Compiling", timeout=MOMENT)
    assert page.evaluate("said") == ["Compiling"]


def test_a_supervisor_that_is_gone_is_said_and_one_that_comes_back_is_seen(opened, served):
    page = opened()
    expect(page.get_by_role("alert")).to_be_empty()
    served.stop()
    expect(page.get_by_role("alert")).to_contain_text("The supervisor has not answered since", timeout=MOMENT)
    expect(page.get_by_role("heading", level=1)).to_have_text("Starting")
    assert violations(page) == []
    served.state = Examples().ready()
    served.start()
    expect(page.get_by_role("heading", level=1)).to_have_text("Ready", timeout=MOMENT)
    expect(page.get_by_role("alert")).to_be_empty()


def test_what_is_no_page_of_ours_is_not_shown(opened, served):
    page = opened()
    page.route("**/*", lambda route: route.fulfill(status=200, body="<h1>Sign in</h1>", content_type="text/html"))
    expect(page.get_by_role("alert")).to_contain_text("has not answered", timeout=MOMENT)
    expect(page.get_by_role("heading", level=1)).to_have_text("Starting")


def test_a_page_of_another_release_is_loaded_anew(opened, served):
    page = opened()
    page.evaluate("window.stays = true; document.querySelector('style').textContent += ' '")
    page.wait_for_event("load", timeout=MOMENT)
    assert page.evaluate("window.stays") is None


def test_what_an_engine_says_is_text(opened, served):
    state = Examples().failed()
    root = state["diagnosis"]["root"] | {"text": HOSTILE, "excerpt": [HOSTILE], "function": HOSTILE}
    served.state = state | {"reason": HOSTILE, "diagnosis": state["diagnosis"] | {"title": HOSTILE, "root": root}}
    page = opened()
    expect(page.locator("figure pre")).to_have_text(HOSTILE)
    served.state = Examples().loading() | {"last_line": HOSTILE, "model": HOSTILE}
    expect(page.get_by_text(HOSTILE).last).to_be_visible(timeout=MOMENT)
    assert page.locator("img").count() == 0
    assert page.title() != "taken"
    assert page.complaints == []


def test_a_script_that_got_in_would_not_run(opened):
    """The content security policy holds even where escaping failed."""
    page = opened()
    page.evaluate(
        "document.body.append(Object.assign(document.createElement('script'), {text: 'window.taken = true'}))"
    )
    assert page.evaluate("window.taken") is None
    assert any("Content Security Policy" in complaint for complaint in page.complaints)


def test_it_is_usable_by_keyboard(opened, served):
    served.state = Examples().held()
    page = opened()
    reached = []
    for _ in range(6):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.textContent"))
    assert reached[0] == "The lines themselves"
    assert reached[-3:] == ["status", "ready", "metrics"]


def test_reduced_motion_is_honoured(opened, served):
    served.state = Examples().compiling()
    animation = "getComputedStyle(document.querySelector('li progress:indeterminate')).animationName"
    assert opened().evaluate(animation) == "sweep"
    assert opened(reduced_motion="reduce").evaluate(animation) == "none"


def test_a_bar_without_a_fraction_is_striped_and_not_part_full(opened, served):
    served.state = Examples().compiling()
    page = opened(reduced_motion="reduce")
    background = page.evaluate("getComputedStyle(document.querySelector('li progress:indeterminate')).backgroundImage")
    assert background.startswith("repeating-linear-gradient(")


def test_a_start_after_a_failure_has_the_old_diagnosis_folded(opened, served):
    served.state = Examples().failed()
    page = opened()
    expect(page.get_by_text("IndexError").first).to_be_visible()
    served.state = Examples().starting_again()
    expect(page.get_by_text("Why the last engine failed")).to_be_visible(timeout=MOMENT)
    expect(page.locator("#diagnosis figure")).to_be_hidden()
