"""Which container this is, and how its host runs a command in it."""

import socket
from pathlib import Path

_DOCKERS = Path("/.dockerenv")  # which Docker puts into every container


def this_container(marker: Path = _DOCKERS) -> str | None:
    """Return a name by which Docker knows this container; None outside of one."""
    # The host's name for itself is the short id, as long as nobody sets another; compose.yaml sets none.
    return socket.gethostname() if marker.exists() else None


def in_container(command: str, container: str | None) -> str:
    """Return `command` as the host's shell takes it, in whatever directory; as it is where there is no container."""
    return f"docker exec {container} {command}" if container else command
