"""The requirements' locks agree with each other and with what `./run` promises of them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

REQUIREMENTS = Path(__file__).parents[3] / "requirements"
LOCKS = sorted(REQUIREMENTS.glob("*.lock"))
PIN = re.compile(r"^(?P<name>[a-z0-9._-]+)==(?P<version>\S+)", re.MULTILINE)


def pins(name: str) -> dict[str, str]:
    return {pin["name"]: pin["version"] for pin in PIN.finditer((REQUIREMENTS / f"{name}.lock").read_text())}


def test_every_list_has_its_lock() -> None:
    assert {path.stem for path in REQUIREMENTS.glob("*.in")} == {path.stem for path in LOCKS}


@pytest.mark.parametrize("lock", LOCKS, ids=lambda path: path.name)
def test_every_pin_has_a_digest_and_none_names_a_host(lock: Path) -> None:
    text = lock.read_text()
    blocks = re.split(r"^(?=[a-z0-9._-]+==)", text, flags=re.MULTILINE)[1:]
    assert blocks
    assert [block.split("==")[0] for block in blocks if "--hash=sha256:" not in block] == []
    assert "://" not in text


@pytest.mark.parametrize("name", ["deploy", "models"])
def test_one_environment_serves_deploying_fetching_and_developing(name: str) -> None:
    dev = pins("dev")
    assert {name: version for name, version in pins(name).items() if dev.get(name) != version} == {}


def test_what_aerie_imports_has_the_images_versions() -> None:
    dev, image = pins("dev"), pins("cpu")
    for name in ("aiohttp", "prometheus-client", "pyyaml"):
        assert dev[name] == image[name]
