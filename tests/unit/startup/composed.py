"""Starts of many ranks, composed from what vLLM's source prints: no machine with eight GPUs recorded them.

What each rank says, and what the first of a host says alone (`info_once`), is read in the sources of 0.32.0 and of
0.16.0 (`v1/worker/gpu/model_runner.py`, `v1/worker/gpu_model_runner.py`, `v1/worker/cpu_model_runner.py`,
`v1/executor/multiproc_executor.py`, `distributed/parallel_state.py`, `model_executor/model_loader/weight_utils.py`).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest

from aerie.startup import History, StartReader

BARS = {
    "lazy": ("Loading safetensors checkpoint shards", "{}/{}", 64),
    "eager": ("Loading safetensors checkpoint shards (eager)", "{}/{}", 64),
    "prefetch": ("Loading safetensors checkpoint shards", "{}/{}", 64),
    "multi-thread": ("Multi-thread loading shards", "{}/{}", 64),
    "runai_streamer": ("Loading safetensors using Runai Model Streamer", "{}/{}", 192),
    "instanttensor": ("Loading safetensors using InstantTensor loader", "{}.0G/{}.0G", 555),
    "fastsafetensors": ("Loading fastsafetensors checkpoint shards", "{}/{}", 8),
    "fastsafetensors 0.16": ("Loading safetensors using Fastsafetensor loader", "{}/{}", 8),
    "pt": ("Loading pt checkpoint shards", "{}/{}", 64),
    "sharded_state": None,
    "dummy": None,
}
STALL_TIMEOUT = 900.0
Stage = dict[str, list[str]]
"""What each process says between two moments at which all wait for each other; `` says what carries no name."""


@dataclass(frozen=True)
class Composed:
    tensor: int = 8
    pipeline: int = 1
    data: int = 1
    release: str = "0.32.0"
    runner: str = "V2"
    device: str = "cuda"
    eager: bool = False
    drafter: bool = True
    loader: str = "lazy"

    @property
    def world_size(self) -> int:
        return self.data * self.tensor * self.pipeline  # a MoE's groups span its engines

    @property
    def ranks(self) -> list[str]:
        """The names of the ranks, in their order, as their lines carry them once the groups have formed."""
        if self.tensor * self.pipeline == 1 and self.device == "cuda":
            return self.engines
        copies, stages, parts = (
            [f"_{what}{number}" for number in range(count)] if count > 1 else [""]
            for what, count in (("DP", self.data), ("PP", self.pipeline), ("TP", self.tensor))
        )
        return [f"Worker{copy}{stage}{part}" for copy in copies for stage in stages for part in parts]

    @property
    def engines(self) -> list[str]:
        if self.data > 1 or self.release < "0.20":
            return [f"EngineCore_DP{number}" for number in range(self.data)]
        return ["EngineCore"]

    def pid(self, name: str) -> int:
        return 7 + ["APIServer", *self.engines, *self.ranks].index(name)

    def lines(self) -> list[str]:
        """A log in which the processes take turns."""
        return [line for stage in self.stages() for line in _in_turn(stage)]

    def stages(self) -> list[Stage]:
        """Return what is said, in the order of the start."""
        return [
            {who: [self._line(who, text) for text in said] for who, said in stage.items()} for stage in self._said()
        ]

    def _line(self, who: str, text: str) -> str:
        if text.startswith("\r") or not who:
            old = f"({self.ranks[0]} pid={self.pid(self.ranks[0])}) " if self.release < "0.20" else ""
            return f"{old}{text}"
        name = "Worker" if who.startswith("Worker") and "world_size=" in text else who
        return f"({name} pid={self.pid(who)}) INFO 11-29 13:34:58 [somewhere.py:1] {text}"

    def _said(self) -> Iterator[Stage]:
        first, each = self.ranks[0], self.ranks
        speculation = "SpeculativeConfig(method='eagle3', model='/models/eagle3', num_spec_tokens=3)"
        yield {"APIServer": ["non-default args: {'model': '/models/kimi'}", "Using max model len 262144"]}
        configuration = (
            f"model='/models/kimi', speculative_config={speculation if self.drafter else None}, load_format=auto, "
            f"tensor_parallel_size={self.tensor}, pipeline_parallel_size={self.pipeline}, "
            f"data_parallel_size={self.data}, quantization=compressed-tensors, enforce_eager={self.eager}, "
            f"device_config={self.device}, compilation_config={{'mode': 3}}"
        )
        said = f"Initializing a V1 LLM engine (v{self.release}) with config: {configuration}"
        yield {engine: [said] for engine in self.engines}
        meeting = f"distributed_init_method=x backend={'nccl' if self.device == 'cuda' else 'gloo'}"
        yield {
            who: [f"world_size={self.world_size} rank={rank} local_rank={rank} {meeting}"]
            for rank, who in enumerate(each)
        }
        yield {
            first: [
                *(["vLLM is using nccl==2.29.7"] if self.device == "cuda" and self.world_size > 1 else []),
                f"rank 0 in world size {self.world_size} is assigned as DP rank 0, PP rank 0, PCP rank 0, TP rank 0",
            ]
        }
        scratch = "Loading model from scratch..." if self.runner == "V2" else "Starting to load model /models/kimi..."
        yield {first: [scratch, "Initializing model took 8.402530 seconds"]}
        if self.loader == "prefetch":
            yield {who: [f"Prefetching checkpoint files: {n}0% ({n}/10)" for n in range(1, 11)] for who in each}
        yield {"": list(_bar(self.loader))}
        if self.drafter:
            yield from self._drafter_said()
        if self.device == "cuda":
            yield {who: ["Model loading took 71.20 GiB memory and 812.771934 seconds"] for who in each}
        yield from self._compiled_said()
        yield {
            engine: ["init engine (profile, create kv cache, warmup model) took 171.94 s"] for engine in self.engines
        }
        yield {"APIServer": ["Supported tasks: ['generate']", "Starting vLLM server on http://0.0.0.0:8000"]}
        yield {"": ["INFO:     Application startup complete."]}

    def _drafter_said(self) -> Iterator[Stage]:
        if self.runner == "V2":
            yield {who: ["Using Eagle3 auxiliary layers from model: (2, 30, 58)"] for who in self.ranks}
        elif self.release > "0.17" or self.device == "cuda":
            yield {self.ranks[0]: ["Loading drafter model..."]}
        yield {"": list(_bar(self.loader, 1))}

    def _compiled_said(self) -> Iterator[Stage]:
        first, each = self.ranks[0], self.ranks
        captures = self.device == "cuda" and not self.eager
        device = "GPU" if self.device == "cuda" else "CPU"
        sized = {engine: [f"{device} KV cache size: 190,000 tokens"] for engine in self.engines}
        traced = {
            who: [f"[{part}] {said}" for part in ("backbone", "eagle_head") for said in _COMPILED] for who in each
        }
        if self.device == "cpu":
            warmed = {who: ["Warming up model for the compilation..."] for who in each}
            stages = [sized, warmed, traced] if self.release < "0.20" else [warmed, traced, sized]
            yield from (sized,) if self.eager else stages
            return
        if not self.eager:
            yield traced
        if captures and self.runner == "V2":
            yield from self._captured(2)
        elif captures and self.release > "0.20":
            yield {who: ["Profiling CUDA graph memory: PIECEWISE=51 (largest=512), FULL=49"] for who in each}
        yield {first: ["Available KV cache memory: 12.79 GiB"]}
        yield sized
        if not self.eager:
            yield {who: ["JIT kernel warmup starting.", "JIT kernel warmup finished in 2.00s."] for who in each}
        if captures:
            yield from self._captured(49)

    def _captured(self, full: int) -> Iterator[Stage]:
        if self.runner == "V2":
            piecewise, decode = "(PIECEWISE)", "(FULL)"
        else:
            piecewise, decode = "(mixed prefill-decode, PIECEWISE)", "(decode, FULL)"
        yield {"": [*_capture(f"CUDA graphs {piecewise}", 51), *_capture(f"CUDA graphs {decode}", full)]}
        if self.runner == "V2" and self.drafter:
            yield {who: ["Capturing model for speculator..."] for who in self.ranks}
            yield {"": [*_capture("prefill CUDA graphs (PIECEWISE)", 51), *_capture("decode CUDA graphs (FULL)", 51)]}
        yield {who: ["Graph capturing finished in 31 secs, took 0.44 GiB"] for who in self.ranks}


def new_reader(began: float = 0.0, history: History | None = None, stall_timeout: float = STALL_TIMEOUT) -> StartReader:
    return StartReader(began, history or History(), stall_timeout)


_COMPILED = ["Starting torch.compile", "Dynamo bytecode transform time: 2.20 s", "torch.compile took 19.09 s in total"]


def _bar(loader: str, total: int | None = None) -> Iterator[str]:
    if BARS[loader] is None:
        return
    what, counted, files = BARS[loader]
    total = total or files
    for done in range(total + 1):
        yield f"\r{what}: {done * 100 // total:3d}% Completed | {counted.format(done, total)} [00:01<00:01,  1.00it/s]"


def _capture(what: str, total: int) -> Iterator[str]:
    for done in range(total + 1):
        drawn = f"{done * 100 // total:3d}%|{'█' * (done * 10 // total):10}| {done}/{total}"
        yield f"\rCapturing {what}: {drawn} [00:01<00:01, 9.00it/s]"


def _in_turn(stage: Stage) -> list[str]:
    return [line for said in zip_longest(*stage.values()) for line in said if line is not None]
