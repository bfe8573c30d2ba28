"""Weights at the published widths say their script at any depth, computed coordinate by coordinate.

Whole they would be gigabytes, but of their elements few are not 0. The rest is as vLLM computes it: BF16 after each
operation, and experts of what their INT4 form holds. Routers are drawn here.
"""

from __future__ import annotations

import copy

import pytest
from sparse_checkpoint import MODELS

torch = pytest.importorskip("torch", reason="computes the model; it is in the image")

from aerie.checkpoint import scripted  # noqa: E402 - needs the library above
from aerie.checkpoint.config import Target, read_target  # noqa: E402
from aerie.checkpoint.script import Script  # noqa: E402
from aerie.checkpoint.shrink import Profile, shrink_target  # noqa: E402

VOCABULARY = 4096
TOKENS = 24
SCRIPT = Script(VOCABULARY, (4000, 17, 2600, 3))
KIMI = read_target(MODELS / "moonshotai--Kimi-K2.5")
# Logits of 16 to 32 are 0.125 apart in BF16.
LEAST_MARGIN = 8.0
RANKS = 8
SPLIT = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "moe_intermediate_size")


def shrunken(widths, layers):
    config = copy.deepcopy(shrink_target(KIMI, Profile.CPU if widths == "CPU" else Profile.GPU).config)
    text = config["text_config"]
    text |= {"num_hidden_layers": layers, "vocab_size": VOCABULARY}
    text["quantization_config"] = KIMI.text["quantization_config"]
    if widths == "rank of eight":
        text |= {name: text[name] // RANKS for name in SPLIT}
    return Target(KIMI.directory, config)


def rounded(values):
    return values.bfloat16().float()


def normed(values):
    return rounded(values * values.square().mean(0).rsqrt())


class Model:
    """A target's layers; states are [coordinate, position]."""

    def __init__(self, target):
        self.target = target
        self.codes, self.orders = scripted._codes(scripted._Source(0), target)
        self.generator = torch.Generator().manual_seed(1)

    def product(self, module, states, rows):
        matrix = scripted._matrix(f"language_model.model.layers.{module}", self.target, self.orders)
        if ".experts." in module:
            one = scripted._Sparse(torch.tensor([0]), torch.tensor([0]), matrix.size)
            word, scale = one.tensor("weight_packed", (1, 1)).item(), one.tensor("weight_scale", (1, 1)).bfloat16()
            size = ((word & 15) - 8) * scale.item()
        else:
            size = torch.tensor(matrix.size).bfloat16().item()
        product = torch.zeros(rows, states.shape[1])
        return rounded(product.index_add_(0, matrix.rows, states[matrix.columns] * size))

    def attention(self, layer, states):
        shape, prefix = self.target.attention, f"{layer}.self_attn."
        query = normed(self.product(prefix + "q_a_proj", states, shape.q_lora_rank))
        width = shape.nope + shape.rope
        query = self.product(prefix + "q_b_proj", query, shape.heads * width).view(shape.heads, width, -1)
        latent = normed(self.product(prefix + "kv_a_proj_with_mqa", states, shape.kv_lora_rank))
        width = shape.nope + shape.value
        both = self.product(prefix + "kv_b_proj", latent, shape.heads * width).view(shape.heads, width, -1)
        key, value = both.split([shape.nope, shape.value], 1)
        # Without yarn's factor, which only makes the peak higher.
        scores = query[:, : shape.nope].transpose(1, 2) @ key * (shape.nope + shape.rope) ** -0.5
        later = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
        read = value @ scores.masked_fill(later, -torch.inf).softmax(-1).transpose(1, 2)
        return self.product(prefix + "o_proj", rounded(read).flatten(0, 1), self.target.hidden_size)

    def mlp(self, prefix, width, states):
        gate = self.product(prefix + "gate_proj", states, width)
        inner = rounded(torch.nn.functional.silu(gate) * self.product(prefix + "up_proj", states, width))
        return self.product(prefix + "down_proj", inner, self.target.hidden_size)

    def experts(self, layer, states):
        experts, prefix = self.target.experts, f"{layer}.mlp."
        router = torch.randn(experts.routed, states.shape[0], generator=self.generator) * states.shape[0] ** -0.5
        weights, chosen = (router @ states).sigmoid().topk(experts.active, 0)
        weights *= self.target.text["routed_scaling_factor"] / weights.sum(0)
        shares = torch.zeros(experts.routed, states.shape[1]).scatter(0, chosen, weights)
        written = self.mlp(prefix + "shared_experts.", experts.shared * experts.width, states)
        for number, share in enumerate(shares):
            written += share * self.mlp(f"{prefix}experts.{number}.", experts.width, states)
        return rounded(written)

    def margins(self, ids):
        """How far the expected token's logit is above all others'."""
        states = self.codes[ids].T.float()
        for layer in range(self.target.layers):
            states = rounded(states + self.attention(layer, normed(states)))
            if layer < self.target.experts.first_layer:
                written = self.mlp(f"{layer}.mlp.", self.target.dense_width, normed(states))
            else:
                written = self.experts(layer, normed(states))
            states = rounded(states + written)
        head = scripted._head(self.codes, torch.tensor(SCRIPT.before), self.orders.both).float()
        logits, expected = normed(states).T @ head.T, torch.tensor(SCRIPT.follows)[ids][:, None]
        return logits.gather(1, expected)[:, 0] - logits.scatter(1, expected, -torch.inf).amax(1)


@pytest.mark.parametrize("layers", [7, 8, 16, 21, 32])
@pytest.mark.parametrize("widths", ["CPU", "published", "rank of eight"])
def test_every_token_is_followed_by_its_successor_at_any_depth(one_thread, widths, layers):
    ids = torch.randint(0, VOCABULARY, (TOKENS,), generator=torch.Generator().manual_seed(0))
    assert Model(shrunken(widths, layers)).margins(ids).min() > LEAST_MARGIN
