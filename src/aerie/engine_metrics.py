"""What vLLM counts about itself, read from the text of its `/metrics`. Pure, standard library only.

The names are those of vllm/v1/metrics/loggers.py and vllm/v1/spec_decode/metrics.py (0.16 to 0.32).
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import zip_longest

_HEARTBEAT = "vllm:iteration_tokens_total_count"
_RUNNING = "vllm:num_requests_running"
_WAITING = "vllm:num_requests_waiting"
_KV_CACHE_USAGE = "vllm:kv_cache_usage_perc"
_PROMPT_TOKENS = "vllm:prompt_tokens_total"
_GENERATION_TOKENS = "vllm:generation_tokens_total"
_DRAFTS = "vllm:spec_decode_num_drafts_total"
_DRAFT_TOKENS = "vllm:spec_decode_num_draft_tokens_total"
_ACCEPTED_TOKENS = "vllm:spec_decode_num_accepted_tokens_total"
_ACCEPTED_BY_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
_POSITION = re.compile(r'[{,]position="(\d+)"')
_ENGINE = re.compile(r'[{,]engine="(\d+)"')


@dataclass(frozen=True)
class Speculation:
    """Counters since the engine started, or the difference of two readings.

    In `drafts` rounds a drafter proposed `draft_tokens`; the target accepted some, the first of a draft most often.
    """

    drafts: int
    draft_tokens: int
    accepted_tokens: int
    accepted_by_position: tuple[int, ...] = ()

    def __sub__(self, earlier: "Speculation") -> "Speculation":
        pairs = zip_longest(self.accepted_by_position, earlier.accepted_by_position, fillvalue=0)
        return Speculation(
            self.drafts - earlier.drafts,
            self.draft_tokens - earlier.draft_tokens,
            self.accepted_tokens - earlier.accepted_tokens,
            tuple(now - before for now, before in pairs),
        )

    def __str__(self) -> str:
        length = "" if self.acceptance_length is None else f", {self.acceptance_length:.2f} tokens a step"
        return f"{self.drafts} drafts, {self.accepted_tokens} of {self.draft_tokens} drafted tokens accepted{length}"

    @property
    def acceptance_length(self) -> float | None:
        """Return the mean number of tokens a step of the target yields: its own one and the accepted drafts."""
        return 1 + self.accepted_tokens / self.drafts if self.drafts else None


@dataclass(frozen=True)
class Serving:
    """How busy an engine is: requests, the used part of the KV cache (0 to 1), tokens a second."""

    requests_running: int
    requests_waiting: int
    kv_cache_usage: float
    generation_tokens_per_second: float
    prompt_tokens_per_second: float


@dataclass(frozen=True, slots=True)
class Steps:
    """The figures of one engine of which every step moves at least one.

    `heartbeat` counts the steps that gave a token to any request. A step that only fills a part of a long prompt moves
    `kv_cache_usage` (0 to 1) and the requests' numbers instead: the scheduler's own figures come with every step.
    """

    heartbeat: int = 0
    requests_running: int = 0
    requests_waiting: int = 0
    kv_cache_usage: float = 0.0


@dataclass(frozen=True)
class EngineMetrics:
    """One reading.

    `engines` are those behind the API by their number, several with --data-parallel-size. All else is of all of them;
    `speculation` is None where they do not speculate.
    """

    engines: Mapping[str, Steps] = field(default_factory=dict)
    prompt_tokens: int = 0
    generation_tokens: int = 0
    speculation: Speculation | None = None

    @property
    def requests_running(self) -> int:
        """Return how many requests are in a batch."""
        return sum(engine.requests_running for engine in self.engines.values())

    @property
    def requests_waiting(self) -> int:
        """Return how many requests wait for a place in one."""
        return sum(engine.requests_waiting for engine in self.engines.values())

    @property
    def kv_cache_usage(self) -> float:
        """Return how full the fullest cache is."""
        return max((engine.kv_cache_usage for engine in self.engines.values()), default=0.0)

    def serving_since(self, earlier: "EngineMetrics", seconds: float) -> Serving:
        """Return what is going on, with rates from the difference to a reading taken `seconds` ago (above 0)."""
        return Serving(
            self.requests_running,
            self.requests_waiting,
            self.kv_cache_usage,
            (self.generation_tokens - earlier.generation_tokens) / seconds,
            (self.prompt_tokens - earlier.prompt_tokens) / seconds,
        )


def read_metrics(text: str) -> EngineMetrics:
    """Return what the text says; what is missing is 0."""
    steps: defaultdict[str, dict[str, float]] = defaultdict(dict)
    sums: Counter[str] = Counter()
    positions: Counter[int] = Counter()
    for name, labels, value in _samples(text.splitlines()):
        if name in _STEPS:
            engine = _ENGINE.search(labels)
            steps[engine[1] if engine else ""][name] = value
        elif name == _ACCEPTED_BY_POSITION and (position := _POSITION.search(labels)):
            positions[int(position[1])] += int(value)
        else:
            sums[name] += int(value)
    by_position = tuple(positions[position] for position in range(max(positions, default=-1) + 1))
    return EngineMetrics(
        engines={engine: _steps(figures) for engine, figures in steps.items()},
        prompt_tokens=sums[_PROMPT_TOKENS],
        generation_tokens=sums[_GENERATION_TOKENS],
        speculation=Speculation(sums[_DRAFTS], sums[_DRAFT_TOKENS], sums[_ACCEPTED_TOKENS], by_position)
        if _DRAFTS in sums
        else None,
    )


def _steps(figures: Mapping[str, float]) -> Steps:
    heartbeat, running, waiting, usage = (figures.get(name, 0.0) for name in _STEPS)
    return Steps(int(heartbeat), int(running), int(waiting), usage)


_STEPS = (_HEARTBEAT, _RUNNING, _WAITING, _KV_CACHE_USAGE)
_READ = (
    *_STEPS, _PROMPT_TOKENS, _GENERATION_TOKENS,
    _DRAFTS, _DRAFT_TOKENS, _ACCEPTED_TOKENS, _ACCEPTED_BY_POSITION,
)  # fmt: skip
# A label's value may hold anything, a brace and a blank too.
_SAMPLE = re.compile(rf"({'|'.join(map(re.escape, _READ))})(\{{.*\}})? (\S+)")


def _samples(lines: Iterable[str]) -> Iterable[tuple[str, str, float]]:
    for line in lines:
        if sample := _SAMPLE.fullmatch(line):
            yield sample[1], sample[2] or "", float(sample[3])
