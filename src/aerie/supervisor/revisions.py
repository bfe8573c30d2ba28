"""Which revisions an engine reads: found once before its start, and held while it runs, so that nobody removes them."""

import json
import logging
import os
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from aerie.cache.layout import load_manifest
from aerie.cache.manifest import ManifestError
from aerie.cache.names import model_of
from aerie.cache.users import hold
from aerie.cache.warm import size_of, weight_files
from aerie.engine_arguments import ConfigurationError, read_arguments, without
from aerie.supervisor.arguments import EngineArguments, is_path

_log = logging.getLogger("aerie")
_TRIES = 3
"""That a path may lead to another directory between two looks: who switches does not do it all the time."""


@dataclass(frozen=True)
class Revision:
    """One checkpoint that an engine reads."""

    role: str
    """`model` or `drafter`, as the arguments call it."""
    name: str
    revision: str | None
    """40 hexadecimal digits; None for a directory that no manifest describes."""
    directory: Path
    """Where it lies itself, without a link on the way."""
    weights: int = 0
    """Bytes of its safetensors files."""


class Holding:
    """The checkpoints of one start, kept from being freed until `release`."""

    def __init__(self) -> None:
        self.revisions: list[Revision] = []
        self._held = ExitStack()

    def take(self, engine: EngineArguments) -> None:
        """Find and hold what the arguments name by a path. Raises ConfigurationError where one is gone meanwhile.

        May wait for somebody who removes it, and for a network file system: call it outside of an event loop.
        """
        self.release()
        try:
            for role, given in (("model", engine.model), ("drafter", engine.drafter)):
                if given and is_path(given) and os.path.isdir(given):  # noqa: PTH112 - a link's target counts
                    self.revisions.append(_described(role, self._hold(role, Path(given))))
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Let them go."""
        self._held.close()
        self.revisions.clear()

    def _hold(self, role: str, given: Path) -> Path:
        """Hold the directory to which `given` leads, and return it, without a link on the way."""
        for _ in range(_TRIES):
            with suppress(FileNotFoundError), ExitStack() as held:
                directory = given.resolve(strict=True)
                try:
                    held.enter_context(hold(directory))
                except FileNotFoundError:
                    raise
                except OSError as error:  # a file system without locks: nobody can be told
                    _log.warning("%s cannot be held against `aerie model prune`: %s", directory, error.strerror)
                if given.resolve(strict=True) == directory:  # else it was switched before it was held
                    self._held.push(held.pop_all())
                    return directory
        raise ConfigurationError(f"{role} {given} does not stay: it is being removed or switched; try again")


def _described(role: str, directory: Path) -> Revision:
    try:
        manifest = load_manifest(directory)
    except ManifestError:  # none, or none that can be read: it counts as a directory
        return Revision(role, model_of(directory), None, directory, _weights(directory))
    return Revision(role, manifest.name, manifest.revision, directory, _weights(directory))


def _weights(directory: Path) -> int:
    try:
        return size_of(weight_files(directory))
    except OSError:  # the engine says why
        return 0


def pinned(words: Sequence[str], engine: EngineArguments, revisions: Sequence[Revision]) -> list[str]:
    """Return the arguments with the directories themselves in place of links, `current` for instance.

    An engine is several processes, which look at a path at different times: a link that is switched meanwhile would
    show them two revisions. What is no link stays as it was written.
    """
    places = {revision.role: str(revision.directory) for revision in revisions}
    given = list(words)
    model = places.get("model", engine.model)
    if _is_other(model, engine.model):
        # Before all others, the one that vLLM prefers to a file's; its name to clients stays what it would have been.
        given = [model, *without(given, {"model"})]
        if "served-model-name" not in read_arguments(given):
            given += ["--served-model-name", engine.served_name]
    speculation = read_arguments(words).get("speculative-config")
    drafter = places.get("drafter")
    if drafter and isinstance(speculation, dict) and _is_other(drafter, str(speculation.get("model"))):
        speculation = json.dumps(speculation | {"model": drafter})
        given = [*without(given, {"speculative-config"}), "--speculative-config", speculation]
    return given


def _is_other(place: str, given: str) -> bool:
    return place != os.path.normpath(given) and is_path(given)


def shown(revisions: Sequence[Revision]) -> list[dict[str, str | None]]:
    """Return them in the form of the state's `models`."""
    return [
        {"role": each.role, "name": each.name, "revision": each.revision, "directory": str(each.directory)}
        for each in revisions
    ]
