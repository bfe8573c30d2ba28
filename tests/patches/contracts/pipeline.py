"""EAGLE-3 over pipeline stages: wherever the target is cut, its drafter gets the aux hidden states that it gets uncut.

Runs on the V2 runner: with as many stages as there are GPUs, or on a CPU (tests/patches/v2_on_cpu) with up to three.
Engines are whole ones, on a CPU in float32 and on GPUs in bfloat16. Each lives in a process of its own, forked from
this one so that vLLM is imported once.
"""

from __future__ import annotations

import ctypes
import functools
import inspect
import json
import multiprocessing
import os
import signal
import tempfile
import traceback
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine's core in the process that asks it
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from verdict import contract, main
from vllm import SamplingParams
from vllm.distributed.utils import get_pp_indices
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.models import deepseek_v2
from vllm.platforms import current_platform
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.worker.gpu import pp_utils
from vllm.v1.worker.gpu.spec_decode.eagle import eagle3_utils

# Forked workers hold each other's ends of the pipe by which they would learn of their parent's end: so the kernel ends
# them with it (PR_SET_PDEATHSIG).
os.register_at_fork(after_in_child=lambda: ctypes.CDLL(None).prctl(1, signal.SIGKILL))

TINY = Path(os.environ.get("AERIE_TINY", "/usr/share/aerie/tiny"))
ON_CPU = current_platform.is_cpu()
AUX_LAYERS = (0, 4, 7)  # the embedding, the state between two stages, and the last of seven layers'
SPLITS = {1: "7", 2: "4,3", 3: "2,2,3"}  # layers a stage: 4 is a boundary of both, and 0 passes a middle stage by
PROMPTS = ("?", "What do an eagle's nest and a draft have in common?")
TOKENS = 24
TIMEOUT = 150  # seconds for an engine; it takes 10 where nothing else runs
# Of a state's largest value. Batches of other sizes round otherwise, and bfloat16 has eight bits.
TOLERANCE = 1e-5 if ON_CPU else 2e-2


@contract("aux-over-pipeline")
def aux_over_pipeline() -> str:
    """Every aux state, draft and token of two and three stages equals one stage's, for either type of drafter."""
    target = deepseek_v2.DeepseekV2ForCausalLM.__new__(deepseek_v2.DeepseekV2ForCausalLM)
    torch.nn.Module.__init__(target)
    target.model = deepseek_v2.DeepseekV2Model
    eagle3_utils.verify_supports_aux_hidden_states_over_pp(target, "eagle3")  # what a worker asks once all is loaded
    stages = [count for count in SPLITS if count > 1 and (ON_CPU or count <= torch.cuda.device_count())]
    assert stages, "one GPU: give two for two stages"
    worst, compared = 0.0, 0
    for drafter in ("mla", "llama"):
        whole = in_own_process(speculate, drafter, 1)
        for token_states in whole:
            embedding = token_states["embeddings"]
            assert torch.equal(token_states["aux"][0], embedding), "the aux state 0 is not the token's embedding"
        for count in stages:
            for one, cut in zip(whole, in_own_process(speculate, drafter, count), strict=True):
                where = f"{count} stages, {drafter} drafter, {one['prompt']!r}"
                assert cut["tokens"] == one["tokens"], f"{where}: {cut['tokens']} said, {one['tokens']} with one stage"
                for layer, expected, given in zip(AUX_LAYERS, one["aux"], cut["aux"], strict=True):
                    off = ((given - expected).abs().max() / expected.abs().max()).item()
                    assert off <= TOLERANCE, f"{where}: aux state {layer} is off by {off:.1e} of its largest value"
                    worst, compared = max(worst, off), compared + len(expected)
                if ON_CPU:
                    assert cut["drafts"] == one["drafts"], f"{where}: other drafts than with one stage"
    return f"{compared} states of ids {AUX_LAYERS} at {stages} stages within {worst:.1e}"


@contract("aux-over-pipeline-boundary")
def aux_over_pipeline_boundary() -> str:
    """With 61 layers, each state arrives once and in order from any stage, that between two stages too."""
    assert get_pp_indices(61, 0, 2) == (0, 31), "61 layers are no longer cut into 31 and 30"
    compared = 0
    for count in (2, 3, 4, 8, 1):
        ids = [(2, 30, 58), (2, 31, 58), (0, 31, 61), *[(i,) for i in range(62)]]
        for layers in ids:
            given = through_stages(layers, count)
            assert given == list(layers), f"{count} stages of 61 layers: {given} arrived of aux states {list(layers)}"
            compared += 1
    return f"{compared} sets of ids at 1, 2, 3, 4 and 8 stages, 31 of [31, 30] among them"


