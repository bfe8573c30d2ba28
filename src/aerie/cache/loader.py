"""Which of vLLM's loaders reads this model on this host: the rules, pure, and the facts that they go by.

Role vllm asks `aerie model loader` in the image that serves and writes the answer into serve.yaml; `aerie serve` says
by the same rules why an engine loads as it does. They stand in `choose`, one after another; docs/weights.md has the
measurements behind them.
"""

import importlib.util
import json
import os
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aerie.cache.directories import StoreError
from aerie.cache.room import room
from aerie.cache.warm import GB, weight_files
from aerie.engine_arguments import ConfigurationError, read_arguments
from aerie.supervisor import gpus
from aerie.supervisor.arguments import is_path

DEFAULT = "default"
LOADERS = (DEFAULT, "fastsafetensors", "instanttensor", "runai_streamer")
"""What may be asked for besides `auto`; `default` is vLLM's own, by the page cache."""
KEYS = ("load-format", "safetensors-load-strategy", "model-loader-extra-config")
"""The engine's arguments that the choice sets. Whoever gives one of them has chosen."""
_PACKAGES = {
    "fastsafetensors": "fastsafetensors",
    "instanttensor": "instanttensor",
    "runai_streamer": "runai_model_streamer",
}
_NETWORK = frozenset({"nfs", "nfs4", "lustre", "cifs", "smb3", "ceph", "glusterfs", "beegfs", "gpfs", "9p"})
_OWN_PREFETCH = frozenset({"nfs", "nfs4", "lustre"})
"""Where vLLM reads ahead by itself (weight_utils.py, safetensors_weights_iterator)."""
_SHARE_OF_MEMORY = 0.8
"""Of the machine's, that the page cache can have beside the engine's processes. What fits is read from there again at
each restart, at 2.2 to 2.6 times the rate of fastsafetensors, which reads past it (docs/weights.md)."""
_BUFFERS = 2
"""Whole shards that fastsafetensors holds on each GPU: the one that is handed out and the one that is being read."""
_GPU_RESERVE = 2 * 2**30
"""Bytes of a GPU for its context, the communicators, and what GPU 0 has for the others."""
_GIB = 2**30


@dataclass(frozen=True)
class Facts:
    """What the choice depends on; sizes in bytes. None of it changes while the host stays as it is."""

    weights: int
    """Of target and drafter."""
    largest_file: int
    memory: int
    """Of the machine, or of the container where that has less."""
    filesystem: str = ""
    rotates: bool = False
    gpus: int = 0
    gpu_memory: int = 0
    """Of the smallest."""
    ranks: int = 1
    """Over which the weights are split: tensor parallel times pipeline parallel."""
    stages: int = 1
    installed: frozenset[str] = frozenset()
    """Which loaders the image has, `default` aside."""


@dataclass(frozen=True)
class Choice:
    """A loader, the engine's arguments for it, and why in one sentence."""

    loader: str
    keys: Mapping[str, Any]
    reason: str

    def to_json(self) -> dict[str, Any]:
        """Return it as `aerie model loader --json` prints it."""
        return {"loader": self.loader, "keys": dict(self.keys), "reason": self.reason}


class NotInstalledError(Exception):
    """A loader was asked for that the image does not have."""


class ContradictionError(Exception):
    """A loader was asked for, and the engine's arguments name another one."""


def choose(facts: Facts, asked: str = "auto") -> Choice:
    """Return the loader for these facts, or the one that was asked for.

    Raises NotInstalledError where that is not in the image.
    """
    if asked != "auto":
        if asked != DEFAULT and asked not in facts.installed:
            has = ", ".join(sorted(facts.installed)) or "none but vLLM's own"
            raise NotInstalledError(f"this image does not have the loader {asked}; it has {has}")
        return Choice(asked, {} if asked == DEFAULT else {"load-format": asked}, "it was asked for")
    if why := _not_fastsafetensors(facts):
        return Choice(DEFAULT, {}, f"{why}; {_how_default_reads(facts)}")
    return Choice(
        "fastsafetensors",
        {"load-format": "fastsafetensors"},
        f"the weights ({facts.weights / GB:.0f} GB) are more than {_SHARE_OF_MEMORY:.0%} of the memory "
        f"({facts.memory / GB:.0f} GB), too much for the page cache; each of {facts.gpus} GPUs reads whole files "
        f"of its own past it, with room for {_BUFFERS} of {facts.largest_file / GB:.1f} GB beside its "
        f"{_per_rank(facts) / _GIB:.0f} GiB of weights",
    )


def _not_fastsafetensors(facts: Facts) -> str | None:
    if not facts.gpus:
        return "without GPUs only vLLM's own loader works"
    if "fastsafetensors" not in facts.installed:
        return "this image has no other loader"
    if facts.stages > 1:
        return "with pipeline stages fastsafetensors would send every tensor to ranks that have no use for it"
    if facts.weights <= _SHARE_OF_MEMORY * facts.memory:
        return (
            f"the weights ({facts.weights / GB:.0f} GB) are no more than {_SHARE_OF_MEMORY:.0%} of the memory "
            f"({facts.memory / GB:.0f} GB), so that the page cache keeps them for a restart"
        )
    left = facts.gpu_memory - _per_rank(facts) - _GPU_RESERVE
    if left < _BUFFERS * facts.largest_file:
        return (
            f"beside the weights a GPU has {max(0, left) / _GIB:.1f} GiB, and fastsafetensors holds {_BUFFERS} files "
            f"of {facts.largest_file / _GIB:.1f} GiB there"
        )
    return None


