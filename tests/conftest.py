"""What all tests share: how Ctrl-C reaches what they start, the built image, and a way to run a command in it."""

from __future__ import annotations

import os
import signal
import subprocess
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import pytest
import story_release
from engine_trees import Source, image_source
from series import changed_files, patch_files, pinned_series

if TYPE_CHECKING:
    from pathlib import Path

SERIES = pinned_series()

# As compose.yaml runs the service, and without a network: nothing in the image may need one.
SERVICE_OPTIONS = [
    "--read-only", "--tmpfs", "/tmp:exec,mode=1777", "--cap-drop", "ALL", "--security-opt", "no-new-privileges",  # noqa: S108
    "--network", "none", "--shm-size", "1g",
]  # fmt: skip

# What the build's `tools` stage has and the image lacks.
WORKSHOP = """
FROM {image}
USER 0
RUN apt-get update && apt-get install --yes --no-install-recommends quilt python3-venv && python3 -m venv /opt/build
"""

InImage = Callable[..., subprocess.CompletedProcess[str]]


def pytest_configure() -> None:
    """Let what the tests start end on Ctrl-C, also where a shell runs them in its background, which ignores it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test that takes `patch_file` for each patch of the pinned release."""
    if "patch_file" in metafunc.fixturenames:
        metafunc.parametrize("patch_file", sorted(SERIES.glob("*.patch")), ids=lambda path: path.stem)


@pytest.fixture(scope="session")
def series() -> Path:
    """The directory of the pinned release's patches."""
    return SERIES


@pytest.fixture(scope="session")
def patched_files() -> dict[str, list[str]]:
    """For each patch of the series, in order, the files that it changes, relative to site-packages."""
    return {patch.name: changed_files(patch) for patch in patch_files(SERIES)}


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
        confined = ["docker", "run", "--rm", "--init", "--no-healthcheck", "--name", container, *SERVICE_OPTIONS]
        try:
            done = subprocess.run(
                [*confined, *options, "--entrypoint", program, name, *arguments],
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


@pytest.fixture(scope="session")
def pinned(image: str, tmp_path_factory: pytest.TempPathFactory) -> Source:
    """The image's own vLLM, to be had without some of its patches."""
    return image_source(SERIES, image, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="session")
def overlay() -> Source:
    """vLLM 0.16.0 over the image's packages, as far as the first kernel."""
    return story_release.source(story_release.install(f"overlay-{story_release.RELEASE}"))


@pytest.fixture(scope="session")
def workshop(image: str) -> Iterator[str]:
    """The image with what the build's `tools` stage has, to run the build's own programs in."""
    name = "aerie:test-workshop"
    recipe = WORKSHOP.format(image=image)
    subprocess.run(["docker", "build", "--quiet", "--tag", name, "-"], input=recipe, text=True, check=True)
    yield name
    subprocess.run(["docker", "image", "rm", name], capture_output=True, check=False)
