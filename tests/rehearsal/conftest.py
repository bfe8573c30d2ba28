"""`aerie rehearse` in containers of the image, and a table of what was found by which check in which time."""

from __future__ import annotations

import json

import pytest
from pairs import write_published, write_whole
from rehearsals import CONFIG, HERE, PAIRS, REPOSITORY, Outcome

TIMEOUT = 900  # seconds; a whole rehearsal takes 60 where nothing else runs


@pytest.fixture(scope="session")
def pairs(tmp_path_factory):
    """The folder for pairs, which the image's user may read."""
    folder = tmp_path_factory.mktemp("pairs")
    folder.chmod(0o755)
    return folder


@pytest.fixture(scope="session")
def whole(pairs):
    """The published pair with all of its 595 GB, and without a fault."""
    return write_whole(pairs / "whole")


@pytest.fixture(scope="session")
def published(pairs):
    """The published pair's configurations alone."""
    return write_published(pairs / "published")


@pytest.fixture(scope="session")
def remembered_models(tmp_path_factory):
    """Where vLLM keeps what it saw of each model's class, in a process of its own: a host's cache has it, too."""
    folder = tmp_path_factory.mktemp("seen")
    folder.chmod(0o777)
    return ["-v", f"{folder}:/var/cache/aerie/vllm"]


@pytest.fixture(scope="session")
def options(pairs):
    """Options of `docker run` for a rehearsal."""
    return [
        "-v", f"{pairs}:{PAIRS}:ro",
        "-v", f"{HERE}/several.py:/several.py:ro",
        "-v", f"{REPOSITORY}/config/kimi-k2.5.yaml:{CONFIG}:ro",
        "--env-file", f"{REPOSITORY}/config/cpu.env",
    ]  # fmt: skip


@pytest.fixture(scope="session")
def rehearse(in_image, options, tmp_path_factory):
    """Rehearse in one container, once for each list of arguments; `more` options go to `docker run`."""

    def run(*several, more=()):
        folder = tmp_path_factory.mktemp("arguments")
        folder.chmod(0o755)
        (folder / "arguments.json").write_text(json.dumps(several))
        done = in_image(
            "python", "/several.py", "/arguments/arguments.json",
            options=[*options, "-v", f"{folder}:/arguments:ro", *more], timeout=TIMEOUT,
        )  # fmt: skip
        return [Outcome.read(line) for line in done.stdout.splitlines()]

    return run


@pytest.fixture
def measured(record_property):
    """Note the check that found something, and the seconds to the verdict, for the table at the end."""

    def note(check, outcome):
        record_property("check", check)
        record_property("seconds", outcome.seconds)

    return note


def pytest_terminal_summary(terminalreporter):
    """Show the table."""
    reports = [report for report in terminalreporter.stats.get("passed", []) if dict(report.user_properties)]
    if reports:
        terminalreporter.section("what was found, by which check, in how many seconds")
    for report in reports:
        noted = dict(report.user_properties)
        name = report.nodeid.partition("::")[2]
        terminalreporter.line(f"{name:<90} {noted['check']:<28} {noted['seconds']:6.1f}")
