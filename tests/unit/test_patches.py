"""The record of the patches in an image, as `aerie patches` and the start-up line tell it."""

import json
from pathlib import Path

import pytest

from aerie import cli, patches

PATCH = """\
Subject: CPU: a first
 and a second line
Origin: vendor
Bug: https://github.com/vllm-project/vllm/issues/1
Upstream-Status: Pending [to be offered]
Drop-When: it is there
Test: tests/patches/contracts/program.py (contract-a, contract-b)

Subject: of the explanation, not of the header.
---
--- a/vllm/one.py
+++ b/vllm/one.py
@@ -1 +1 @@
-a
+b
"""
REPORT = """\
vLLM 0.32.0+cpu with 2 patches (sha256:abc)

b-first.patch: CPU: a first and a second line
  origin           vendor
  bug              https://github.com/vllm-project/vllm/issues/1
  upstream status  Pending [to be offered]
  drop when        it is there
  test             tests/patches/contracts/program.py (contract-a, contract-b)

a-second.patch: second
  origin           backport, https://x/y
"""


@pytest.fixture
def record(tmp_path, monkeypatch):
    """A record as the image's build writes it."""
    (tmp_path / "series").write_text("# why\nb-first.patch\n\na-second.patch  # note\n")
    (tmp_path / "b-first.patch").write_text(PATCH)
    (tmp_path / "a-second.patch").write_text("Subject: second\nOrigin: backport, https://x/y\n---\n--- a/x\n+++ b/x\n")
    (tmp_path / "digest").write_text("sha256:abc\n")
    monkeypatch.setattr(patches, "RECORD", tmp_path)
    monkeypatch.setattr(patches, "vllm_version", lambda: "0.32.0+cpu")
    return tmp_path


@pytest.fixture
def no_record(tmp_path, monkeypatch):
    monkeypatch.setattr(patches, "RECORD", tmp_path / "none")


def test_patches_are_told_in_the_order_of_application_with_where_they_are_from(record, capsys):
    assert cli.main(["patches"]) == 0
    assert capsys.readouterr().out == REPORT


def test_the_same_as_json(record, capsys):
    assert cli.main(["patches", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["vllm"], told["digest"]) == ("0.32.0+cpu", "sha256:abc")
    assert [patch["name"] for patch in told["patches"]] == ["b-first.patch", "a-second.patch"]
    assert told["patches"][0]["upstream_status"] == "Pending [to be offered]"
    assert told["patches"][0]["subject"] == "CPU: a first and a second line"
    assert told["patches"][1] == {"name": "a-second.patch", "subject": "second", "origin": "backport, https://x/y"}


def test_start_up_names_them_in_one_line(record):
    assert patches.summary() == "vLLM 0.32.0+cpu with 2 patches: b-first, a-second (sha256:abc)"


def test_a_series_of_one_is_no_plural(record):
    (record / "series").write_text("b-first.patch\n")
    assert patches.summary() == "vLLM 0.32.0+cpu with 1 patch: b-first (sha256:abc)"


def test_outside_an_image_there_is_no_series(no_record, capsys):
    assert cli.main(["patches"]) == 1
    assert "no series of patches is recorded here" in capsys.readouterr().err
    assert patches.summary() == "vLLM is not installed, and no series of patches is recorded"


def test_a_record_that_lacks_a_patch_is_no_reason_not_to_serve(record, capsys):
    (record / "a-second.patch").unlink()
    assert cli.main(["patches"]) == 1
    assert "a-second.patch" in capsys.readouterr().err
    assert patches.summary() == "vLLM 0.32.0+cpu, and no series of patches is recorded"


@pytest.fixture
def installed(tmp_path):
    """The files that the record's patches change, each as it is once patched."""
    site_packages = tmp_path / "site"
    (site_packages / "vllm").mkdir(parents=True)
    (site_packages / "vllm/one.py").write_text("first\nb\n")
    (site_packages / "x").touch()
    return site_packages


def test_a_patch_is_in_where_its_lines_are(record, installed):
    assert patches.not_applied(record, installed) == []


@pytest.mark.parametrize("content", ["first\na\n", "bb\n", None])
def test_a_patch_is_not_in_where_one_of_its_lines_is_missing(record, installed, content):
    file = installed / "vllm/one.py"
    file.unlink() if content is None else file.write_text(content)
    assert patches.not_applied(record, installed) == ["b-first.patch"]


@pytest.mark.parametrize("release", ["0.32.0", "0.16.0"])
def test_every_patch_that_ships_adds_lines_of_its_own(release):
    """Otherwise nothing could be seen of it."""
    folder = Path(__file__).parents[2] / "patches" / release
    for patch in folder.glob("*.patch"):
        assert list(patches._added_lines(patch.read_text())), patch.name
