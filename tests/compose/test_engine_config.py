"""The engine configurations, read by vLLM's own parser."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from .conftest import REPOSITORY

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable

CONFIGS = ["kimi-k2.5.yaml", "tiny.yaml"]

# In the image: what `vllm serve --config` makes of each file, as one JSON line a file.
PARSE = """
import json, sys
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = FlexibleArgumentParser()
make_arg_parser(parser.add_subparsers(dest="command").add_parser("serve"))
for path in sys.argv[1:]:
    try:
        parsed = vars(parser.parse_args(["serve", "--config", path]))
    except SystemExit:
        parsed = None
    print("RESULT", json.dumps(parsed, default=str))
"""


@pytest.fixture(scope="module")
def parsed(
    in_image: Callable[..., subprocess.CompletedProcess[str]], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """What vLLM understands of each configuration, and of one with a misspelt key (None: refused)."""
    folder = tmp_path_factory.mktemp("configs")
    for name in CONFIGS:
        (folder / name).write_text((REPOSITORY / "config" / name).read_text())
    (folder / "misspelt.yaml").write_text("model: any\nmax-num-sequences: 4\n")
    names = [*CONFIGS, "misspelt.yaml"]
    folder.chmod(0o755)
    done = in_image(
        "python3", "-c", PARSE, *(f"/configs/{name}" for name in names), options=["--volume", f"{folder}:/configs:ro"]
    )
    results = [
        json.loads(line.removeprefix("RESULT ")) for line in done.stdout.splitlines() if line.startswith("RESULT ")
    ]
    return dict(zip(names, results, strict=True))


def written(name: str) -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load((REPOSITORY / "config" / name).read_text())
    return config


@pytest.mark.parametrize("name", CONFIGS)
def test_vllm_understands_every_key_as_it_is_written(parsed: dict[str, Any], name: str) -> None:
    understood = parsed[name]
    assert understood is not None
    for key, value in written(name).items():
        expected = [value] if key == "served-model-name" else value
        assert understood[key.replace("-", "_")] == expected, key


def test_vllm_refuses_a_misspelt_key(parsed: dict[str, Any]) -> None:
    assert parsed["misspelt.yaml"] is None


@pytest.mark.parametrize("name", CONFIGS)
def test_no_host_may_be_asked_for_media(parsed: dict[str, Any], name: str) -> None:
    # An empty list would permit all; the top-level domain is reserved to never exist (RFC 2606).
    assert parsed[name]["allowed_media_domains"] == ["none.invalid"]
    assert not parsed[name]["allowed_local_media_path"]


@pytest.mark.parametrize("name", CONFIGS)
def test_speculation_and_the_number_of_sequences_are_explicit(parsed: dict[str, Any], name: str) -> None:
    assert parsed[name]["speculative_config"]["method"] == "eagle3"
    assert parsed[name]["speculative_config"]["num_speculative_tokens"] == 3
    assert parsed[name]["max_num_seqs"] is not None
