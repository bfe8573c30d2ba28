"""A real headless Chromium, Debian's, and the real status port."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from playwright.sync_api import sync_playwright
from states import Examples
from status_port import StatusPort

SCREENSHOTS = Path(__file__).parents[2] / ".aerie/screenshots"


@pytest.fixture(scope="session")
def browser():
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.fail("there is no chromium on PATH; `./run test-browser` installs Debian's", pytrace=False)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium)
        yield browser
        browser.close()


@pytest.fixture
def served():
    with StatusPort(Examples().loading()) as port:
        yield port


@pytest.fixture
def opened(browser, served):
    """Open the page in a context with these options. What it asked for and what it complained of are noted."""
    contexts = []

    def open_page(**options):
        contexts.append(browser.new_context(**{"viewport": {"width": 1000, "height": 760}, **options}))
        page = contexts[-1].new_page()
        page.asked, page.complaints = [], []
        page.on("request", lambda request: page.asked.append(request.url))
        page.on("console", lambda message: page.complaints.append(message.text))
        page.on("pageerror", lambda error: page.complaints.append(str(error)))
        page.goto(served.url)
        return page

    yield open_page
    for context in contexts:
        context.close()


@pytest.fixture(scope="session")
def screenshots():
    """The directory where the tests leave a picture of each state, for people to look at."""
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    return SCREENSHOTS
