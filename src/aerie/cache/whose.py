"""Who may change the models directory: never the service, which reads it."""

import os

from aerie.cache.directories import StoreError

SERVICE = 10001
"""The image's user and group, which read the weights."""


def refuse_the_service(command: str) -> None:
    """Raise StoreError where this process is the service's user, who could then write to what it publishes."""
    if os.geteuid() == SERVICE:
        raise StoreError(
            f"this is user {SERVICE}, as whom the service runs, and what the service reads must not be its own to "
            f"write to: run `{command}` as root, or as another user who may write to the models directory"
        )
