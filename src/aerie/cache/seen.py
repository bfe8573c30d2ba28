"""What a source without revisions came to, so that the same is not fetched again.

Such a source names its content by what changes with it: sizes, times, ETags. What a listing came to is noted beside the
model's lock.
"""

import contextlib
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from aerie.cache.names import check_revision
from aerie.cache.sources.source import Offer


class Seen:
    """The note on one source of a model."""

    def __init__(self, own: Path, description: str) -> None:
        """`own` is Aerie's directory in the model's."""
        self._note = own / "seen" / hashlib.sha256(description.encode()).hexdigest()[:40]

    def revision(self, offers: Sequence[Offer]) -> str | None:
        """Return the revision that these files came to; None where that is not known."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            note: Any = json.loads(self._note.read_text())
            if note["listing"] == _digest(offers):
                return check_revision(note["revision"])
        return None

    def remember(self, offers: Sequence[Offer], revision: str) -> None:
        """Note it; without room for that it is not."""
        if any(not (offer.version or offer.sha256) for offer in offers):
            return
        with contextlib.suppress(OSError):
            self._note.parent.mkdir(exist_ok=True)
            draft = self._note.with_suffix(".new")
            draft.write_text(json.dumps({"listing": _digest(offers), "revision": revision}))
            draft.replace(self._note)


def _digest(offers: Sequence[Offer]) -> str:
    fields = [[offer.path, offer.size, offer.sha256, offer.git_sha1, offer.version] for offer in offers]
    return hashlib.sha256(json.dumps(fields).encode()).hexdigest()
