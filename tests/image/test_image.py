"""What the built image is and holds; the patching itself is in test_patching.py."""

from __future__ import annotations

import hashlib
import json
import subprocess
import uuid
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
NANOSECONDS = 10**9


@pytest.fixture(scope="module")
def config(image):
    """The image's configuration, as the registry would show it."""
    inspected = subprocess.run(["docker", "image", "inspect", image], capture_output=True, check=True)
    return json.loads(inspected.stdout)[0]["Config"]


@pytest.fixture(scope="module")
def environment(config):
    return dict(variable.split("=", 1) for variable in config["Env"])


@pytest.fixture
def python(in_image):
    """Run a program in the image's Python and return what it printed, as JSON."""

    def run(program, *arguments, **options):
        return json.loads(in_image("python", "-c", program, *arguments, **options).stdout)

    return run


def test_it_starts_the_supervisor_as_a_user_without_rights(config):
    assert config["User"] == "10001:10001"
    assert config["Entrypoint"] == ["aerie"]
    assert config["Cmd"] == ["serve", "--", "--config", "/etc/aerie/serve.yaml"]
    assert config["StopSignal"] == "SIGTERM"
    assert set(config["ExposedPorts"]) == {"8000/tcp", "8001/tcp"}
    assert set(config["Volumes"]) == {"/var/cache/aerie", "/var/lib/aerie"}


def test_the_user_has_a_name_and_a_home_that_is_a_cache(python):
    found = python("""
import getpass, json, os, pwd
user = pwd.getpwuid(os.getuid())
print(json.dumps([getpass.getuser(), user.pw_name, user.pw_uid, user.pw_gid, user.pw_dir]))
""")
    assert found == ["aerie", "aerie", 10001, 10001, "/var/cache/aerie/home"]


def test_health_is_starting_for_as_long_as_the_load_takes(config):
    assert config["Healthcheck"] == {
        "Test": ["CMD", "aerie", "probe"],
        "StartPeriod": 24 * 3600 * NANOSECONDS,
        "StartInterval": 2 * NANOSECONDS,
        "Interval": 10 * NANOSECONDS,
        "Timeout": 5 * NANOSECONDS,
        "Retries": 1,
    }


def test_the_probe_names_why_a_service_is_not_ready_and_imports_the_standard_library_only(python):
    code, line, foreign = python("""
import contextlib, io, json, sys
before = set(sys.modules)
from aerie.cli import main
said = io.StringIO()
with contextlib.redirect_stdout(said):
    code = main(["probe"])
files = {name: getattr(sys.modules[name], "__file__", None) or "" for name in set(sys.modules) - before}
foreign = [name for name, file in files.items() if "site-packages" in file and name.split(".")[0] != "aerie"]
print(json.dumps([code, said.getvalue(), foreign]))
""")
    assert code == 1
    assert line.startswith("no answer: 127.0.0.1:8001")
    assert foreign == []


def test_the_labels_say_what_is_inside(config, python, series):
    inside = python("""
import json, torch
from importlib.metadata import version
print(json.dumps([version("aerie"), version("vllm"), torch.version.cuda]))
""")
    labels = config["Labels"]
    digest = subprocess.run(
        ["python3", REPOSITORY / "patches/apply.py", "--digest", series], capture_output=True, text=True, check=True
    ).stdout.strip()
    assert labels == {
        "org.opencontainers.image.title": "aerie",
        "org.opencontainers.image.licenses": "Apache-2.0",
        "org.opencontainers.image.version": inside[0],
        "org.opencontainers.image.revision": labels["org.opencontainers.image.revision"],
        "io.aerie.flavour": "cpu",
        "io.aerie.vllm-version": inside[1].removesuffix("+cpu"),
        "io.aerie.patches-digest": digest,
    }
    assert inside[2] is None


def test_vllm_starts_under_its_own_name_and_without_a_network(in_image, series):
    assert in_image("vllm", "--version").stdout.strip() == f"{series.name}+cpu"


def test_telemetry_is_off(environment, python):
    enabled = python("import json, vllm.usage.usage_lib as usage; print(json.dumps(usage.is_usage_stats_enabled()))")
    assert enabled is False
    told = {name: environment.get(name) for name in ("DO_NOT_TRACK", "HF_HUB_DISABLE_TELEMETRY", "HF_HUB_OFFLINE")}
    assert set(told.values()) == {"1"}, told


def test_the_recorded_series_is_the_repository_s(in_image, config, series, patched_files):
    recorded = in_image("sh", "-c", "cd /usr/share/aerie/patches && sha256sum *").stdout.splitlines()
    files = {name: (series / name).read_bytes() for name in ["series", *patched_files]}
    files["digest"] = f"{config['Labels']['io.aerie.patches-digest']}\n".encode()
    assert sorted(recorded) == sorted(f"{hashlib.sha256(data).hexdigest()}  {name}" for name, data in files.items())


def test_it_tells_the_series_and_where_each_patch_is_from(in_image, config, series, patched_files):
    told = json.loads(in_image("aerie", "patches", "--json").stdout)
    assert (told["vllm"], told["digest"]) == (f"{series.name}+cpu", config["Labels"]["io.aerie.patches-digest"])
    assert [patch["name"] for patch in told["patches"]] == list(patched_files)
    assert all(patch["subject"] and patch["origin"] and patch["test"] for patch in told["patches"])


