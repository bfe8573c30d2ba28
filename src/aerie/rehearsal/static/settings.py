"""The engine's settings as far as checks and plan read them: the operator's, else vLLM 0.32.0's defaults."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aerie.engine_arguments import ConfigurationError, spelled
from aerie.rehearsal.static.hardware import GIB, Hardware

_MULTIPLES = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_HUMAN = re.compile(r"(\d+(?:\.\d+)?)([kKmMgGtT])")
_OFF = {"false", "0", "no", "off"}

# Tokens a step and sequences at once by memory of a GPU (vllm/engine/arg_utils.py, get_batch_defaults).
_STEP_TOKENS = ((160 * GIB, 16384, 1024), (70 * GIB, 8192, 1024), (0, 2048, 256))
_CPU_STEP_TOKENS, _CPU_SEQUENCES = 2048, 128  # a rank


@dataclass(frozen=True)
class Speculation:
    """What --speculative-config says."""

    options: Mapping[str, Any]
    method: str | None
    model: str | None
    tokens: int
    """Drafted a step; 0 where it does not say."""

    def text(self, name: str) -> str | None:
        """Return one of its further options as text, None where it is not given."""
        given = self.options.get(name)
        return None if given is None else str(given)


@dataclass(frozen=True)
class Settings:
    """What the engine was told; sizes in tokens, sequences or ranks."""

    given: Mapping[str, Any]
    tensor_parallel: int
    pipeline_parallel: int
    context_parallel: int
    """Of decoding (DCP)."""
    data_parallel: int
    longest: int | None
    """max-model-len; None for the model's own, -1 where vLLM is to find what fits."""
    sequences: int
    step_tokens: int
    utilization: float
    kv_dtype: str
    eager: bool
    largest_graph: int | None
    """Rows of the largest CUDA graph that is asked for, None where vLLM chooses."""
    speculation: Speculation | None

    def text(self, option: str) -> str | None:
        """Return an option as text, None where it is not given."""
        name = spelled(option, self.given)
        return None if name is None else str(self.given[name])

    def flag(self, option: str) -> bool | None:
        """Return whether a flag is set, None where it is not given."""
        name = spelled(option, self.given)
        return None if name is None else str(self.given[name]).lower() not in _OFF

    @property
    def compilation(self) -> Mapping[str, Any]:
        """What --compilation-config says."""
        return _compilation(self.given)

    @property
    def ranks(self) -> int:
        """Processes that each have a part of the model."""
        return self.tensor_parallel * self.pipeline_parallel


def settings_from(given: Mapping[str, Any], hardware: Hardware) -> Settings:
    """Return the settings of `read_arguments`; raises ConfigurationError where a number is none."""
    ranks = {
        name: _whole(given, f"{name}-parallel-size", 1) for name in ("tensor", "pipeline", "decode-context", "data")
    }
    step_tokens, sequences = _batch_defaults(hardware, ranks["tensor"] * ranks["pipeline"])
    sequences = _whole(given, "max-num-seqs", min(sequences, _whole(given, "max-num-batched-tokens", step_tokens)))
    return Settings(
        given=given,
        tensor_parallel=ranks["tensor"],
        pipeline_parallel=ranks["pipeline"],
        context_parallel=ranks["decode-context"],
        data_parallel=ranks["data"],
        longest=_longest(given),
        sequences=sequences,
        step_tokens=_whole(given, "max-num-batched-tokens", step_tokens),
        utilization=_share(given, "gpu-memory-utilization", 0.92),
        kv_dtype=str(_value(given, "kv-cache-dtype") or "auto"),
        eager=str(_value(given, "enforce-eager", absent=False)).lower() not in _OFF,
        largest_graph=_largest_graph(given),
        speculation=_speculation(given),
    )


def whole_number(text: str) -> int:
    """Return vLLM's human-readable whole number: 8k is 8,000 and 8K 8,192. Raises ValueError for anything else."""
    if found := _HUMAN.fullmatch(text.strip()):
        number, unit = found.groups()
        return int(float(number) * _MULTIPLES[unit]) if unit.islower() else int(number) * _MULTIPLES[unit]
    return int(text)


def _batch_defaults(hardware: Hardware, ranks: int) -> tuple[int, int]:
    if hardware.chip is None:
        return _CPU_STEP_TOKENS * ranks, _CPU_SEQUENCES * ranks
    return next((tokens, sequences) for least, tokens, sequences in _STEP_TOKENS if hardware.memory >= least)


def _longest(given: Mapping[str, Any]) -> int | None:
    text = _value(given, "max-model-len")
    if text is None:
        return None
    return -1 if str(text) in {"auto", "-1"} else _whole(given, "max-model-len", 0)


def _compilation(given: Mapping[str, Any]) -> Mapping[str, Any]:
    options = _value(given, "compilation-config")
    return options if isinstance(options, dict) else {}


def _largest_graph(given: Mapping[str, Any]) -> int | None:
    def asked(option: str) -> Any:
        value = _value(given, option)
        return _compilation(given).get(option.replace("-", "_")) if value is None else value

    if sizes := asked("cudagraph-capture-sizes"):
        every = sizes if isinstance(sizes, list) else [sizes]
        return max(_number("--cudagraph-capture-sizes", size) for size in every)
    largest = asked("max-cudagraph-capture-size")
    return None if largest is None else _number("--max-cudagraph-capture-size", largest)


def _speculation(given: Mapping[str, Any]) -> Speculation | None:
    options = _value(given, "speculative-config")
    if options is not None and not isinstance(options, dict):
        raise ConfigurationError(f"engine argument --speculative-config {options!r} is not a mapping, or not JSON")
    options = {str(name).replace("-", "_"): value for name, value in (options or {}).items()}
    for option, name in (("spec-method", "method"), ("spec-model", "model"), ("spec-tokens", "num_speculative_tokens")):
        if (value := _value(given, option)) is not None:
            options.setdefault(name, value)
    if not options:
        return None
    return Speculation(
        options,
        method=None if options.get("method") is None else str(options["method"]),
        model=None if options.get("model") is None else str(options["model"]),
        tokens=_number("--speculative-config num_speculative_tokens", options.get("num_speculative_tokens", 0)),
    )


def _whole(given: Mapping[str, Any], option: str, default: int) -> int:
    value = _value(given, option)
    return default if value is None else _number(f"--{option}", value)


def _number(name: str, value: Any) -> int:
    try:
        return whole_number(str(value))
    except ValueError:
        raise ConfigurationError(f"engine argument {name} {value!r} is no whole number") from None


def _share(given: Mapping[str, Any], option: str, default: float) -> float:
    value = _value(given, option)
    try:
        return default if value is None else float(value)
    except (TypeError, ValueError):
        raise ConfigurationError(f"engine argument --{option} {value!r} is no number") from None


def _value(given: Mapping[str, Any], option: str, *, absent: Any = None) -> Any:
    name = spelled(option, given)
    return absent if name is None else given[name]
