"""The numbers that the drafter sees are right: against another implementation, and against what its training assumes.

Each contract also compares with a reference that is off by one layer, and by one position, and must see that as wrong.

AERIE_DTYPE (float32) and AERIE_ATTENTION_BACKEND (the platform's choice; an MLA drafter's too) say how the engine runs;
in bfloat16, which is what GPUs' MLA kernels take, the tolerance is one of rounding.
"""

from __future__ import annotations

import functools
import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from aux_recording import DRAFTS, Sequence, Step, generate
from aux_reference import Reference
from safetensors.torch import load_file
from verdict import contract, main

TINY = Path(os.environ.get("AERIE_TINY", "/usr/share/aerie/tiny"))
DTYPE = os.environ.get("AERIE_DTYPE", "float32")
EXACT = DTYPE == "float32"
# In fp32 the largest difference of a number. In bf16 the length of a row's difference over the row's own: seven times
# the unit roundoff, 2^-8, for the roundings of seven layers.
TOLERANCE = 1e-3 if EXACT else 7 * 2**-8

# Of different lengths, so that they end inside, at and just behind a block of 16 tokens.
PROMPTS = ["a", "The quick brown fox", "0123456789abcdef", "0123456789abcdef0", "Kimi " * 9]
LONG = " ".join(str(n * n) for n in range(60))  # tokens that differ from their neighbours
CHUNK = 64  # tokens a step


@functools.cache
def reference() -> Reference:
    return Reference(TINY / "target")


@dataclass(frozen=True)
class Run:
    """What an engine did, and which layers' inputs its drafter reads."""

    drafter: str
    layers: tuple[int, ...]
    batches: list[list[Sequence]]

    @property
    def steps(self) -> list[tuple[Sequence, Step]]:
        return [(sequence, step) for batch in self.batches for sequence in batch for step in sequence.steps]