def test_only_what_the_patches_name_differs_from_the_wheel(in_image, patched_files):
    program = """
import json, sys, sysconfig
from pathlib import Path
sys.path.insert(0, "/patches")
import apply
site = Path(sysconfig.get_path("purelib"))
print(json.dumps(sorted(apply.deviations(site, apply.find_wheel(site)))))
"""
    found = in_image("python", "-B", "-c", program, options=["-v", f"{REPOSITORY}/patches:/patches:ro"]).stdout
    assert set(json.loads(found)) == {file for files in patched_files.values() for file in files}


def test_every_module_is_compiled_since_nothing_can_be_later(python):
    """A stale or missing .pyc costs each start its compilation: the root file system is read-only."""
    stale = python("""
import importlib.util, json, os, struct, sysconfig
from pathlib import Path
stale = []
for package in ("vllm", "aerie", "transformers"):
    for source in Path(sysconfig.get_path("purelib"), package).rglob("*.py"):
        cached = Path(importlib.util.cache_from_source(str(source)))
        status = source.stat()
        valid = struct.pack("<II", int(status.st_mtime), status.st_size)
        if not cached.is_file() or cached.read_bytes()[8:16] != valid:
            stale.append(str(source))
print(json.dumps(stale))
""")
    assert stale == []


def test_every_cache_is_on_the_volume(environment):
    caches = {name: path for name, path in environment.items() if path.startswith("/var/") or "CACHE" in name}
    outside = {name: path for name, path in caches.items() if not path.startswith("/var/cache/aerie")}
    assert outside == {}
    assert {"HOME", "XDG_CACHE_HOME", "VLLM_CACHE_ROOT", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"} <= set(caches)
    assert {"FLASHINFER_WORKSPACE_BASE", "CUDA_CACHE_PATH", "HF_HOME", "HF_MODULES_CACHE"} <= set(caches)


def test_a_fresh_volume_takes_what_inductor_compiles_on_a_read_only_root(in_image):
    """One compiled function: g++ runs, writes to the volume alone, and what it wrote is loaded, so may be executed."""
    volume = f"aerie-test-{uuid.uuid4().hex[:12]}"
    mount = ["-v", f"{volume}:/var/cache/aerie"]
    program = """
import os, torch
assert not os.access("/", os.W_OK) and not os.access(os.path.dirname(torch.__file__), os.W_OK)
x = torch.arange(4096.0)
y = torch.compile(lambda x: torch.sin(x) * 2 + x)(x)
torch.testing.assert_close(y, torch.sin(x) * 2 + x)
"""
    try:
        in_image("python", "-c", program, options=mount, timeout=600)
        kept = in_image("find", "/var/cache/aerie/inductor", "-name", "*.so", options=mount)
        assert kept.stdout.strip()
    finally:
        subprocess.run(["docker", "volume", "rm", "--force", volume], capture_output=True, check=False)


def test_only_what_compiles_at_run_time_is_left_of_the_build(in_image):
    missing = "for tool in gcc g++ ninja; do command -v $tool >/dev/null || echo no $tool; done"
    present = "for tool in pip quilt patch git make cmake curl wget hatchling cyclonedx-py; do command -v $tool; done"
    assert in_image("sh", "-c", f"{missing}; {present}; true").stdout.split() == []
    leftovers = "find / -xdev '(' -name '*.whl' -o -name '*.orig' -o -name '*.rej' -o -name .pc ')' 2>/dev/null; true"
    assert in_image("sh", "-c", leftovers).stdout.split() == []
    assert in_image("find", "/var/lib/apt/lists", "/var/cache/apt", "-type", "f").stdout.split() == []


def test_the_bill_lists_exactly_what_is_installed(python, in_image):
    bill = json.loads(in_image("cat", "/usr/share/aerie/sbom.cdx.json").stdout)
    assert bill["bomFormat"] == "CycloneDX"
    listed = {"deb": [], "pypi": []}
    for component in bill["components"]:
        # Aerie itself, from a wheel of no index, has no purl.
        kind = "deb" if component.get("purl", "").startswith("pkg:deb/") else "pypi"
        listed[kind].append([component["name"], component["version"]])
    distributions = python("""
import json
from importlib.metadata import distributions
print(json.dumps([[d.name, d.version] for d in distributions()]))
""")
    assert sorted(listed["pypi"]) == sorted(distributions)
    packages = in_image("dpkg-query", "-W", "-f", "${Package}\t${Version}\n").stdout.splitlines()
    assert sorted(listed["deb"]) == sorted(line.split("\t") for line in packages)


def test_the_bill_names_no_time_so_that_the_same_inputs_give_the_same_image(in_image):
    bill = json.loads(in_image("cat", "/usr/share/aerie/sbom.cdx.json").stdout)
    assert "timestamp" not in bill["metadata"]
    assert "serialNumber" not in bill


def test_the_embedded_default_is_there_and_readable(in_image):
    for name in ("target", "target-tiktoken", "drafter-mla", "drafter-llama"):
        config = json.loads(in_image("cat", f"/usr/share/aerie/tiny/{name}/config.json").stdout)
        assert config["architectures"]
