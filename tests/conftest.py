"""What the tests of the built image share: the image, and a way to run a command in it."""

from __future__ import annotations

import os
import subprocess
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]

# As compose.yaml runs the service, and without a network: nothing in the image may need one.
SERVICE_OPTIONS = [
    "--read-only", "--tmpfs", "/tmp:exec,mode=1777", "--cap-drop", "ALL", "--security-opt", "no-new-privileges",
    "--network", "none", "--shm-size", "1g",
]  # fmt: skip

InImage = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def repository() -> Path:
    return REPOSITORY


@pytest.fixture(scope="session")
def image() -> str:
    """The image under test, which must be here already: building it is not the tests' affair."""
    name = os.environ.get("AERIE_TEST_IMAGE")
    if not name:
        pytest.fail("AERIE_TEST_IMAGE names no image; `./run test-image` builds one and sets it", pytrace=False)
    found = subprocess.run(["docker", "image", "inspect", name], capture_output=True, text=True, check=False)
    if found.returncode != 0:
        pytest.fail(f"AERIE_TEST_IMAGE={name}: {found.stderr.strip()}", pytrace=False)
    return name


@pytest.fixture(scope="session")
def in_image(image: str) -> InImage:
    """Run a command in a fresh container of the image, confined as in service; `options` go to `docker run`."""

    def run(
        *command: str, options: Sequence[str] = (), name: str = image, check: bool = True, timeout: float = 300
    ) -> subprocess.CompletedProcess[str]:
        program, *arguments = command
        container = f"aerie-test-{uuid.uuid4().hex[:12]}"
        confined = ["docker", "run", "--rm", "--init", "--no-healthcheck", "--name", container, *SERVICE_OPTIONS, *options]
        try:
            done = subprocess.run(
                [*confined, "--entrypoint", program, name, *arguments],
                capture_output=True, text=True, check=False, timeout=timeout,
            )  # fmt: skip
        except BaseException:
            # The client is gone, by the timeout or by Ctrl-C; its container is not.
            subprocess.run(["docker", "rm", "--force", "--volumes", container], capture_output=True, check=False)
            raise
        if check and done.returncode != 0:
            pytest.fail(f"{command} ended with {done.returncode}:\n{done.stdout}{done.stderr}", pytrace=False)
        return done

    return run
