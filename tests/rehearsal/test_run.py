"""`./run rehearse`, as somebody calls it who has this repository and Docker."""

from __future__ import annotations

import json
import os
import subprocess
import xml.etree.ElementTree as ET

from rehearsals import REPOSITORY


def test_what_is_to_be_left_lies_where_it_was_called(tmp_path):
    where = tmp_path / "a folder"
    where.mkdir(mode=0o700)
    options = ["--static", "--json", "report.json", "--junit", "report.xml", "--work-dir", "kept"]
    done = subprocess.run(
        [REPOSITORY / "run", "rehearse", *options], cwd=where, text=True, capture_output=True, check=False, timeout=900
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((where / "report.json").read_text())
    assert report["verdict"] == "passed"
    suites = ET.parse(where / "report.xml").getroot()  # noqa: S314 - written by our own command
    assert len(list(suites.iter("testcase"))) == len(report["findings"])
    assert sorted(path.name for path in where.iterdir()) == ["kept", "report.json", "report.xml"]
    assert {path.stat().st_uid for path in where.iterdir()} == {os.getuid()}
