"""docs/troubleshooting.md is what the signatures say, behind a head written by hand."""

import re
from pathlib import Path

import pytest

from aerie.diagnosis.handbook import handbook
from aerie.diagnosis.signatures import signatures

PAGE = Path(__file__).parents[3] / "docs/troubleshooting.md"


@pytest.fixture(scope="module")
def page():
    return handbook()


def test_the_page_is_up_to_date(page):
    written = PAGE.read_text(encoding="utf-8")
    assert written == page, "run: PYTHONPATH=src python -m aerie.diagnosis.handbook >docs/troubleshooting.md"


def test_every_signature_has_its_place_once(page):
    anchors = re.findall(r'^<a id="(.+)"></a>$', page, re.MULTILINE)
    assert sorted(anchors) == sorted(known.id for known in signatures())
    assert sorted(re.findall(r"^- \[.+\]\(#(.+)\)$", page, re.MULTILINE)) == sorted(anchors)


def test_every_signature_shows_the_words_by_which_it_is_found(page):
    symptoms = re.findall(r"```text\n(.*?)\n```", page, re.DOTALL)
    assert len(symptoms) == len(signatures())
    for known, symptom in zip(signatures(), symptoms, strict=True):
        assert any(map(known.match.search, (symptom, *symptom.splitlines()))), known.id


def test_the_hand_written_head_stays(page):
    assert page.startswith("# Troubleshooting\n")
    assert "## `docker compose up` stops" in page
    assert "**held**" in page


def test_parts_come_from_the_comments_between_the_signatures(tmp_path):
    entry = """\
- id: {0}
  title: Title {0}
  match: {0}
  where: cause
  kind: crash
  severity: harmless
  cause: Cause {0}.
  remedy: Remedy {0}.
  source: https://github.com/vllm-project/vllm/issues/1
  excerpt: "ValueError: {0}"
"""
    path = tmp_path / "signatures.yaml"
    path.write_text("# --- One ---\n" + entry.format("a") + entry.format("b") + "# --- Two ---\n" + entry.format("c"))
    written = handbook(path)
    assert re.findall(r"^## (One|Two)$|^### (.+)$", written, re.MULTILINE) == [
        ("One", ""),
        ("", "Title a"),
        ("", "Title b"),
        ("Two", ""),
        ("", "Title c"),
    ]
    assert "`a`: harmless; [vllm-project/vllm#1](https://github.com/vllm-project/vllm/issues/1)" in written
    assert "**Do:** Remedy c." in written
