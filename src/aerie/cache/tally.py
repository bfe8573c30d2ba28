"""Who is told how far a download is."""

from typing import Protocol


class Tally(Protocol):
    """Who is told how far it is, from several threads."""

    def arrived(self, count: int) -> None:
        """So many bytes came from the source."""
        ...

    def dropped(self, count: int) -> None:
        """So many bytes that were there are fetched anew."""
        ...

    def hashed(self, count: int) -> None:
        """So many bytes were read again and hashed."""
        ...

    def proven(self, path: str) -> None:
        """Hear that a file is whole and right."""
        ...

    def trouble(self, message: str) -> None:
        """Something is tried again."""
        ...
