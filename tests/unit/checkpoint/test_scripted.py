"""Weights of any shape say their script, by transformers' own implementation of the text model."""

from __future__ import annotations

import json

import pytest
from sparse_checkpoint import MODELS

torch = pytest.importorskip("torch", reason="runs the model; it is in the image")
transformers = pytest.importorskip("transformers", reason="the reference implementation; it is in the image")
safetensors = pytest.importorskip("safetensors.torch", reason="reads what was written; it is in the image")

from aerie.checkpoint import scripted  # noqa: E402 - needs the libraries above
from aerie.checkpoint.config import read_drafter, read_target  # noqa: E402
from aerie.checkpoint.layout import drafter_layout, target_layout  # noqa: E402
from aerie.checkpoint.script import Script  # noqa: E402
from aerie.checkpoint.shrink import Profile, shrink_drafter, shrink_target  # noqa: E402

VOCABULARY = 4096
SCRIPT = Script(VOCABULARY, (4000, 17, 2600, 3))
KIMI = read_target(MODELS / "moonshotai--Kimi-K2.5")
# What bf16, other kernels and other batches change in a logit is far below 1.
LEAST_MARGIN = 8.0


def write_target(directory, *, quantised, layers=7):
    config = shrink_target(KIMI, Profile.CPU).config
    config["text_config"] |= {"vocab_size": VOCABULARY, "num_hidden_layers": layers}
    if quantised:
        config["text_config"]["quantization_config"] = KIMI.text["quantization_config"]
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    target = read_target(directory)
    scripted.write_target(directory, target, target_layout(target), SCRIPT)
    return target


def loaded(target):
    """The text model as transformers builds it."""
    # Not the ids of special tokens, which are beyond a vocabulary as small as this.
    others = ("auto_map", "quantization_config", "pad_token_id")
    given = {name: value for name, value in target.text.items() if name not in others}
    model = transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**given | {"model_type": "deepseek_v3"}))
    written = safetensors.load_file(target.directory / "model.safetensors")
    state = {}
    for full_name, tensor in written.items():
        name = full_name.removeprefix("language_model.")
        if name.endswith("_packed"):
            state[name.removesuffix("_packed")] = whole(written, full_name)
        elif name != full_name and not name.endswith(("_scale", "_shape")):
            state[name] = tensor.float()
    for layer in range(target.experts.first_layer, target.layers):  # it keeps all experts of a layer in two tensors
        prefix = f"model.layers.{layer}.mlp.experts."

        def joined(name, prefix=prefix):
            return torch.stack(
                [state.pop(f"{prefix}{number}.{name}_proj.weight") for number in range(target.experts.routed)]
            )

        state[prefix + "gate_up_proj"] = torch.cat([joined("gate"), joined("up")], 1)
        state[prefix + "down_proj"] = joined("down")
    model.load_state_dict(state)
    return model.float().eval()


