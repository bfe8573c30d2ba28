"""`vllm serve`'s arguments as options and their values, in vLLM's own precedence: command line, then `--config`.

vLLM's parser would know better, but importing it takes longer than many a start-up failure it could report.
"""

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

_SHORTEST = len("--xx")  # beginning of an option that no other one shares
# vllm/engine/arg_utils.py of the pinned release
_SHORT = {
    "tp": "tensor-parallel-size", "pp": "pipeline-parallel-size", "dp": "data-parallel-size",
    "dcp": "decode-context-parallel-size", "pcp": "prefill-context-parallel-size", "ep": "enable-expert-parallel",
    "q": "quantization", "n": "nnodes", "asc": "api-server-count", "sc": "speculative-config",
    "cc": "compilation-config", "ac": "attention-config", "r": "node-rank", "dpn": "data-parallel-rank",
    "dpr": "data-parallel-start-rank", "dpl": "data-parallel-size-local", "dpa": "data-parallel-address",
    "dpp": "data-parallel-rpc-port", "dpb": "data-parallel-backend", "dph": "data-parallel-hybrid-lb",
    "dpe": "data-parallel-external-lb", "dpm": "data-parallel-multi-port-external-lb",
}  # fmt: skip
_THEMSELVES = frozenset({
    "chat-template", "config", "data-parallel-size", "grpc", "kv-cache-dtype", "kv-cache-metrics",
    "long-prefill-token-threshold", "model", "numa-bind", "quantization", "reasoning-parser", "tokenizer", "watermark",
})  # fmt: skip
"""Options with whose names others begin, too; they are never meant for those."""
_SAME = {"device-memory-utilization": "gpu-memory-utilization"}
_ENDINGS = (".yaml", ".yml")


class ConfigurationError(Exception):
    """What was given cannot work; the message says in one line what it is and what to do."""


def read_arguments(arguments: Sequence[str]) -> dict[str, Any]:
    """Return what is set, by the long option without its dashes, and the model as `model`.

    An option without a value is None, or True in a file; with `no-` before it, it is False. Numbers may still be text,
    and so may JSON that does not parse, which vLLM complains of better. Raises ConfigurationError for a --config file
    that cannot be read.
    """
    pairs = list(_pairs(arguments))
    given = _read(pairs)
    return _read([*_pairs_of_file(given["config"]), *pairs]) if "config" in given else given


def read_command_line(arguments: Sequence[str]) -> dict[str, Any]:
    """Return what is set on the command line alone."""
    return _read(_pairs(arguments))


def read_config_file(name: Any) -> dict[str, Any]:
    """Return a --config file's content as it stands there; raises ConfigurationError where vLLM could not read it."""
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
    except RecursionError:
        raise ConfigurationError(f"--config {name} is nested too deeply: give `option: value` lines") from None
    if not name.endswith(_ENDINGS):
        raise ConfigurationError(f"--config {name}: vLLM takes a file whose name ends in {' or '.join(_ENDINGS)}")
    if not isinstance(content, dict):
        raise ConfigurationError(f"--config {name} must hold `option: value` lines")
    for key, value in content.items():
        if fault := _fault(value):
            raise ConfigurationError(f"--config {name}: {key} {fault}")
    return {str(key): value for key, value in content.items()}


def without(arguments: Sequence[str], options: Collection[str]) -> list[str]:
    """Return the words of a command line but for those of `options`, which are long ones, in whatever spelling."""
    words, is_kept = list[str](), "model" not in options
    for argument in arguments:
        if _is_option(argument):
            is_kept = not is_one_of(_split(argument)[0], options)
        if is_kept:
            words.append(argument)
    return words


def is_one_of(name: str, options: Collection[str]) -> bool:
    """Return whether `name`, as it stands in a file or without its dashes, sets one of `options` or a part of one."""
    head = _head(_long(name).partition(".")[0]).removeprefix("no-")
    return any(_is_beginning(f"--{head}", f"--{option}") for option in options)


def spelled(option: str, settings: Mapping[str, Any]) -> str | None:
    """Return the setting that is `option`: vLLM's parser takes any beginning that is of one option alone.

    Of several it is the last, which is the one that counts.
    """
    return next((name for name in reversed(list(settings)) if _is_beginning(f"--{name}", f"--{option}")), None)


def _read(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    given: dict[str, Any] = {}
    parts: dict[str, dict[str, Any]] = {}
    for option, each in pairs:
        name, *keys = option.split(".")
        value = each
        if keys:
            parts[name] = _merged(parts.get(name, {}), keys, _json(value))
            continue
        if name.startswith("no-") and value in (None, True):
            name, value = name.removeprefix("no-"), False
        elif name.endswith("-config"):
            value = _json(value)
        given.pop(name, None)  # so that the last one also stands last
        given[name] = value
    # As in vLLM: what was given key by key stands last, and takes the place of the whole mapping, a file's included.
    return given | {_head(name): value for name, value in parts.items()}


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
    except (ValueError, RecursionError):
        return value


def _pairs(arguments: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Yield (option, value) as vLLM's parser pairs them: a later one wins, several words become a list."""
    option, words = "model", list[str]()
    for argument in arguments:
        if _is_option(argument):
            if words or option != "model":
                yield option, _value(words)
            option, value = _split(argument)
            if option == "config" and value is not None:
                raise ConfigurationError(
                    f"engine argument {argument}: vLLM does not look at it in one word, give --config {value} as two"
                )
            words = [] if value is None else [value]
        else:
            words.append(argument)
    if words or option != "model":
        yield option, _value(words)


def _pairs_of_file(name: Any) -> Iterator[tuple[str, Any]]:
    return ((_long(key), value) for key, value in read_config_file(name).items())


def _is_option(argument: str) -> bool:
    return argument.startswith("-") and not _is_number(argument)


def _split(argument: str) -> tuple[str, str | None]:
    """Return an option in its long form without the dashes, and the value that is in the same word.

    A short one with a key keeps its dash: vLLM does not join its keys with those of the long one.
    """
    name, equals, value = argument.partition("=")
    if name.startswith("--"):
        return _long(name.removeprefix("--")), value if equals else None
    if "." in name:
        return name, value if equals else None
    head = name.removeprefix("-")
    if head[:1] in _SHORT and head not in _SHORT:  # -n2
        return _SHORT[head[0]], argument[2:]
    return _SHORT.get(head, head), value if equals else None


def _head(name: str) -> str:
    return _SHORT.get(name[1:], name[1:]) if name.startswith("-") else name


def _long(name: str) -> str:
    head, dot, keys = name.partition(".")
    head = head.replace("_", "-")
    return f"{_SAME.get(head, head)}{dot}{keys}"


def _value(words: list[str]) -> str | list[str] | None:
    return words if len(words) > 1 else next(iter(words), None)


def _is_number(argument: str) -> bool:
    try:
        float(argument)
    except ValueError:
        return False
    return True


def _is_beginning(given: str, option: str) -> bool:
    return given == option or (
        len(given) >= _SHORTEST and given.removeprefix("--") not in _THEMSELVES and option.startswith(given)
    )


def _fault(value: Any) -> str | None:
    """Return what keeps vLLM from passing a file's value on."""
    if value is None:
        return "has no value, which vLLM reads as the word None: give one or remove it"
    try:  # vLLM itself writes mappings as JSON, and all else as text
        text = json.dumps(value, default=None if isinstance(value, dict) else str)
    except (TypeError, ValueError, RecursionError) as error:
        return f"cannot be written as JSON, as which vLLM reads it: {error}"
    return "holds a NUL character, which no path or name can" if "\\u0000" in text else None