@functools.cache
def run(drafter: str, layers: tuple[int, ...] | None = None, *, in_chunks: bool = False) -> Run:
    """Run an engine with a drafter of the tiny pair, made to read these layers' inputs, or else vLLM's default."""
    options: dict[str, object] = {"dtype": DTYPE}
    drafting: dict[str, object] = {}
    if backend := os.environ.get("AERIE_ATTENTION_BACKEND"):
        options["attention_backend"] = backend
        if "mla" in drafter:
            drafting["attention_backend"] = backend
    if in_chunks:
        # The second batch begins as the first one's longest prompt does.
        batches = [[LONG, *PROMPTS], [f"{LONG}!", PROMPTS[2] * 3]]
        options |= {"enable_chunked_prefill": True, "max_num_batched_tokens": CHUNK, "enable_prefix_caching": True}
    else:
        batches = [PROMPTS]
        options |= {"enable_prefix_caching": False}
    with tempfile.TemporaryDirectory() as folder:
        model = TINY / drafter
        if layers is not None:
            config = json.loads((model / "config.json").read_text())
            config["eagle_aux_hidden_state_layer_ids"] = list(layers)
            model = Path(folder)
            (model / "config.json").write_text(json.dumps(config))
            (model / "model.safetensors").symlink_to(TINY / drafter / "model.safetensors")
        said = generate(TINY / "target", model, batches, drafting, **options)
    depth = reference().layers
    return Run(drafter, layers or (2, depth // 2, depth - 3), said)


def error(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Reduce the last dimension to how far two vectors are apart, in the units of TOLERANCE."""
    apart = found - expected
    return apart.abs().amax(-1) if EXACT else apart.norm(dim=-1) / expected.norm(dim=-1)


def expected_states(
    sequence: Sequence, step: Step, layers: tuple[int, ...], layer_shift: int, position_shift: int
) -> torch.Tensor:
    """Look a step's states up in the reference: [rows, layers, hidden size], or none where they cannot be known.

    A rejected draft's state counts too: it is what the target makes of the text up to and with that draft.
    """
    begin = step.positions[0]
    tokens = (*sequence.tokens[:begin], *step.tokens)
    states = reference().states(tokens)
    last = len(states) - 1
    shifted = [layer + layer_shift if layer + layer_shift <= last else layer - layer_shift for layer in layers]
    rows = [max(position + position_shift, 0) for position in step.positions]
    return states[shifted][:, rows].transpose(0, 1)


def known(sequence: Sequence, step: Step) -> bool:
    """Say whether the text before a step is known: an engine may be some tokens ahead when a text has its length."""
    return step.positions[0] <= len(sequence.tokens)


def aux_errors(run: Run, layer_shift: int = 0, position_shift: int = 0) -> torch.Tensor:
    """Compare the auxiliary states with the reference's, all rows of all steps: [rows, layers].

    With a shift of position, rows of a token that stands there twice are left out: their states are nearly equal.
    """
    errors = []
    for sequence, step in run.steps:
        if known(sequence, step):
            found = step.aux.unflatten(1, (len(run.layers), -1))
            found = error(found, expected_states(sequence, step, run.layers, layer_shift, position_shift))
            errors.append(found[moved(sequence, step, position_shift)])
    return torch.cat(errors)


def moved(sequence: Sequence, step: Step, position_shift: int) -> list[bool]:
    begin = step.positions[0]
    tokens = [*sequence.tokens[:begin], *step.tokens]
    if not position_shift:
        return [True] * len(step.tokens)
    return [p + position_shift >= 0 and tokens[p + position_shift] != tokens[p] for p in step.positions]


def check(errors: torch.Tensor, shifted: dict[str, torch.Tensor], tolerance: float = TOLERANCE) -> str:
    """Assert that the errors are within the tolerance, and that each shift would have been seen in 9 rows of 10."""
    largest = errors.max().item()
    assert largest < tolerance, f"off by {largest:.1e}, more than {tolerance:.1e}; the worst of each: {errors.amax(0)}"
    seen = {what: found.quantile(0.1, dim=0).min().item() for what, found in shifted.items()}
    for what, found in seen.items():
        assert found > tolerance, f"blind: a shift of one {what} would differ by {found:.1e} only"
    return f"off by {largest:.1e}" + "".join(f", if off by a {what} {found:.1e}" for what, found in seen.items())


def check_aux(run: Run, tolerance: float = TOLERANCE) -> str:
    shifted = {"layer": aux_errors(run, layer_shift=1), "position": aux_errors(run, position_shift=-1)}
    return f"{run.layers} {check(aux_errors(run), shifted, tolerance)}"


def covered(run: Run) -> str:
    """Assert that a run has what is to be looked at; count its rows."""
    prompt = decoded = rejected = 0
    for sequence, step in run.steps:
        accepted = len(accepted_rows(sequence, step))
        if step.positions[0] < sequence.prompt:
            prompt += len(step.positions)
        else:
            decoded += accepted
            rejected += min(len(step.positions), len(sequence.tokens) - step.positions[0]) - accepted
    batch = max(step.requests for _, step in run.steps)
    assert batch >= 3, f"no more than {batch} requests in a step"
    assert rejected > 0, "not one draft was rejected"
    assert decoded > sum(len(sequence.steps) for batch in run.batches for sequence in batch), "no draft was accepted"
    return f"{prompt} rows of prompts, {decoded} of text, {rejected} of rejected drafts, {batch} requests at once"


def accepted_rows(sequence: Sequence, step: Step) -> list[int]:
    """List the rows up to the first rejected draft, as far as the text is known."""
    rows = []
    for row, (position, token) in enumerate(zip(step.positions, step.tokens, strict=True)):
        if position >= len(sequence.tokens) or sequence.tokens[position] != token:
            break
        rows.append(row)
    return rows


@contract("aux-values")
def aux_values() -> str:
    """The auxiliary states equal transformers', of prompts and of verified drafts, in a batch of unequal lengths."""
    plain = run("drafter-mla")
    return f"{DTYPE}, {check_aux(plain)}; {covered(plain)}"


@contract("aux-values-first-and-last")
def aux_values_first_and_last() -> str:
    """So are the embeddings, layer 0's input, and what the last layer puts out, before the norm."""
    ends = run("drafter-mla", (0, reference().layers // 2, reference().layers))
    return f"{DTYPE}, {check_aux(ends)}; {covered(ends)}"


@contract("aux-values-chunked-prefill")
def aux_values_chunked_prefill() -> str:
    """So are they where a prompt is read in pieces."""
    chunked = run("drafter-mla", in_chunks=True)
    long = chunked.batches[0][0]
    pieces = [len(step.positions) for step in long.steps if step.positions[0] < long.prompt]
    assert len(pieces) >= 3, f"a prompt of {long.prompt} tokens was read in pieces of {pieces}"
    return f"{DTYPE}, pieces of {pieces}; {check_aux(chunked, beside_plain())}"


@contract("aux-values-prefix-cache")
def aux_values_prefix_cache() -> str:
    """So are they where a prompt's beginning is in the cache."""
    cached = run("drafter-mla", in_chunks=True)
    begin = cached.batches[1][0].steps[0].positions[0]
    assert begin > 0, "nothing of a repeated prompt was found in the cache"
    second = Run(cached.drafter, cached.layers, cached.batches[1:])
    return f"{DTYPE}, {begin} tokens from the cache; {check_aux(second, beside_plain())}"


@contract("verified-context")
def verified_context() -> str:
    """Where MLA verifies drafts as a prefill, they see the accepted text before them, and nothing else.

    A text of the tiny model hardly shows it: each of its tokens attends to its like.
    """
    pieces = drafts = 0
    for sequence, step in run("drafter-mla", in_chunks=True).steps:
        if step.context is None:
            continue
        begin = step.positions[0]
        verifies = begin >= sequence.prompt
        what = "drafts" if verifies else "a prompt's rows"
        assert step.context == begin, f"{what} from position {begin} see {step.context} tokens before them"
        pieces += not verifies
        drafts += verifies
    assert pieces + drafts > 0, "MLA had no prefill"
    return f"{pieces} pieces of prompts and {drafts} times drafts went as a prefill, none with a false context"


def beside_plain() -> float:
    """Allow in bf16 no more than half as much again as whole prompts without a cache show."""
    return TOLERANCE if EXACT else 1.5 * aux_errors(run("drafter-mla")).max().item()


@contract("drafter-inputs")
def drafter_inputs() -> str:
    """The drafter reads what its training pairs: at position p the states of p and the token of p + 1.

    So SafeAILab/EAGLE (eagle/traineagle3/cnets.py) and SpecForge (specforge/core/eagle3.py) train: input ids shifted
    left by one against the target's states, positions from 0. For each further draft they shift the ids again, add one
    to the positions, and give the drafter's own state in place of the target's.
    """
    return "; ".join(f"{drafter}: {check_drafter(run(drafter))}" for drafter in ("drafter-mla", "drafter-llama"))


def check_drafter(run: Run) -> str:
    rows, drafts = check_tokens(run)
    for shift in ({"token": -1}, {"token": 1}, {"position": 1}, {"position": -1}):
        try:
            check_tokens(run, **shift)
        except AssertionError:
            continue
        raise AssertionError(f"blind: a shift of {shift} is not seen")
    shifted = {"layer": feature_errors(run, layer_shift=1), "position": feature_errors(run, position_shift=-1)}
    return f"{rows} rows, {drafts} further drafts; features {check(feature_errors(run), shifted)}"


def check_tokens(run: Run, token: int = 0, position: int = 0) -> tuple[int, int]:
    """Assert that the drafter is given the right token and position, all steps; count rows and further drafts."""
    rows = drafts = 0
    for sequence, step in run.steps:
        accepted = accepted_rows(sequence, step)
        if not accepted or step.positions[accepted[-1]] + 1 >= len(sequence.tokens):
            continue  # what follows is not known
        where = f"in the step at position {step.positions[0]} of {len(sequence.tokens)}"
        expected = [
            (sequence.tokens[step.positions[row] + 1 + token], step.positions[row] + position) for row in accepted
        ]
        given = [(step.first.tokens[row], step.first.positions[row]) for row in accepted]
        assert given == expected, f"(token, position) {given}, not {expected}, {where}"
        rows += len(accepted)
        last = accepted[-1]
        states = [step.first.state[last], *(forward.state[0] for forward in step.later)]
        assert len(step.later) == DRAFTS - 1, f"{len(step.later)} further passes for {DRAFTS} drafts"
        for n, forward in enumerate(step.later):
            given = forward.tokens[0], forward.positions[0]
            expected = step.drafts[n], step.positions[last] + 1 + n + position
            assert given == expected, f"draft {n + 2}: (token, position) {given}, not {expected}, {where}"
            assert torch.equal(forward.features[0], states[n]), f"draft {n + 2} does not read the state before, {where}"
            drafts += 1
    return rows, drafts


def feature_errors(run: Run, layer_shift: int = 0, position_shift: int = 0) -> torch.Tensor:
    """Compare the features of accepted rows with the drafter's projection of the reference's states: [rows, 1]."""
    projection = load_file(TINY / run.drafter / "model.safetensors")["fc.weight"].float()
    errors = []
    for sequence, step in run.steps:
        rows = accepted_rows(sequence, step)
        if not rows or step.positions[rows[-1]] + 1 >= len(sequence.tokens):
            continue
        states = expected_states(sequence, step, run.layers, layer_shift, position_shift)
        found = error(step.first.features, states.flatten(1) @ projection.T)
        compared = moved(sequence, step, position_shift)
        errors += [found[row] for row in rows if compared[row]]
    return torch.stack(errors)[:, None]


if __name__ == "__main__":
    main()
