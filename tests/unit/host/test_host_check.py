"""The role around the findings: the tools as one file, the command on the host, and the page that lists the checks."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from aerie_host import __main__ as tools
from aerie_host.finding import Wanted
from aerie_host.findings import CHECKS

sys.path.insert(0, str(Path(__file__).parents[3] / "ansible/plugins/lookup"))
from host_tools import PACKAGE, pack

ROOT = Path(__file__).parents[3]


def test_the_page_lists_every_check_and_no_other() -> None:
    section = (ROOT / "docs/host.md").read_text().partition("## What is checked")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    names = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert sorted(names) == sorted(CHECKS)


def test_the_role_asks_for_what_the_module_knows() -> None:
    text = (ROOT / "ansible/roles/host_check/vars/main.yml").read_text()
    assert set(re.findall(r"^  (\w+):", text, re.MULTILINE)) <= set(Wanted.__dataclass_fields__)


def test_the_same_sources_give_the_same_file(tmp_path: Path) -> None:
    pack(PACKAGE, tmp_path / "one")
    pack(PACKAGE, tmp_path / "two")
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    archive = tmp_path_factory.mktemp("lib") / "aerie_host"
    pack(PACKAGE, archive)
    return archive


def ask(program: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-I", program, *arguments], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("as_directory", [False, True])
def test_python_runs_it(as_directory: bool, packed: Path) -> None:  # noqa: FBT001
    program = PACKAGE if as_directory else packed
    done = ask(program, "report", "--gpus", "0", "--json")
    assert done.stderr == ""
    assert json.loads(done.stdout)["schema"] == 1


def test_an_unknown_command_is_told_what_there_is(packed: Path) -> None:
    done = ask(packed, "repot")
    assert done.returncode == 2
    assert done.stderr.startswith("usage: aerie_host {acs,gpus,report,")


def test_a_report_fails_for_what_a_person_must_mend(capsys: pytest.CaptureFixture[str]) -> None:
    assert tools.main(["report", "--gpus", "3000", "--read-seconds", "0"]) == 1
    assert "3000" in capsys.readouterr().out


def test_whoever_reads_no_further_sees_no_traceback(packed: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    arguments = [sys.executable, "-I", packed, "report", "--gpus", "0"]
    done = subprocess.run(arguments, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert done.stderr == ""
