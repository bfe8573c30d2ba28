"""What is rehearsed: the engine's arguments, the pair and the hardware, read once before anything is judged."""

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from aerie import patches
from aerie.checkpoint.config import ConfigError, read_drafter, read_target
from aerie.checkpoint.files import Tensor, Weights, read_weights
from aerie.checkpoint.layout import drafter_name
from aerie.checkpoint.tokenizer import Tokenizer, read_tokenizer
from aerie.engine_arguments import ConfigurationError, read_arguments
from aerie.rehearsal.findings import Finding, failed
from aerie.rehearsal.static.arguments import Setup
from aerie.rehearsal.static.hardware import Hardware
from aerie.rehearsal.static.settings import settings_from
from aerie.supervisor import arguments

_Read = TypeVar("_Read")
_SPECULATION = {"method": "eagle3", "num_speculative_tokens": 3}
"""Of a drafter that the arguments do not speak of; three tokens were the best for Kimi-K2.5."""


@dataclass(frozen=True)
class Subject:
    """All that the rehearsal looks at; weights are None where they are left out."""

    words: tuple[str, ...]
    """The operator's own arguments."""
    setup: Setup
    tokenizer: Tokenizer
    """The target's, or the one that the arguments name instead."""
    target_weights: Weights | None
    drafter_weights: Weights | None

    @property
    def drafter_tensors(self) -> dict[str, Tensor]:
        """The drafter's tensors by the names of `drafter_layout`, {} without weights."""
        found = self.drafter_weights.tensors if self.drafter_weights else {}
        return {drafter_name(name): tensor for name, tensor in found.items()}


class UnreadableError(Exception):
    """What was given cannot be read; `findings` say what of it."""

    def __init__(self, *findings: Finding) -> None:
        super().__init__(*(finding.text for finding in findings))
        self.findings = findings


def read_subject(
    words: Sequence[str], target: Path | None, drafter: Path | None, hardware: Hardware, *, weights: bool
) -> Subject:
    """Read it all; a directory that is None is the arguments' own. Raises UnreadableError."""
    words = list(words)
    settings = _read("arguments", lambda: settings_from(read_arguments(words), hardware))
    if drafter and not settings.speculation:
        words += ["--speculative-config", json.dumps(_SPECULATION | {"model": str(drafter)})]
        settings = settings_from(read_arguments(words), hardware)
    # What the supervisor refuses; it wants a model in any case.
    named = words if settings.given.get("model") else [str(target or ""), *words]
    _read("arguments", lambda: arguments.read(named, os.environ))
    model, speculation = settings.given.get("model"), settings.speculation
    if drafter is None and speculation and speculation.model:
        drafter = Path(speculation.model)
    # Both, before either is told: who corrects one path would have to run it again for the other.
    faults: list[Finding] = []
    read = _try(faults, lambda: _read("target config", lambda: read_target(target or Path(str(model)))))
    reader = _try(faults, lambda: _read("drafter config", lambda: read_drafter(drafter))) if drafter else None
    if faults or read is None:
        raise UnreadableError(*faults)
    return Subject(
        tuple(words),
        Setup(settings, read, reader, hardware, installed_patches()),
        read_tokenizer(Path(settings.text("tokenizer") or read.directory)),
        _read("target files", lambda: read_weights(read.directory)) if weights else None,
        _read("drafter files", lambda: read_weights(reader.directory)) if weights and reader else None,
    )


def installed_patches() -> frozenset[str]:
    """Return the names of the patches in this vLLM; none where no series is recorded."""
    try:
        names = patches.read(patches.RECORD).patches
    except OSError:
        return frozenset()
    return frozenset(name.removesuffix(".patch") for name in names)


def _try(faults: list[Finding], read: Callable[[], _Read]) -> _Read | None:
    try:
        return read()
    except UnreadableError as error:
        faults += error.findings
        return None


def _read(check: str, read: Callable[[], _Read]) -> _Read:
    try:
        return read()
    except ConfigurationError as error:
        remedy = "change the --config file, or what the command line says"
        raise UnreadableError(failed(check, str(error), remedy)) from None
    except ConfigError as error:
        remedy = "give another directory: --target, --drafter, or the arguments' model and speculative-config"
        raise UnreadableError(failed(check, str(error), remedy)) from None
    except OSError as error:
        text = f"{error.filename or 'it'} cannot be read: {error.strerror}"
        raise UnreadableError(failed(check, text, "it must be readable by this user")) from None
