"""The supervisor's JSON files: read leniently, replaced as a whole, never a reason to end a service that serves."""

import json
import logging
from pathlib import Path
from typing import Any

_log = logging.getLogger("aerie")


class JsonFile:
    """One file; a failure to write it is told once, with what is lost by it."""

    def __init__(self, path: Path, loss: str) -> None:
        self.path = path
        self._loss = loss
        self._failed = False

    def read(self) -> dict[str, Any]:
        """Return its content; nothing where it is missing, unreadable or no object."""
        try:
            content = json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return content if isinstance(content, dict) else {}

    def write(self, content: dict[str, Any]) -> None:
        """Replace it, so that a reader sees the old content or the new one and a crash leaves one of them."""
        draft = self.path.with_suffix(".new")
        try:
            draft.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
            draft.replace(self.path)
        except OSError as error:
            if not self._failed:  # a full disk must not fill the log too
                _log.error("cannot write %s: %s; %s", self.path, error, self._loss)
            self._failed = True
