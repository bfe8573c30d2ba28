"""The running service that `./run up` left, and the end of what these tests start beside it."""

from __future__ import annotations

import os
import subprocess
from typing import TYPE_CHECKING

import pytest
from service import Service, deployed, read_env
from ssh import SSHD, Server

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session")
def running() -> Service:
    """The service that `./run up` started."""
    try:
        return deployed()
    except FileNotFoundError as error:
        pytest.fail(f"{error.filename} is missing: run `./run up` first", pytrace=False)


@pytest.fixture(scope="session", autouse=True)
def no_second_engine_left(running: Service) -> Iterator[None]:
    """Take the second project's volumes away when the last test is done."""
    yield
    settings = read_env(running.directory / ".env")
    environment = {**os.environ, **settings, "COMPOSE_PROJECT_NAME": "aerie-e2e"}
    subprocess.run(["docker", "compose", "-p", "aerie-e2e", "down", "--volumes"],
                   cwd=running.directory, env=environment, capture_output=True, check=False)  # fmt: skip


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """An SSH server of our own, for root on loopback."""
    if not (SSHD / "usr/sbin/sshd").exists():
        pytest.fail(f"{SSHD} is missing: `./run test-e2e` unpacks it there")
    made = Server(tmp_path_factory.mktemp("ssh"))
    made.start()
    yield made
    made.stop()
