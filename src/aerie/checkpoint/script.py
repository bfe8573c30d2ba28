"""What a model with scripted weights says: the one token that follows each token. Pure."""

from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Script:
    """A circle of all tokens: those of `chain` one after another, then the others in the order of their ids."""

    vocabulary: int
    chain: tuple[int, ...]

    def __post_init__(self) -> None:
        """Raise ValueError where a token of the chain occurs twice or is not in the vocabulary."""
        if len(set(self.chain)) != len(self.chain):
            raise ValueError("a token that occurs twice cannot have one successor")
        if outside := [token for token in self.chain if not 0 <= token < self.vocabulary]:
            raise ValueError(f"token {outside[0]} is not in a vocabulary of {self.vocabulary}")

    @cached_property
    def _circle(self) -> list[int]:
        spoken = set(self.chain)
        return [*self.chain, *(token for token in range(self.vocabulary) if token not in spoken)]

    @cached_property
    def follows(self) -> list[int]:
        """Token id -> id of the token after it."""
        follows = [0] * self.vocabulary
        for token, following in zip(self._circle, [*self._circle[1:], self._circle[0]], strict=True):
            follows[token] = following
        return follows

    @cached_property
    def before(self) -> list[int]:
        """Token id -> id of the token that it follows."""
        before = [0] * self.vocabulary
        for token, following in enumerate(self.follows):
            before[following] = token
        return before

    def continuation(self, token: int, count: int) -> list[int]:
        """Return the `count` tokens after one."""
        said = []
        for _ in range(count):
            token = self.follows[token]
            said.append(token)
        return said

    def drafted(self, count: int) -> list[int]:
        """Return `count` ids for a drafter that knows so many, ascending; those of the chain are among them.

        Raises ValueError where the chain is longer.
        """
        if len(self.chain) > count:
            raise ValueError(f"a script of {len(self.chain)} tokens does not fit into {count} that can be drafted")
        return sorted(self._circle[:count])
