"""`vllm serve`'s arguments as options and their values, in vLLM's own precedence: command line, then `--config`.

vLLM's parser would know better, but importing it takes longer than many a start-up failure it could report.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

_SHORTEST = len("--xx")  # beginning of an option that no other one shares
# vllm/engine/arg_utils.py of the pinned release
_SHORT = {
    "tp": "tensor-parallel-size", "pp": "pipeline-parallel-size", "dp": "data-parallel-size",
    "dcp": "decode-context-parallel-size", "pcp": "prefill-context-parallel-size", "ep": "enable-expert-parallel",
    "q": "quantization", "n": "nnodes", "asc": "api-server-count", "sc": "speculative-config",
    "cc": "compilation-config", "ac": "attention-config",
}  # fmt: skip


class ConfigurationError(Exception):
    """What was given cannot work; the message says in one line what it is and what to do."""


def read_arguments(arguments: Sequence[str]) -> dict[str, Any]:
    """Return what is set, by the long option without its dashes, and the model as `model`.

    An option without a value is None, or True in a file; with `no-` before it, it is False. Numbers may still be text,
    and so may JSON that does not parse, which vLLM complains of better. Raises ConfigurationError for a --config file
    that cannot be read.
    """
    given = read_command_line(arguments)
    return _config_file(given["config"]) | given if "config" in given else given


def read_command_line(arguments: Sequence[str]) -> dict[str, Any]:
    """Return what is set on the command line alone."""
    given: dict[str, Any] = {}
    parts: dict[str, dict[str, Any]] = {}
    for option, value in _pairs(arguments):
        name, *keys = option.split(".")
        if keys:
            parts[name] = _merged(parts.get(name, {}), keys, _json(value))
        elif value is None and name.startswith("no-"):
            given[name.removeprefix("no-")] = False
        else:
            name = _SHORT.get(name, name)
            given[name] = _json(value) if name.endswith("-config") else value
    # As in vLLM: what was given key by key stands last, and takes the place of the whole mapping, a file's included.
    return given | {_SHORT.get(name, name): value for name, value in parts.items()}


def spelled(option: str, settings: Mapping[str, Any]) -> str | None:
    """Return the setting that is `option`: vLLM's parser takes any beginning that is of one option alone."""
    return next((name for name in settings if _is_beginning(f"--{name}", f"--{option}")), None)


def _merged(mapping: dict[str, Any], keys: Sequence[str], value: Any) -> dict[str, Any]:
    key, *deeper = keys
    if not deeper:
        return mapping | {key: value}
    below = mapping.get(key)
    return mapping | {key: _merged(below if isinstance(below, dict) else {}, deeper, value)}


def _json(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value


def _pairs(arguments: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Yield (option, value) as vLLM's parser pairs them: a later one wins, several words become a list."""
    option, words = "model", list[str]()
    for argument in arguments:
        if argument.startswith("-") and not _is_number(argument):
            if words or option != "model":
                yield option, _value(words)
            name, equals, value = argument.lstrip("-").partition("=")
            if name == "config" and equals:
                raise ConfigurationError(
                    f"engine argument {argument}: vLLM does not look at it in one word, give --config {value} as two"
                )
            head, dot, keys = name.partition(".")
            option, words = f"{head.replace('_', '-')}{dot}{keys}", [value] if equals else []
        else:
            words.append(argument)
    if words or option != "model":
        yield option, _value(words)


def _value(words: list[str]) -> str | list[str] | None:
    return words if len(words) > 1 else next(iter(words), None)


def _is_number(argument: str) -> bool:
    try:
        float(argument)
    except ValueError:
        return False
    return True


def _is_beginning(given: str, option: str) -> bool:
    return given == option or (len(given) >= _SHORTEST and option.startswith(given))


def _config_file(name: Any) -> dict[str, Any]:
    if not isinstance(name, str):
        raise ConfigurationError("--config needs one file")
    try:
        content = yaml.safe_load(Path(name).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigurationError(f"--config {name} does not exist: mount the engine's configuration there") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"--config {name} cannot be read: {error}") from None
    except (yaml.YAMLError, ValueError) as error:  # a ValueError for a date that is none, such as 2025-02-30
        raise ConfigurationError(f"--config {name} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise ConfigurationError(f"--config {name} must hold `option: value` lines")
    if empty := [str(key) for key, value in content.items() if value is None]:
        raise ConfigurationError(
            f"--config {name}: {empty[0]} has no value, which vLLM reads as the word None: give one or remove it"
        )
    return {str(key).replace("_", "-"): value for key, value in content.items()}
