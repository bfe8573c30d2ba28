"""Whether vLLM, NCCL and the driver are those that the pair needs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from series import changed_files, patch_files

from aerie.rehearsal.findings import Verdict
from aerie.rehearsal.software import driver_serves, least_driver, nccl_serves, patches_are_in

REPOSITORY = Path(__file__).parents[3]


@pytest.fixture
def patched(tmp_path):
    """A record of the release's series, and files that have all the lines that its patches add."""

    def of(release):
        record, site_packages = tmp_path / "record", tmp_path / "site"
        record.mkdir()
        for patch in patch_files(REPOSITORY / "patches" / release):
            (record / patch.name).write_text(patch.read_text())
            _, _, body = patch.read_text().partition("\n--- a/")
            for file in changed_files(patch):
                path = site_packages / file
                path.parent.mkdir(parents=True, exist_ok=True)
                with path.open("a") as content:
                    content.writelines(f"{line[1:]}\n" for line in body.splitlines() if line.startswith("+"))
        (record / "series").write_text((REPOSITORY / "patches" / release / "series").read_text())
        (record / "digest").write_text("sha256:0123456789abcdef\n")
        return record, site_packages

    return of


def take_out(patch, site_packages):
    """Leave nothing of what one patch added, but what others added, too."""
    for file in changed_files(patch):
        (site_packages / file).write_text("")


def test_a_whole_series_passes(patched):
    finding = patches_are_in("0.32.0+cpu", *patched("0.32.0"))
    assert (finding.verdict, finding.text) == (Verdict.PASSED, "vLLM 0.32.0 has all 10 (sha256:0123456789ab)")


@pytest.mark.parametrize(
    "patch",
    [patch for release in ("0.32.0", "0.16.0") for patch in patch_files(REPOSITORY / "patches" / release)],
    ids=lambda patch: f"{patch.parent.name}-{patch.stem}",
)
def test_each_patch_that_is_missing_is_named(patched, patch):
    record, site_packages = patched(patch.parent.name)
    take_out(patch, site_packages)
    finding = patches_are_in(patch.parent.name, record, site_packages)
    assert finding.verdict is Verdict.FAILED
    assert patch.stem in finding.text or "more" in finding.text
    assert "as it was built" in finding.remedy


def test_a_missing_patch_is_told_with_what_it_is_for(patched):
    record, site_packages = patched("0.32.0")
    take_out(REPOSITORY / "patches/0.32.0/eagle3-over-pp.patch", site_packages)
    finding = patches_are_in("0.32.0", record, site_packages)
    assert finding.text.startswith("eagle3-over-pp is not in this vLLM (")
    assert finding.source.startswith("https://github.com/")


def test_another_release_is_told(patched):
    finding = patches_are_in("0.33.0", *patched("0.32.0"))
    assert finding.verdict is Verdict.FAILED
    assert finding.text == "vLLM 0.33.0 is installed, and the patches are for vllm 0.32.0"


@pytest.mark.parametrize(("release", "says"), [("0.17.1", "eagle3 is only supported for"), ("0.32.0", "recorded here")])
def test_a_vllm_without_a_record_is_told_with_what_would_come(tmp_path, release, says):
    finding = patches_are_in(release, tmp_path / "none", tmp_path)
    assert (finding.verdict, says in finding.text, finding.remedy) == (Verdict.FAILED, True, "use an image of Aerie")


def test_where_there_is_no_vllm_nothing_is_said_of_its_patches(tmp_path):
    assert patches_are_in(None, tmp_path, None).verdict is Verdict.SKIPPED


@pytest.mark.parametrize(
    ("version", "ranks", "verdict"),
    [
        ("2.29.7", 8, Verdict.PASSED),
        ("2.30.1", 8, Verdict.PASSED),
        ("2.28.9", 8, Verdict.FAILED),
        ("2.28.9", 1, Verdict.PASSED),  # one rank has nobody to talk to
        (None, 8, Verdict.SKIPPED),
    ],
)
def test_an_older_nccl_fails_several_ranks(version, ranks, verdict):
    finding = nccl_serves(version, ranks)
    assert finding.verdict is verdict
    if verdict is Verdict.FAILED:
        assert "vLLM needs 2.29.7" in finding.text


@pytest.mark.parametrize(
    ("driver", "cuda", "verdict"),
    [
        ("580.65.06", "13.0.96", Verdict.PASSED),
        ("590.10", "13.0.96", Verdict.PASSED),
        ("570.124.06", "13.0.96", Verdict.FAILED),
        ("580.54.15", "13.0.96", Verdict.FAILED),
        ("570.124.06", "12.8.90", Verdict.PASSED),
        ("570.124.06", "99.0", Verdict.PASSED),
        (None, "13.0.96", Verdict.SKIPPED),
        ("580.65.06", None, Verdict.SKIPPED),
    ],
)
def test_an_older_driver_fails(driver, cuda, verdict):
    finding = driver_serves(driver, cuda)
    assert finding.verdict is verdict
    if verdict is Verdict.FAILED:
        assert finding.text == f"the driver is {driver}, and CUDA 13.0.96 needs 580.65.06 or later"


@pytest.mark.parametrize(
    ("file", "saying"),
    [
        ("Dockerfile", r"ARG LEAST_DRIVER=(\S+)"),
        ("docs/image.md", r"least driver (\S+) \|"),
    ],
)
def test_whoever_names_the_least_driver_names_this_one(file, saying):
    text = (REPOSITORY / file).read_text()
    cuda = re.search(r"ARG CUDA_VERSION=(\S+)", (REPOSITORY / "Dockerfile").read_text())[1]
    assert re.findall(saying, text) == [least_driver(cuda)]