@contract("pipeline-needs-async-scheduling")
def pipeline_needs_async_scheduling() -> str:
    """Speculation over stages with synchronous scheduling, which hangs, is refused when the engine is configured."""
    for count, drafter, asynchronous in ((2, "mla", True), (1, "mla", False), (2, None, False)):
        configuration(drafter, count, async_scheduling=asynchronous)
    try:
        configuration("mla", 2, async_scheduling=False)
    except ValueError as error:
        message = str(error)
    else:
        raise AssertionError("speculation over 2 stages with synchronous scheduling is not refused")
    for given in ("async scheduling", "pipeline_parallel_size=2", "eagle3"):
        assert given in message, f"refused without a word of {given}: {message}"
    return "refused by its configuration; asynchronous, uncut or without speculation it is not"


def configuration(drafter: str | None, stages: int, **options):
    speculation = {"method": "eagle3", "model": str(TINY / f"drafter-{drafter}"), "num_speculative_tokens": 3}
    with patch.dict(os.environ, VLLM_PP_LAYER_PARTITION=SPLITS[stages]):
        return EngineArgs(
            model=str(TINY / "target"),
            dtype="float32" if ON_CPU else "bfloat16",
            max_model_len=256,
            max_num_seqs=len(PROMPTS),
            enforce_eager=True,
            gpu_memory_utilization=0.2,
            pipeline_parallel_size=stages,
            limit_mm_per_prompt={"vision_chunk": 0},
            disable_log_stats=True,
            **{"speculative_config": speculation if drafter else None} | options,
        ).create_engine_config()


