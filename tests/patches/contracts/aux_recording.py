"""What passes between the target and its drafter in a running engine: recorded, request by request, step by step.

The engine runs in this process, so that its drafter can be listened to; nothing of what it computes is changed. Works
on the V1 and on the V2 model runner, on a CPU and on a GPU.
"""

from __future__ import annotations

import functools
import gc
import inspect
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from pathlib import Path

MAX_TOKENS = 16  # a text; the drafters have drafts accepted and rejected in it
DRAFTS = 3  # a step


@dataclass
class Forward:
    """One pass of the drafter over some rows of one request: what it was given, and the state that it handed on."""

    tokens: list[int]
    positions: list[int]
    features: torch.Tensor  # [rows, hidden size], which the drafter reads beside the tokens' embeddings
    state: torch.Tensor  # [rows, hidden size], the features of the next draft


@dataclass
class Step:
    """One request in one step of the engine."""

    requests: int  # in this step
    tokens: list[int]  # of the target: a piece of the prompt, or the last accepted token and the drafts to verify
    positions: list[int]
    aux: torch.Tensor  # [rows, auxiliary layers x hidden size]: the target's auxiliary states, side by side
    first: Forward  # of the drafter, over the same rows
    later: list[Forward]  # for each further draft, over one row
    drafts: list[int]
    context: int | None  # tokens before its rows that MLA looked at as a prefill; None where it went as a decode


@dataclass
class Sequence:
    """A prompt and its text, and the steps in which it came about."""

    prompt: int  # tokens of it
    tokens: list[int]
    steps: list[Step] = field(default_factory=list)


