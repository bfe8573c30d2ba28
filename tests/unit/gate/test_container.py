"""A command, as the host of a container takes it."""

import socket

from aerie.gate.container import in_container, this_container


def test_a_container_is_known_by_dockers_file_and_by_its_host_name(tmp_path):
    marker = tmp_path / ".dockerenv"
    assert this_container(marker) is None
    marker.touch()
    assert this_container(marker) == socket.gethostname()


def test_the_host_calls_a_command_in_a_container_through_docker():
    assert in_container("aerie retry", "3f2a9c1b7d20") == "docker exec 3f2a9c1b7d20 aerie retry"
    assert in_container("aerie retry", None) == "aerie retry"