def in_own_process(function, *arguments):
    """Call a function in a forked process, which ends with its answer, or after TIMEOUT seconds; so do its workers."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder, "answer")

        def work() -> None:
            try:
                given = {"returned": function(*arguments)}
            except Exception as error:  # noqa: BLE001 - whatever it is, it is the reason
                traceback.print_exc()
                given = {"raised": f"{type(error).__name__}: {error}"}
            torch.save(given, answer)
            os._exit(0)  # an orderly end waits for workers, of which one may wait for another for ever

        process = multiprocessing.get_context("fork").Process(target=work)
        process.start()
        process.join(TIMEOUT)
        process.kill()
        process.join()
        said = f"{function.__name__}{arguments}"
        if not answer.exists():
            raise TimeoutError(f"{said} had no answer after {TIMEOUT} s, or ended with {process.exitcode}")
        given = torch.load(answer)
        assert "returned" in given, f"{said}: {given['raised']}"
        return given["returned"]


def speculate(drafter: str, stages: int) -> list[dict]:
    """Continue the prompts at once; for each, what was said, what was drafted where, and the states behind it."""
    os.environ["VLLM_PP_LAYER_PARTITION"] = SPLITS[stages]
    with tempfile.TemporaryDirectory() as folder:
        for file in (TINY / f"drafter-{drafter}").iterdir():
            Path(folder, file.name).symlink_to(file)
        changed = json.loads((TINY / f"drafter-{drafter}" / "config.json").read_text())
        changed["eagle_aux_hidden_state_layer_ids"] = AUX_LAYERS
        Path(folder, "config.json").unlink()
        Path(folder, "config.json").write_text(json.dumps(changed))
        config = configuration(
            drafter, stages, speculative_config={"method": "eagle3", "model": folder, "num_speculative_tokens": 3}
        )
        if ON_CPU:
            # The only layout of CPU_ATTN, which a Llama drafter takes: stages without a drafter would report another.
            config.cache_config.kv_cache_layout = "LBHNC"
            # The platform asks for spawn. A worker that is forked has vLLM imported already.
            os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
        engine = LLMEngine.from_vllm_config(config, disable_log_stats=True)
    engine.collective_rpc(record_propose)
    greedy = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    for name in PROMPTS:
        engine.add_request(name, name, greedy)
    finished = {}
    while engine.has_unfinished_requests():
        finished |= {output.request_id: output for output in engine.step() if output.finished}
    (recorded,) = filter(None, engine.collective_rpc(lambda worker: getattr(worker, "recorded", None)))
    return [by_position(name, finished[name], recorded) for name in PROMPTS]


def record_propose(worker) -> None:
    """On the last stage, keep what the speculator is given and what it answers, token by token."""
    speculator = worker.model_runner.speculator
    if speculator is None:
        return
    propose, worker.recorded = speculator.propose, []
    embed = worker.model_runner.model.get_language_model().model.embed_tokens

    @functools.wraps(propose)
    def recording(*args, **kwargs):
        given = inspect.signature(propose).bind(*args, **kwargs).arguments
        drafts = propose(*args, **kwargs)
        batch = given["input_batch"]
        tokens = batch.num_tokens
        states = [state[:tokens].float().cpu() for state in given["aux_hidden_states"]]
        embeddings = embed(batch.input_ids[:tokens]).float().cpu()
        for row, request in enumerate(batch.req_ids):
            rows = slice(*batch.query_start_loc_np[row : row + 2].tolist())
            last = int(batch.positions[rows][-1]) - int(given["num_rejected"][row])
            worker.recorded.append(
                {
                    "request": request,
                    "positions": batch.positions[rows].tolist(),
                    "aux": torch.stack([state[rows] for state in states]),
                    "embeddings": embeddings[rows].clone(),
                    "drafts": (last, drafts[row].tolist()),
                }
            )
        return drafts

    speculator.propose = recording


def by_position(name: str, output, recorded: list[dict]) -> dict:
    """Put a request's states in the order of its text: a rejected draft's are overwritten by those of what was said."""
    tokens = list(output.outputs[0].token_ids)
    length = len(output.prompt_token_ids) + len(tokens) - 1  # the last token is said, and never read
    aux, embeddings, drafts = {}, {}, {}
    for step in recorded:
        if not step["request"].startswith(name):  # the engine appends to the name
            continue
        for row, position in enumerate(step["positions"]):
            aux[position], embeddings[position] = step["aux"][:, row], step["embeddings"][row]
        if step["drafts"][0] < length:
            drafts[step["drafts"][0]] = step["drafts"][1]
    return {
        "prompt": name,
        "tokens": tokens,
        "drafts": drafts,
        "aux": torch.stack([aux[position] for position in range(length)], dim=1),
        "embeddings": torch.stack([embeddings[position] for position in range(length)]),
    }


class Layer(torch.nn.Module):
    """A decoder layer as the model sees it, whose input is its own number: half of it hidden state, half residual."""

    use_sequence_parallel_moe = False

    def forward(self, _positions, hidden_states, residual, _llama_4_scaling):
        whole = hidden_states if residual is None else hidden_states + residual
        return (whole + 1) / 2, (whole + 1) / 2


def through_stages(layers: tuple[int, ...], count: int) -> list[int]:
    """Run DeepseekV2Model's own forward, stage by stage with layers that count: the aux states of the last stage."""
    sent = None
    for rank in range(count):
        group = SimpleNamespace(
            world_size=count, is_first_rank=rank == 0, is_last_rank=rank == count - 1, rank_in_group=rank
        )
        model = deepseek_v2.DeepseekV2Model.__new__(deepseek_v2.DeepseekV2Model)
        torch.nn.Module.__init__(model)
        model.config, model.hidden_size, model.aux_hidden_state_layers = SimpleNamespace(hidden_size=1), 1, ()
        model.layers = torch.nn.ModuleList(Layer() for _ in range(61))
        model.start_layer, model.end_layer = get_pp_indices(61, rank, count)
        model.norm = lambda hidden_states, residual: (hidden_states, residual)
        with ExitStack() as patches:
            for place in ("vllm.distributed.parallel_state", deepseek_v2.__name__):
                patches.enter_context(patch(f"{place}.get_pp_group", lambda: group))  # noqa: B023
            patches.enter_context(patch("vllm.distributed.parallel_state.model_parallel_is_initialized", lambda: True))
            language_model = SimpleNamespace(model=model)
            deepseek_v2.DeepseekV2ForCausalLM.set_aux_hidden_state_layers(language_model, layers)
            output = deepseek_v2.DeepseekV2Model.forward(
                model, None, torch.zeros(1), sent, inputs_embeds=torch.zeros(1, 1) if rank == 0 else None
            )
            if rank < count - 1:
                relay = SimpleNamespace(
                    aux_hidden_state_relay_keys=eagle3_utils.aux_hidden_state_relay_keys(language_model)
                )
                sent = pp_utils.PPHandler.relay_aux_hidden_states(relay, sent, output)
    return [int(state) for state in output[1]] if isinstance(output, tuple) else []


if __name__ == "__main__":
    main()