class Recording:
    """Listens to the drafter of a worker from now on; `steps` has the steps of each request, in order."""

    def __init__(self, worker: Any) -> None:
        self._runner = worker.model_runner
        proposer = getattr(self._runner, "speculator", None) or self._runner.drafter  # V2's, or V1's
        self._propose = proposer.propose
        self._signature = inspect.signature(proposer.propose)
        self._forwards: list[Forward] = []
        self._attention: Any = None
        self.steps: dict[str, list[Step]] = {}
        proposer.propose = self._listen
        self._read: tuple[list[int], list[int], torch.Tensor] | None = None
        proposer.model.register_forward_pre_hook(self._look, with_kwargs=True)
        proposer.model.register_forward_hook(self._hear)

    def _look(self, _module: Any, _args: Any, given: dict[str, Any]) -> None:
        # Before the pass: on a GPU its norms write into what it was given.
        self._read = given["input_ids"].tolist(), given["positions"].tolist(), _copy(given["hidden_states"])

    def _hear(self, _module: Any, _args: Any, output: tuple[torch.Tensor, torch.Tensor]) -> None:
        from vllm.forward_context import get_forward_context  # noqa: PLC0415

        if not self._forwards:  # the first pass attends as the target did, by its metadata or by its like
            self._attention = next(iter(get_forward_context().attn_metadata.values()))
        self._forwards.append(Forward(*self._read, _copy(output[1])))

    def _listen(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        given = self._signature.bind(*args, **kwargs).arguments
        if "input_batch" in given:  # V2
            batch = given["input_batch"]
            requests, starts = batch.req_ids, batch.query_start_loc
            tokens, positions, aux = batch.input_ids, batch.positions, torch.cat(given["aux_hidden_states"], dim=-1)
        else:
            requests, starts = self._runner.input_batch.req_ids, given["common_attn_metadata"].query_start_loc
            tokens, positions, aux = (given[f"target_{name}"] for name in ("token_ids", "positions", "hidden_states"))
        starts, tokens, positions, aux = starts.tolist(), tokens.tolist(), positions.tolist(), _copy(aux)
        self._forwards.clear()
        proposed = self._propose(*args, **kwargs)
        assert self._forwards, "the drafter's passes cannot be heard: start the engine with enforce_eager"
        contexts = _contexts(self._attention, len(requests))
        for n, (request, drafts) in enumerate(zip(requests, proposed.tolist(), strict=True)):
            rows, row = slice(starts[n], starts[n + 1]), slice(n, n + 1)
            first, *later = self._forwards
            step = Step(
                len(requests), tokens[rows], positions[rows], aux[rows],
                _part(first, rows), [_part(forward, row) for forward in later], drafts, contexts[n],
            )  # fmt: skip
            # Newer releases append something random to a request's name.
            self.steps.setdefault(request.split("-")[0], []).append(step)
        return proposed


def _contexts(attention: Any, requests: int) -> list[int | None]:
    prefill = getattr(attention, "prefill", None)
    if prefill is None:
        return [None] * requests
    lengths = prefill.chunked_context.context_lens_list if prefill.chunked_context else [0] * attention.num_prefills
    return [None] * attention.num_decodes + lengths


def _part(forward: Forward, rows: slice) -> Forward:
    return Forward(forward.tokens[rows], forward.positions[rows], forward.features[rows], forward.state[rows])


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """Copy out of the engine's buffers, which the next step writes again."""
    return tensor.detach().to("cpu", torch.float32, copy=True)


def generate(
    target: Path, drafter: Path, batches: list[list[str]], drafting: dict[str, Any], **options: Any
) -> list[list[Sequence]]:
    """Start an engine, say the batches' prompts one batch after the other, greedily, and stop it.

    `drafting` joins the speculative configuration, `options` go to vllm.LLM.
    """
    prepare_process()  # before anything of vLLM's is imported
    from vllm import LLM, SamplingParams  # noqa: PLC0415
    from vllm.distributed import cleanup_dist_env_and_memory  # noqa: PLC0415

    llm = LLM(
        str(target),
        max_model_len=512,
        max_num_seqs=8,
        enforce_eager=True,
        gpu_memory_utilization=0.3,
        kv_cache_memory_bytes=2**28,
        seed=0,
        speculative_config={"method": "eagle3", "model": str(drafter), "num_speculative_tokens": DRAFTS} | drafting,
        **options,
    )
    try:
        recordings: list[Recording] = []
        llm.collective_rpc(lambda worker: recordings.append(Recording(worker)))
        greedy = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
        said = [llm.generate(prompts, greedy, use_tqdm=False) for prompts in batches]
        return [
            [
                Sequence(
                    len(output.prompt_token_ids),
                    [*output.prompt_token_ids, *output.outputs[0].token_ids],
                    recordings[0].steps[output.request_id],
                )
                for output in outputs
            ]
            for outputs in said
        ]
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()


@functools.cache
def prepare_process() -> None:
    """Let several engines run in this process, one after the other, also where there is no GPU."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm.platforms import current_platform  # noqa: PLC0415
    from vllm.triton_utils import HAS_TRITON  # noqa: PLC0415

    if not current_platform.is_cpu():
        return
    platform = type(current_platform)
    if not HAS_TRITON:
        # Once, and before numba is imported: the search for kernels to replace trips over llvmlite's objects.
        platform.register_triton_kernel_overrides()
        platform.register_triton_kernel_overrides = classmethod(lambda _: None)
    from vllm.model_executor.models import registry  # noqa: PLC0415 - not before the kernels

    # A model's class is looked at in a process of its own, lest CUDA start in this one: many seconds for each class.
    registry._run_in_subprocess = lambda function: function()
    adapt = platform.check_and_update_config.__func__

    @functools.wraps(adapt)
    def keep_prefill(cls: type, config: Any) -> None:
        """Leave chunked prefill and prefix caching as they were asked for; with MLA, the CPU platform turns them off.

        CPU_MLA can attend to a context that is in the cache: it does so to verify drafts.
        """
        scheduler, cache = config.scheduler_config, config.cache_config
        chosen = scheduler.enable_chunked_prefill, cache.enable_prefix_caching, scheduler.max_num_batched_tokens
        adapt(cls, config)
        scheduler.enable_chunked_prefill, cache.enable_prefix_caching, scheduler.max_num_batched_tokens = chosen

    platform.check_and_update_config = classmethod(keep_prefill)
