"""The image with what its build's `tools` stage has, to run the build's own programs in."""

from __future__ import annotations

import subprocess

import pytest

RECIPE = """
FROM {image}
USER 0
RUN apt-get update && apt-get install --yes --no-install-recommends quilt python3-venv && python3 -m venv /opt/build
"""


@pytest.fixture(scope="session")
def workshop(image):
    name = "aerie:test-workshop"
    recipe = RECIPE.format(image=image)
    subprocess.run(["docker", "build", "--quiet", "--tag", name, "-"], input=recipe, text=True, check=True)
    yield name
    subprocess.run(["docker", "image", "rm", name], capture_output=True, check=False)
