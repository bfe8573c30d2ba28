"""How the build installs a lock: `requirements/install`, on wheels made for the purpose and without a network."""

from __future__ import annotations

import hashlib
import subprocess
import zipfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture
def wheelhouse(tmp_path):
    directory = tmp_path / "wheelhouse"
    directory.mkdir()
    return directory


@pytest.fixture
def install(workshop, wheelhouse, tmp_path):
    """Install a lock of names, versions and hashes, or `only` one name of it, afresh; print what is there then."""

    def run(*requirements, only=""):
        lines = [f"{name}=={version} \\\n    --hash=sha256:{digest}" for name, version, digest in requirements]
        (tmp_path / "lock").write_text("\n".join(lines))
        mounts = [f"{REPOSITORY}/requirements:/requirements", f"{wheelhouse}:/wheelhouse", f"{tmp_path}/lock:/lock"]
        script = """
set -e
python3 -m venv --without-pip /tmp/venv
/requirements/install /tmp/venv /lock $0
/tmp/venv/bin/python -c 'import importlib.metadata as m; print(*[f"{d.name}={d.version}" for d in m.distributions()])'
"""
        options = [option for mount in mounts for option in ("-v", f"{mount}:ro")]
        return subprocess.run(
            ["docker", "run", "--rm", "--no-healthcheck", "--network", "none", "--user", "0", *options,
             "--entrypoint", "sh", workshop, "-c", script, only],
            capture_output=True, text=True, check=False, timeout=300,
        )  # fmt: skip

    return run


def make_wheel(directory, name, version):
    """Put a wheel without content there; its digest."""
    path = directory / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", f"{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n")
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_wheelhouse_serves_without_a_network(install, wheelhouse):
    done = install(("demo", "1.0", make_wheel(wheelhouse, "demo", "1.0")))
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == "demo=1.0"


def test_a_wheel_with_another_content_is_refused_with_its_name(install, wheelhouse):
    make_wheel(wheelhouse, "demo", "1.0")
    done = install(("demo", "1.0", "0" * 64))
    assert done.returncode != 0
    assert "DO NOT MATCH THE HASHES" in done.stderr
    assert "demo==1.0" in done.stderr


def test_a_wheel_that_is_missing_is_named(install, wheelhouse):
    make_wheel(wheelhouse, "other", "1.0")
    done = install(("demo", "1.0", "0" * 64))
    assert done.returncode != 0
    assert "No matching distribution found for demo==1.0" in done.stderr


def test_another_build_of_the_same_release_is_refused(install, wheelhouse):
    """`==1.0` is satisfied by `1.0+cpu`, and pip prefers that: so torch's CPU build could get into the CUDA image."""
    wanted = make_wheel(wheelhouse, "demo", "1.0")
    make_wheel(wheelhouse, "demo", "1.0+cpu")
    done = install(("demo", "1.0", wanted))
    assert done.returncode != 0
    assert "DO NOT MATCH THE HASHES" in done.stderr
    assert "demo-1.0%2Bcpu" in done.stderr


def test_one_wheel_of_a_lock_comes_without_the_others(install, wheelhouse):
    """As the stage that patches vLLM needs it; neither `demo-more` nor `more` is there to be fetched."""
    wanted = make_wheel(wheelhouse, "demo", "1.0")
    done = install(("demo-more", "1.0", "0" * 64), ("demo", "1.0", wanted), ("more", "1.0", "0" * 64), only="demo")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == "demo=1.0"