def whole(state, name):
    """Unpack compressed-tensors' INT4."""
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers", reason="it is in the image")
    rows, columns = state[name.replace("_packed", "_shape")].tolist()
    scale = state[name.replace("_packed", "_scale")].float()
    integers = helpers.unpack_from_int32(state[name], 4, torch.Size((rows, columns)))
    return integers.float() * scale.repeat_interleave(columns // scale.shape[1], 1)


@pytest.fixture(
    scope="module",
    params=[{"quantised": False}, {"quantised": True}, {"quantised": True, "layers": 32}],
    ids=["BF16", "INT4 experts", "INT4 experts, 32 layers"],
)
def model(request, tmp_path_factory, one_thread):
    return loaded(write_target(tmp_path_factory.mktemp("target"), **request.param))


def tokens(*shape):
    return torch.randint(0, VOCABULARY, shape, generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def margins(model, ids):
    """How far the expected token's logit is above all others'."""
    logits, expected = model(ids).logits, torch.tensor(SCRIPT.follows)[ids][..., None]
    return logits.gather(2, expected)[..., 0] - logits.scatter(2, expected, -torch.inf).amax(2)


@pytest.mark.parametrize("ids", [tokens(200, 1), tokens(1, 300), tokens(1, 10).repeat(1, 30)],
                         ids=["alone", "among others", "met before"])  # fmt: skip
def test_every_token_is_followed_by_its_successor(model, ids):
    assert margins(model, ids).min() > LEAST_MARGIN


@pytest.mark.parametrize(("layer", "part"), [(0, "self_attn.o_proj"), (-1, "mlp.experts")])
def test_the_text_needs_the_first_attention_and_the_last_experts(model, layer, part):
    """Without one of them the model says something else, so that a served text proves them."""
    part = f"layers.{layer % len(model.model.layers)}.{part}"
    kept = {name: parameter.clone() for name, parameter in model.named_parameters() if part in name}
    assert kept
    with torch.no_grad():
        try:
            for name, parameter in model.named_parameters():
                if name in kept:
                    parameter.zero_()
            assert (margins(model, tokens(1, 300)) < 0).float().mean() > 0.9
        finally:
            for name, parameter in model.named_parameters():
                if name in kept:
                    parameter.copy_(kept[name])


def test_wrong_values_that_were_cached_long_ago_are_seen(model):
    """A token that stood in the context before is read there, too."""
    ids = torch.full((1, 40), 77)
    ids[0, :-1:2] = tokens(20)
    attention = model.model.layers[0].self_attn.kv_b_proj

    def disturbed(_module, _inputs, output):
        width = output.shape[-1] // 4
        values = output.view(1, 40, 4, width).clone()
        values[:, :30, :, 128:] *= -1
        return values.view(1, 40, -1)

    untouched = margins(model, ids)[0, -1]
    hook = attention.register_forward_hook(disturbed)
    try:
        assert margins(model, ids)[0, -1] < untouched - LEAST_MARGIN
    finally:
        hook.remove()


@pytest.mark.parametrize("name", ["lightseekorg--kimi-k2.5-eagle3-mla", "AQ-MedAI--Kimi-K25-eagle3"])
@torch.no_grad()
def test_a_drafter_foresees_the_token_after_the_next(tmp_path, one_thread, name):
    target = write_target(tmp_path / "target", quantised=False)
    drafter = read_drafter(MODELS / name)
    reduced = drafter.draft_vocabulary != drafter.vocabulary
    config = shrink_drafter(drafter, KIMI, target, Profile.CPU).config
    config |= {"vocab_size": VOCABULARY, "draft_vocab_size": VOCABULARY // 2 if reduced else VOCABULARY}
    (tmp_path / "config.json").write_text(json.dumps(config))
    drafter = read_drafter(tmp_path)
    scripted.write_drafter(tmp_path, drafter, target, drafter_layout(drafter), SCRIPT)
    weights = {key: tensor.float() for key, tensor in safetensors.load_file(tmp_path / "model.safetensors").items()}

    ids = torch.tensor([SCRIPT.continuation(4000, 200)])  # whose successors are in the reduced vocabulary
    states = loaded(target)(ids, output_hidden_states=True).hidden_states
    read = torch.cat([states[layer] for layer in drafter.aux_layers or (2, 3, 4)], -1) @ weights["fc.weight"].T
    drafted = (torch.nn.functional.rms_norm(read, read.shape[-1:]) @ weights["lm_head.weight"].T).argmax(-1)[0]
    if "d2t" in weights:
        drafted += weights["d2t"][drafted].long()
    assert drafted.tolist() == [SCRIPT.follows[SCRIPT.follows[token]] for token in ids[0].tolist()]


def test_the_same_seed_gives_the_same_bytes(tmp_path, one_thread):
    for name in ("one", "other"):
        write_target(tmp_path / name, quantised=True)
    assert len({(tmp_path / name / "model.safetensors").read_bytes() for name in ("one", "other")}) == 1