def _per_rank(facts: Facts) -> int:
    return facts.weights // max(1, facts.ranks)


def _how_default_reads(facts: Facts) -> str:
    if facts.filesystem in _OWN_PREFETCH:
        return f"vLLM's own reads ahead on {facts.filesystem} by itself"
    if facts.filesystem in _NETWORK:
        return f"vLLM's own reads from {facts.filesystem}, and the supervisor reads ahead of it where memory allows"
    disk = "a rotating disk" if facts.rotates else "a local disk"
    return f"vLLM's own reads from {disk}, and the supervisor reads ahead of it where memory allows"


def given(settings: Mapping[str, Any]) -> Choice | None:
    """Return the choice that an engine's arguments make themselves; None where they leave it open."""
    named = {key: settings[key] for key in KEYS if key in settings}
    if not named:
        return None
    return Choice(str(named.get("load-format", DEFAULT)), named, "the engine's arguments say so")


def _check_same(asked: Choice, said: Choice) -> None:
    """Raise ContradictionError where what was asked for is not what the engine's arguments name."""
    if dict(said.keys) != dict(asked.keys):
        names = " and ".join(f"{key}: {json.dumps(value)}" for key, value in said.keys.items())
        raise ContradictionError(
            f"{asked.loader} was asked for, and the configuration has {names}: take one of the two out"
        )


def explain(words: Sequence[str], directories: Sequence[Path]) -> str:
    """Return how an engine with these arguments reads its weights, and why, in one sentence. Raises OSError."""
    settings = read_arguments(words)
    best = choose(find_facts(settings, directories))
    said = given(settings)
    if said is None:
        said = Choice(DEFAULT, {}, best.reason if best.loader == DEFAULT else "no other one was chosen")
    if dict(said.keys) == dict(best.keys):
        return f"{best.loader}: {best.reason}"
    return f"{said.loader}: {said.reason}; the rules say {best.loader}: {best.reason}"


def find_facts(settings: Mapping[str, Any], directories: Iterable[Path]) -> Facts:
    """Read what the choice depends on, for an engine with these arguments. Raises OSError.

    Asks the GPUs' driver, which may not answer: call it outside of an event loop.
    """
    directories = list(directories)
    sizes = [file.stat().st_size for directory in directories for file in weight_files(directory)]
    devices = gpus.devices()
    stages = _number(settings.get("pipeline-parallel-size"))
    return Facts(
        weights=sum(sizes),
        largest_file=max(sizes, default=0),
        memory=room().total,
        filesystem=_filesystem(directories[0]) if directories else "",
        rotates=_rotates(directories[0]) if directories else False,
        gpus=len(devices),
        gpu_memory=min((device.memory for device in devices), default=0),
        ranks=_number(settings.get("tensor-parallel-size")) * stages,
        stages=stages,
        installed=frozenset(name for name, package in _PACKAGES.items() if importlib.util.find_spec(package)),
    )


def _number(value: Any) -> int:
    return int(value) if str(value or "").isdecimal() else 1


def _filesystem(directory: Path, mounts: Path = Path("/proc/self/mounts")) -> str:
    """Return the type of the file system that serves a directory: the longest mount point above it is its own."""
    place, best, found = str(directory.resolve()), "", ""
    for line in mounts.read_text().splitlines():
        _, point, kind, *_ = line.split()
        point = point.replace("\\040", " ")
        if (place == point or place.startswith(point.rstrip("/") + "/")) and len(point) >= len(best):
            best, found = point, kind
    return found


def _rotates(directory: Path) -> bool:
    device = directory.stat().st_dev
    block = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}")
    for place in (block, block.resolve().parent):  # a partition's disk is above it
        try:
            return (place / "queue/rotational").read_text().strip() == "1"
        except OSError:
            continue
    return False


@dataclass(frozen=True)
class Options:
    """What `aerie model loader` was told."""

    config: str
    loader: str
    json: bool


def _settings(config: str) -> dict[str, Any]:
    if config != "-":
        return read_arguments(["--config", config])
    with tempfile.NamedTemporaryFile("w", suffix=".yaml", encoding="utf-8") as file:  # vLLM's files have a name
        file.write(sys.stdin.read())
        file.flush()
        try:
            return read_arguments(["--config", file.name])
        except ConfigurationError as error:
            raise ConfigurationError(str(error).replace(file.name, "standard input")) from None


def loader(options: Options) -> int:
    """Print the loader and return 0; raises StoreError, OSError."""
    try:
        settings = _settings(options.config)
        if not settings.get("model"):
            raise StoreError(
                f"{'standard input' if options.config == '-' else options.config} names no model: expected `model`, "
                "with the directory of its weights"
            )
        speculation = settings.get("speculative-config")
        models = [settings.get("model"), speculation.get("model") if isinstance(speculation, dict) else None]
        directories = [Path(model) for model in models if isinstance(model, str) and is_path(model)]
        found = given(settings)
        if found is None:
            found = choose(find_facts(settings, directories), options.loader)
        elif options.loader != "auto":
            _check_same(choose(find_facts(settings, directories), options.loader), found)
    except (ConfigurationError, NotInstalledError, ContradictionError) as error:
        raise StoreError(str(error)) from None
    text = "".join(f"\n  {key}: {json.dumps(value)}" for key, value in found.keys.items())
    print(json.dumps(found.to_json(), indent=1) if options.json else f"{found.loader}: {found.reason}{text}")
    return 0
