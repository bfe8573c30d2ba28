"""The engine's settings as far as checks and plan read them: the operator's, else vLLM 0.32.0's defaults."""

import math
import os
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
_LARGEST_GRAPH = 512
"""Rows; vLLM's own limit for captured graphs but on sm_100 (config/vllm.py, _set_cudagraph_sizes)."""
_MOST_ROWS = 2**20
"""Of sequences, or of a graph: a thousand times what is served with. vLLM would list the sizes up to any number."""
CPU_CACHE = "VLLM_CPU_KVCACHE_SPACE"
"""GiB of a rank's KV cache on a CPU, as a whole number (vllm/platforms/cpu.py)."""
LOAD_TIMEOUT = "VLLM_ENGINE_READY_TIMEOUT_S"
_FITTING = -1
"""As max-model-len."""


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
    """max-model-len; None for the model's own, below 0 where vLLM is to find what fits."""
    cache: int | None
    """Bytes that a rank's KV cache is given, None where vLLM takes what its share of the memory leaves."""
    sequences: int
    step_tokens: int
    utilization: float
    kv_dtype: str
    eager: bool
    graph_sizes: tuple[int, ...]
    """Rows of the steps that CUDA graphs are captured for, from the smallest on; () without any."""
    speculation: Speculation | None
    servers: int
    """API servers; with several, each limits the load by `load_timeout`."""
    load_timeout: int | None
    """Seconds, where the environment has them; the supervisor sets a day otherwise."""

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
    def fits_itself(self) -> bool:
        """Whether max-model-len is whatever fits."""
        return self.longest == _FITTING

    @property
    def drafted(self) -> int:
        """Tokens drafted a step; 0 without speculation."""
        return max(0, self.speculation.tokens) if self.speculation else 0

    @property
    def rows(self) -> int:
        """Rows of a step in which every sequence is verified."""
        return self.sequences * (self.drafted + 1)

    @property
    def decode_graph_sizes(self) -> tuple[int, ...]:
        """Rows of those steps that verify alone, for which there is a second graph (gpu/cudagraph_utils.py)."""
        if str(self.compilation.get("cudagraph_mode", "")).upper() == "PIECEWISE":
            return ()
        row, largest = self.drafted + 1, min(self.rows, max(self.graph_sizes, default=0))
        return tuple(sorted({size for each in self.graph_sizes if (size := -(-each // row) * row) <= largest}))

    @property
    def ranks(self) -> int:
        """Processes that each have a part of the model."""
        return self.tensor_parallel * self.pipeline_parallel


def settings_from(
    given: Mapping[str, Any], hardware: Hardware, environment: Mapping[str, str] = os.environ
) -> Settings:
    """Return the settings of `read_arguments`; raises ConfigurationError where a number is none."""
    ranks = {name: _ranks(given, f"{name}-parallel-size") for name in ("tensor", "pipeline", "decode-context", "data")}
    step_tokens, sequences = _batch_defaults(hardware, ranks["tensor"] * ranks["pipeline"])
    step_tokens = _within("max-num-batched-tokens", _whole(given, "max-num-batched-tokens", step_tokens))
    sequences = _within("max-num-seqs", _whole(given, "max-num-seqs", min(sequences, step_tokens)), _MOST_ROWS)
    speculation = _speculation(given)
    eager = str(_value(given, "enforce-eager", absent=False)).lower() not in _OFF
    verified = max(0, speculation.tokens) + 1 if speculation else 1
    return Settings(
        given=given,
        tensor_parallel=ranks["tensor"],
        pipeline_parallel=ranks["pipeline"],
        context_parallel=ranks["decode-context"],
        data_parallel=ranks["data"],
        longest=_longest(given),
        cache=_cache(given, hardware, environment),
        sequences=sequences,
        step_tokens=step_tokens,
        utilization=_share(given, "gpu-memory-utilization", 0.92),
        kv_dtype=str(_value(given, "kv-cache-dtype") or "auto"),
        eager=eager,
        graph_sizes=() if eager or hardware.chip is None else _graph_sizes(given, sequences, verified, step_tokens),
        speculation=speculation,
        servers=_whole(given, "api-server-count", ranks["data"]),
        load_timeout=_load_timeout(environment),
    )


def _load_timeout(environment: Mapping[str, str]) -> int | None:
    text = environment.get(LOAD_TIMEOUT)
    return None if text is None else _number(LOAD_TIMEOUT, text)


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
    text = _number_of(given, "max-model-len")
    if text is None:
        return None
    if str(text) in {"auto", str(_FITTING)}:
        return _FITTING
    if (longest := _whole(given, "max-model-len", 0)) < 1:
        raise ConfigurationError(f"engine argument --max-model-len {longest} cannot be: give 1 or more, or auto")
    return longest


def _compilation(given: Mapping[str, Any]) -> Mapping[str, Any]:
    options = _value(given, "compilation-config")
    return options if isinstance(options, dict) else {}


def _cache(given: Mapping[str, Any], hardware: Hardware, environment: Mapping[str, str]) -> int | None:
    if (value := _number_of(given, "kv-cache-memory-bytes")) is not None:
        return _number("--kv-cache-memory-bytes", value)
    text = environment.get(CPU_CACHE)
    if hardware.chip is not None or not text:
        return None
    return _number(CPU_CACHE, text) * GIB


def _graph_sizes(given: Mapping[str, Any], sequences: int, verified: int, step_tokens: int) -> tuple[int, ...]:
    """Return what config/vllm.py takes where a sequence has `verified` rows; what is asked for, where it is listed."""

    def asked(option: str) -> Any:
        value = _number_of(given, option)
        return _compilation(given).get(option.replace("-", "_")) if value is None else value

    if str(_compilation(given).get("cudagraph_mode", "")).upper() == "NONE":
        return ()
    listed, largest = asked("cudagraph-capture-sizes"), asked("max-cudagraph-capture-size")
    if listed:
        every = listed if isinstance(listed, list) else [listed]
        name = "cudagraph-capture-sizes"
        sizes = {_within(name, _number(f"--{name}", size), _MOST_ROWS) for size in every}
    elif largest is not None:
        name = "max-cudagraph-capture-size"
        sizes = _steps(_within(name, _number(f"--{name}", largest), _MOST_ROWS))
    else:
        most = min(2 * sequences * verified, _LARGEST_GRAPH)
        batches = {*_steps(sequences), sequences} if verified > 1 else {sequences}
        sizes = _steps(most) | {size for batch in batches if (size := batch * verified) <= most}
    return tuple(sorted(size for size in sizes if size <= step_tokens))


def _steps(largest: int) -> set[int]:
    steps = (1, 2, 4, *range(8, 256, 8), *range(256, largest + 1, 16))
    return {size for size in steps if size <= largest}


def _speculation(given: Mapping[str, Any]) -> Speculation | None:
    options = _value(given, "speculative-config")
    if options is not None and not isinstance(options, dict):
        raise ConfigurationError(f"engine argument --speculative-config {options!r} is not a mapping, or not JSON")
    options = {str(name).replace("-", "_"): value for name, value in (options or {}).items()}
    for option, name in (("spec-method", "method"), ("spec-model", "model"), ("spec-tokens", "num_speculative_tokens")):
        if (value := _number_of(given, option)) is not None:
            if name in options:  # as in vLLM (arg_utils.py, create_speculative_config)
                raise ConfigurationError(f"engine arguments --{option} and {name} of speculative-config: give one")
            options[name] = value
    if not options:
        return None
    tokens = options.get("num_speculative_tokens")
    return Speculation(
        options,
        method=None if options.get("method") is None else str(options["method"]),
        model=None if options.get("model") is None else str(options["model"]),
        tokens=0 if tokens is None else _number("--speculative-config num_speculative_tokens", tokens),
    )


def _ranks(given: Mapping[str, Any], option: str) -> int:
    number = _whole(given, option, 1)
    if number < 1:
        raise ConfigurationError(f"engine argument --{option} {number} is no number of ranks: give 1 or more")
    return number


def _whole(given: Mapping[str, Any], option: str, default: int) -> int:
    value = _number_of(given, option)
    return default if value is None else _number(f"--{option}", value)


def _within(option: str, number: int, most: int | None = None) -> int:
    if number < 1 or (most is not None and number > most):
        possible = "1 or more" if most is None else f"1 to {most}"
        raise ConfigurationError(f"engine argument --{option} {number} cannot be: give {possible}")
    return number


def _number(name: str, value: Any) -> int:
    try:
        return whole_number(str(value))
    except ValueError:
        raise ConfigurationError(f"engine argument {name} {value!r} is no whole number") from None


def _share(given: Mapping[str, Any], option: str, default: float) -> float:
    value = _number_of(given, option)
    try:
        share = default if value is None else float(value)
    except (TypeError, ValueError):
        share = math.nan
    if not math.isfinite(share):
        raise ConfigurationError(f"engine argument --{option} {value!r} is no number")
    return share


def _number_of(given: Mapping[str, Any], option: str) -> Any:
    """Return the value of an option that needs one, None where it is not given."""
    name = spelled(option, given)
    if name is not None and given[name] is None:
        raise ConfigurationError(f"engine argument --{option} has no value")
    return None if name is None else given[name]


def _value(given: Mapping[str, Any], option: str, *, absent: Any = None) -> Any:
    name = spelled(option, given)
    return absent if name is None else given[name]
