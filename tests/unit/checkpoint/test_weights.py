"""The weights say the script, by transformers' own implementation of the text model."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="runs the model; it is in the image")
transformers = pytest.importorskip("transformers", reason="the reference implementation; it is in the image")

from aerie.checkpoint.tiny import configs, script, weights  # noqa: E402 - needs the libraries above

# What bf16, other kernels and other batches change in a logit is far below 1.
LEAST_MARGIN = 8.0


@pytest.fixture(scope="module")
def tensors(one_thread):
    return weights.target_tensors(0)


@pytest.fixture(scope="module")
def reference(tensors):
    config = transformers.DeepseekV3Config(**{**configs.TARGET["text_config"], "model_type": "deepseek_v3"})
    model = transformers.DeepseekV3ForCausalLM(config).float().eval()
    state = {name.removeprefix("language_model."): tensor.float()
             for name, tensor in tensors.items() if name.startswith("language_model.")}  # fmt: skip
    for layer in range(1, configs.LAYERS):  # transformers keeps all experts of a layer in two tensors
        prefix = f"model.layers.{layer}.mlp.experts."

        def joined(name, prefix=prefix):
            return torch.stack([state.pop(f"{prefix}{expert}.{name}_proj.weight") for expert in range(configs.EXPERTS)])

        state[prefix + "gate_up_proj"] = torch.cat([joined("gate"), joined("up")], 1)
        state[prefix + "down_proj"] = joined("down")
    model.load_state_dict(state)
    return model


def margins(logits, expected):
    """How far the expected token's logit is above all others'."""
    expected = torch.tensor(expected)[:, None]
    others = logits.scatter(1, expected, -torch.inf)
    return logits.gather(1, expected)[:, 0] - others.amax(1)


@torch.no_grad()
def test_every_token_is_followed_by_its_successor(reference):
    tokens = torch.arange(len(script.VOCABULARY))
    alone = reference(tokens[:, None]).logits[:, -1]
    assert margins(alone, script.SUCCESSOR).min() > LEAST_MARGIN
    shuffled = tokens[torch.randperm(len(tokens), generator=torch.Generator().manual_seed(0))]
    among_others = reference(shuffled[None]).logits[0]
    assert margins(among_others, [script.SUCCESSOR[token] for token in shuffled]).min() > LEAST_MARGIN


@torch.no_grad()
@pytest.mark.parametrize("picture", script.PICTURE_OPENINGS)
def test_a_picture_in_the_context_opens_the_answer(reference, picture):
    codes = weights.Codes(weights.Source(0))
    embeddings = codes.embedding()
    seen = codes.picture + weights.BRIGHTNESS[picture] * codes.brightness + codes.shared(weights.THINK_END)
    before = [script.SPECIAL_ID[name] for name in ("<|im_user|>", "<|media_content|>")]
    after = [script.SPECIAL_ID[name] for name in ("<|media_end|>", "<think>", "</think>", "<|im_end|>")]
    sequence = torch.cat([embeddings[before], seen.expand(4, -1), embeddings[after]])
    logits = reference(inputs_embeds=sequence[None]).logits[0, -len(after) :]
    expected = [script.SUCCESSOR[token] for token in after]
    expected[after.index(weights.THINK_END)] = script.PICTURE_SUCCESSOR[picture]
    assert margins(logits, expected).min() > LEAST_MARGIN


@torch.no_grad()
@pytest.mark.parametrize("part", ["self_attn.o_proj", "mlp.experts", "mlp.gate.weight"])
def test_the_text_needs_attention_routing_and_experts(reference, part):
    """Without one of them the model says something else, so that a served text proves them."""
    kept = {name: parameter.clone() for name, parameter in reference.named_parameters() if part in name}
    assert kept
    try:
        for name, parameter in reference.named_parameters():
            if name in kept:
                parameter.zero_()
        said = reference(torch.arange(len(script.VOCABULARY))[:, None]).logits[:, -1].argmax(1).tolist()
    finally:
        for name, parameter in reference.named_parameters():
            if name in kept:
                parameter.copy_(kept[name])
    scripted = [said[token] == following for token, following in script.SCRIPT.items()]
    assert sum(scripted) < len(scripted) / 2


def test_every_layers_hint_is_used_by_as_many_tokens():
    slots = list(weights.hinted().values())
    assert {slots.count(slot) for slot in range(len(configs.AUX_LAYERS))} <= {len(slots) // 3, len(slots) // 3 + 1}
    assert len(slots) > len(script.SCRIPT) / 5


@pytest.mark.parametrize("pattern", [weights.KNOWLEDGE_MLA, weights.KNOWLEDGE_LLAMA])
def test_drafters_know_most_transitions_but_not_all(pattern):
    known = weights.knowledge(pattern).values()
    assert len(script.SCRIPT) / 20 < sum(letter == "?" for letter in known) < len(script.SCRIPT) / 3
