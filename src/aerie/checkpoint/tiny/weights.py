"""Weights that make the tiny target say its script and the drafters foresee most of it.

Everything is built from random codes: vectors of +1 and -1, nearly orthogonal to one another, and exactly orthogonal
matrices (Hadamard matrices with random signs). The residual stream is a weighted sum of codes, and a neuron that is
tuned to one code writes another. Noise of the usual kind is added in every layer, small against the margins.

How the target finds the next token:
  embedding      a token's own code, that of its class (which expert knows the token), and one that all tokens have
  attention 0    each position attends to its own token and copies all three, rotated, into the stream; `</think>` alone
                 prefers pictures, whose code and brightness then stand in place of its own code
  experts 1 to 4 for some tokens a neuron writes a hint for the drafters, and one in the next layer takes it back, so
                 that a hint is seen at the input of one layer alone
  experts 4 to 6 a neuron for each token of the script writes the code of the token that follows, and the last layer's
                 experts write a default
So a wrong attention, routing or expert changes the text, and a wrong set of auxiliary layers loses accepted drafts.

How a drafter foresees the token after the next: its attention copies the code of the next token's embedding, and its
MLP has a neuron for most tokens that writes the following one. For some tokens it relies on the hint in the auxiliary
states, which only the first draft step has. For the rest it is wrong on purpose, so that drafts are rejected too.

Matrices are multiplied while they hold small integers, which is exact in any order of summation, and scaled element by
element after: the bytes do not depend on the processor or the number of threads.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import torch

from aerie.checkpoint.tiny import configs as c
from aerie.checkpoint.tiny.script import (
    DEFAULT_SUCCESSOR,
    PICTURE_SUCCESSOR,
    SCRIPT,
    SPECIAL_ID,
    SUCCESSOR,
    VOCABULARY,
    Picture,
)

if TYPE_CHECKING:
    from torch import Tensor

H: Final = c.HIDDEN_SIZE
ROOT: Final = H**0.5
VOCABULARY_SIZE: Final = len(VOCABULARY)
THINK_END: Final = SPECIAL_ID["</think>"]
# +1 for a bright picture, -1 for a dark one: the sign of the brightness code.
BRIGHTNESS: Final[dict[Picture, int]] = {"bright": 1, "dark": -1}

# Weights of codes in the target's stream, where an embedding's codes weigh 1 each.
COPIED = 4.0  # the embedding's codes, by attention 0
HINT = 8.0  # for the drafters
NEXT = 12.0  # the token that follows
NOISE = 0.3  # of each other attention and MLP
# Weights in the drafters' stream.
STATES = 0.4  # of each auxiliary state
DRAFTER_COPIED = 12.0
DRAFTER_NEXT = 8.0

PEAK = 32.0  # attention score of a position with itself; another token gets less than half
PICTURE_PEAK = 2.6  # how much more strongly `</think>` seeks a picture than itself
LOGIT = 40.0
ACTIVATION = 8.0  # of a neuron that meets its code
ROUTER = 8.0  # how far the logit of a token's own expert is above the others'
GELU = 3.0  # activation of the two neurons for brightness

# What a drafter knows about the script's transitions, in turn: by the embedding, by the hint in an auxiliary state, or
# not at all ("?").
HINTED = "h"
KNOWLEDGE_MLA = "eeeeeehhh?"
KNOWLEDGE_LLAMA = "eeeee?hhh?"


class Source:
    """Random tensors, each from its own stream of numbers, so that no tensor depends on the order of creation."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def _generator(self, name: str) -> torch.Generator:
        digest = hashlib.sha256(f"{self.seed}/{name}".encode()).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest[:6], "big"))

    def code(self, name: str, width: int) -> Tensor:
        """Draw a vector of +1 and -1."""
        return torch.randint(0, 2, (width,), generator=self._generator(name)).float() * 2 - 1

    def noise(self, name: str, *shape: int, deviation: float) -> Tensor:
        """Draw uniform numbers about 0 with the given standard deviation."""
        uniform = torch.rand(shape, generator=self._generator(name)) * 2 - 1
        return uniform * (3**0.5 * deviation)

    def rotation(self, name: str) -> Tensor:
        """Draw a matrix of +1 and -1 with orthogonal rows and columns, H x H: ROOT times an orthogonal one."""
        order = torch.randperm(H, generator=self._generator(f"{name}/order"))
        return hadamard(H)[order] * self.code(f"{name}/signs", H)


def hadamard(size: int) -> Tensor:
    """Make Sylvester's matrix of +1 and -1 with orthogonal rows; `size` is a power of two."""
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix


class Codes:
    """The codes that target and drafters share.

    An embedding is the sum of three: the token's own code, that of its class, and one that all tokens have, against
    which neurons measure. The last two lie in channels of their own, so that nothing but the class decides the routing.
    """

    OWN_CHANNELS: Final = 112
    OWN_SIZE: Final = OWN_CHANNELS  # squared length
    SHARED_SIZE: Final = 4 * (H - OWN_CHANNELS)
    EMBEDDING_SIZE: Final = OWN_SIZE + 2 * SHARED_SIZE

    def __init__(self, source: Source) -> None:
        self.source = source
        shared = torch.nn.functional.pad(hadamard(H - self.OWN_CHANNELS) * 2, (self.OWN_CHANNELS, 0))
        self.always = shared[1]
        self.classes = shared[2 : 2 + c.EXPERTS]
        self.copied = source.rotation("copied")  # from embedding codes to those in the target's stream
        self.hints = [source.rotation(f"hint/{layer}") for layer in c.AUX_LAYERS]
        self.picture = self._own("picture")
        self.brightness = self._own("brightness")

    def _own(self, name: str) -> Tensor:
        return torch.nn.functional.pad(self.source.code(name, self.OWN_CHANNELS), (0, H - self.OWN_CHANNELS))

    def own(self, token: int) -> Tensor:
        """Tell a token from all others."""
        return self._own(f"own/{token}")

    def shared(self, token: int) -> Tensor:
        """Give the rest of a token's embedding: its class, and what all tokens have."""
        return self.classes[class_index(token)] + self.always

    def next(self, token: int) -> Tensor:
        """Stand in the stream where `token` is to follow."""
        return self.source.code(f"next/{token}", H)

    def embedding(self) -> Tensor:
        """Stack the embeddings of all tokens."""
        return torch.stack([self.own(token) + self.shared(token) for token in range(VOCABULARY_SIZE)])

    def head(self, tokens: list[int]) -> Tensor:
        """Make an output layer for these tokens."""
        return torch.stack([self.next(token) for token in tokens]) * (LOGIT / H)


EMBEDDING_RMS = (Codes.EMBEDDING_SIZE / H) ** 0.5
# Of the stream between attention 0 and the last layers, hints aside, and how much of it is a copied code.
STREAM_RMS = (EMBEDDING_RMS**2 * (1 + COPIED**2) + 6 * NOISE**2) ** 0.5
COPIED_SHARE = COPIED / STREAM_RMS
# The routing weight of a token's own expert.
ROUTED = 0.89 * c.ROUTED_SCALING_FACTOR
# Of latent attention's scores under yarn, as vLLM and transformers compute it.
SCALING = (0.1 * math.log(c.YARN_FACTOR) + 1) ** 2 / (c.QK_NOPE_HEAD_DIM + c.QK_ROPE_HEAD_DIM) ** 0.5


def class_index(token: int) -> int:
    """Name the class, and with the layer the expert, that knows a token."""
    return token // 3 % c.EXPERTS


def knowledge(pattern: str) -> dict[int, str]:
    """Say how a drafter knows what follows each token of the script: a letter of `pattern`."""
    return {token: pattern[n % len(pattern)] for n, token in enumerate(SCRIPT)}


def hinted() -> dict[int, int]:
    """Name, for some tokens, the auxiliary layer (by its place) whose input has a hint of the token after the next."""
    by_hint = [t for t, following in SCRIPT.items() if knowledge(KNOWLEDGE_MLA).get(following) == HINTED]
    return {token: n % len(c.AUX_LAYERS) for n, token in enumerate(by_hint)}


@dataclass
class Mlp:
    """Rows of gate and up, columns of down: chosen neurons first, the rest noise."""

    width: int
    gate: list[Tensor] = field(default_factory=list)
    up: list[Tensor] = field(default_factory=list)
    down: list[Tensor] = field(default_factory=list)

    def add(
        self,
        met: Tensor,
        strength: float,
        written: Tensor,
        against: Tensor | None = None,
        times: Tensor | None = None,
    ) -> None:
        """Add a neuron that writes `written` where the normalised stream holds code `met` with the given strength.

        Codes are given divided by their squared length. The stream always holds `against` as strongly as it should hold
        `met`; with it, the neuron is silent unless `met` is at least half there. With `times`, what is written is
        multiplied by as much of that code as the stream holds, in units of `strength`.
        """
        tuned = met if against is None else 2 * met - against
        self.gate.append(tuned * (ACTIVATION / strength))
        self.up.append((met if times is None else times) / strength)
        self.down.append(written / ACTIVATION)

    def tensors(self, prefix: str, source: Source, noise: float = NOISE) -> dict[str, Tensor]:
        """Make the three matrices; the neurons left over write noise of the given deviation."""
        free = self.width - len(self.gate)
        if free < 0:
            raise ValueError(f"{prefix} has {self.width} neurons, {len(self.gate)} were asked for: widen it")
        gate = source.noise(f"{prefix}gate", free, H, deviation=1 / ROOT)
        up = source.noise(f"{prefix}up", free, H, deviation=1 / ROOT)
        # silu(a) * b of two normal numbers deviates by about 0.35
        down = source.noise(f"{prefix}down", H, free, deviation=noise / (0.35 * max(free, 1) ** 0.5))
        return {
            f"{prefix}gate_proj.weight": torch.cat([*(row[None] for row in self.gate), gate]),
            f"{prefix}up_proj.weight": torch.cat([*(row[None] for row in self.up), up]),
            f"{prefix}down_proj.weight": torch.cat([*(column[:, None] for column in self.down), down], 1),
        }


def rotated(rotation: Tensor, code: Tensor) -> Tensor:
    """Rotate a code into another basis."""
    return rotation @ code / ROOT


def beside_states(matrix: Tensor, source: Source, name: str) -> Tensor:
    """Widen an input projection for a drafter, whose input is the embedding and, almost unread, the states."""
    return torch.cat([matrix, source.noise(f"{name}/states", *matrix.shape, deviation=0.02 / ROOT)], 1)


def latent_attention(
    prefix: str, source: Source, written: Tensor, strength: float, lure: tuple[Tensor, Tensor, float] | None = None
) -> dict[str, Tensor]:
    """Make latent attention in which every position attends to the positions of its own token.

    The (normalised) input is rotated by `written` and added to the stream with the given strength. With
    `lure = (met, sought, weight)` a position that holds code `met` looks for positions that hold `sought`.
    """
    copies = [source.rotation(f"{prefix}latent/{n}") for n in range(c.KV_LORA_RANK // H)]
    compressed = source.rotation(f"{prefix}compressed")
    queries, keys_values, outputs = [], [], []
    for head in range(c.HEADS):
        key, value = source.rotation(f"{prefix}key/{head}"), source.rotation(f"{prefix}value/{head}")
        query = key @ compressed.T
        if lure:
            met, sought, weight = lure
            query += torch.outer(key @ sought, compressed @ met) * (weight / H)
        rope = source.noise(f"{prefix}query_rope/{head}", c.QK_ROPE_HEAD_DIM, H, deviation=1 / ROOT)
        queries += [query * (PEAK / SCALING / H**2), rope]
        keys_values += [torch.cat([read @ copy.T for copy in copies], 1) / (H * len(copies)) for read in (key, value)]
        outputs.append(written @ value.T * (strength / c.HEADS / H))
    key_rope = source.noise(f"{prefix}key_rope", c.QK_ROPE_HEAD_DIM, H, deviation=1 / ROOT)
    return {
        f"{prefix}q_a_proj.weight": compressed / ROOT,
        f"{prefix}q_a_layernorm.weight": torch.ones(c.Q_LORA_RANK),
        f"{prefix}q_b_proj.weight": torch.cat(queries),
        f"{prefix}kv_a_proj_with_mqa.weight": torch.cat([torch.cat(copies) / ROOT, key_rope]),
        f"{prefix}kv_a_layernorm.weight": torch.ones(c.KV_LORA_RANK),
        f"{prefix}kv_b_proj.weight": torch.cat(keys_values),
        f"{prefix}o_proj.weight": torch.cat(outputs, 1),
    }


def grouped_attention(prefix: str, source: Source, written: Tensor, strength: float) -> dict[str, Tensor]:
    """Make the same for a Llama drafter, whose heads share keys and values: each pair sees half of the input."""
    key, value = source.rotation(f"{prefix}key"), source.rotation(f"{prefix}value")
    shared = c.HEADS // c.LLAMA_DRAFTER["num_key_value_heads"]
    width = c.LLAMA_DRAFTER["head_dim"]
    scale = (PEAK / width**0.5) ** 0.5  # a position meets itself with scale^2 * width / sqrt(width)
    halves = [slice(0, width), slice(width, H)]
    queries = torch.cat([key[half] for half in halves for _ in range(shared)])
    outputs = [written @ value[half].T * (strength / shared / H) for half in halves for _ in range(shared)]
    return {
        f"{prefix}q_proj.weight": beside_states(queries * (scale / ROOT), source, f"{prefix}q"),
        f"{prefix}k_proj.weight": beside_states(key * (scale / ROOT), source, f"{prefix}k"),
        f"{prefix}v_proj.weight": beside_states(value / ROOT, source, f"{prefix}v"),
        f"{prefix}o_proj.weight": torch.cat(outputs, 1),
    }


def target_tensors(seed: int) -> dict[str, Tensor]:
    """Make all tensors of the target, by their names in Kimi-K2.5's checkpoint."""
    source = Source(seed)
    codes = Codes(source)
    tensors: dict[str, Tensor] = {"language_model.model.embed_tokens.weight": codes.embedding()}
    experts = _experts(codes)
    for layer in range(c.LAYERS):
        prefix = f"language_model.model.layers.{layer}."
        tensors[prefix + "input_layernorm.weight"] = torch.ones(H)
        tensors[prefix + "post_attention_layernorm.weight"] = torch.ones(H)
        attention = prefix + "self_attn."
        if layer == 0:
            # The embedding's two codes share the norm's unit deviation.
            lure = (codes.own(THINK_END), codes.picture, PICTURE_PEAK)
            tensors |= latent_attention(attention, source, codes.copied, COPIED * EMBEDDING_RMS, lure)
            tensors |= Mlp(c.DENSE_WIDTH).tensors(prefix + "mlp.", source)
            continue
        tensors |= latent_attention(attention, source, source.rotation(f"written/{layer}"), NOISE)
        # The class's own expert gets 3/4 of ROUTER for its logit, the others -1/4.
        told = torch.stack([rotated(codes.copied, 4 * code - codes.always) for code in codes.classes])
        router = told * (ROUTER / 4 / codes.SHARED_SIZE / COPIED_SHARE)
        tensors[prefix + "mlp.gate.weight"] = router.roll(layer, 0)
        bias = source.noise(f"{prefix}bias", c.EXPERTS, deviation=0.02)
        tensors[prefix + "mlp.gate.e_score_correction_bias"] = bias
        for expert in range(c.EXPERTS):
            mlp = experts[layer, (expert - layer) % c.EXPERTS]
            tensors |= mlp.tensors(f"{prefix}mlp.experts.{expert}.", source, NOISE / c.ROUTED_SCALING_FACTOR)
        tensors |= Mlp(c.EXPERT_WIDTH).tensors(prefix + "mlp.shared_experts.", source)
    tensors["language_model.model.norm.weight"] = torch.ones(H)
    tensors["language_model.lm_head.weight"] = codes.head(list(range(VOCABULARY_SIZE)))
    tensors |= _vision_tensors(codes)
    return _in_bfloat16(tensors)


def _experts(codes: Codes) -> dict[tuple[int, int], Mlp]:
    """Tune the experts: (layer, class) -> the neurons of the expert that knows the class in that layer."""
    experts = {(layer, n): Mlp(c.EXPERT_WIDTH) for layer in range(1, c.LAYERS) for n in range(c.EXPERTS)}
    always = rotated(codes.copied, codes.always) / codes.SHARED_SIZE
    for n in range(c.EXPERTS):
        # What follows where no other neuron says something else. In the last layer, since it drowns the rest.
        experts[c.LAYERS - 1, n].add(always, COPIED_SHARE, codes.next(DEFAULT_SUCCESSOR) * (NEXT / ROUTED))
    hints = hinted()
    for token, following in SCRIPT.items():
        met = rotated(codes.copied, codes.own(token)) / codes.OWN_SIZE
        # Not where a hint is about to be taken back: it would drown the token's code.
        layers = range(5, c.LAYERS) if token in hints else range(4, c.LAYERS)
        chosen = experts[layers[token % len(layers)], class_index(token)]
        if following != DEFAULT_SUCCESSOR:
            chosen.add(met, COPIED_SHARE, _instead(codes, following), always)
        if token == THINK_END:
            for picture, sign in BRIGHTNESS.items():
                seen = rotated(codes.copied, codes.picture + sign * codes.brightness) / (2 * codes.OWN_SIZE)
                chosen.add(seen, COPIED_SHARE, _instead(codes, PICTURE_SUCCESSOR[picture]), always)
        if token in hints:
            layer = c.AUX_LAYERS[hints[token]]
            hint = rotated(codes.hints[hints[token]], codes.next(SUCCESSOR[following]))
            experts[layer - 1, class_index(token)].add(met, COPIED_SHARE, hint * (HINT / ROUTED), always)
            seen_share = HINT / (STREAM_RMS**2 + HINT**2) ** 0.5
            experts[layer, class_index(token)].add(hint / H, seen_share, hint * (-1.2 * HINT / ROUTED))
    return experts


def _instead(codes: Codes, following: int) -> Tensor:
    """Make what a neuron writes for a token to follow in place of the default."""
    return (2 * NEXT * codes.next(following) - 1.5 * NEXT * codes.next(DEFAULT_SUCCESSOR)) / ROUTED


def _vision_tensors(codes: Codes) -> dict[str, Tensor]:
    """Make a tower that tells bright from dark, and a projector that says so in the text model's codes."""
    source, width = codes.source, c.VISION_WIDTH
    light = source.code("light", width)
    patch = torch.ones(3, c.PATCH, c.PATCH) * (4 / (3 * c.PATCH**2))
    positions = source.noise("positions", c.POSITIONS, c.POSITIONS, width, deviation=0.2)
    tensors = {
        "vision_tower.patch_embed.proj.weight": light[:, None, None, None] * patch
        + source.noise("patch", width, *patch.shape, deviation=0.02),
        "vision_tower.patch_embed.proj.bias": torch.zeros(width),
        "vision_tower.patch_embed.pos_emb.weight": positions,
    }
    for layer in range(c.VISION_LAYERS):
        block = f"vision_tower.encoder.blocks.{layer}."
        shapes = {"wqkv": (3 * width, width), "wo": (width, width),
                  "mlp.fc0": (c.VISION_MLP_WIDTH, width), "mlp.fc1": (width, c.VISION_MLP_WIDTH)}  # fmt: skip
        for name, (rows, columns) in shapes.items():
            to_stream = name in ("wo", "mlp.fc1")
            deviation = (NOISE if to_stream else 1) * columns**-0.5
            tensors[f"{block}{name}.weight"] = source.noise(f"{block}{name}", rows, columns, deviation=deviation)
            tensors[f"{block}{name}.bias"] = torch.zeros(rows)
        tensors |= _layer_norm(f"{block}norm0", width) | _layer_norm(f"{block}norm1", width)
    tensors |= _layer_norm("vision_tower.encoder.final_layernorm", width)
    tensors |= _layer_norm("mm_projector.pre_norm", width)
    merged = 4 * width
    first = source.noise("projector/0", merged, merged, deviation=merged**-0.5)
    second = source.noise("projector/2", H, merged, deviation=0.1 * merged**-0.5)
    for row, sign in enumerate(BRIGHTNESS.values()):
        first[row] = light.repeat(4) * (sign * GELU / merged)
        second[:, row] = codes.brightness * (sign / GELU)
    tensors["mm_projector.proj.0.weight"] = first
    tensors["mm_projector.proj.0.bias"] = torch.zeros(merged)
    tensors["mm_projector.proj.2.weight"] = second
    tensors["mm_projector.proj.2.bias"] = codes.picture + codes.shared(THINK_END)
    return tensors


def _layer_norm(name: str, width: int) -> dict[str, Tensor]:
    return {f"{name}.weight": torch.ones(width), f"{name}.bias": torch.zeros(width)}


def mla_drafter_tensors(seed: int) -> dict[str, Tensor]:
    """Make all tensors of the drafter with latent attention, by the names that EAGLE-3 checkpoints use."""
    source = Source(seed)
    copied = source.rotation("mla_drafter/copied")
    attention = latent_attention("midlayer.self_attn.", source, copied, DRAFTER_COPIED * EMBEDDING_RMS)
    for name in ("midlayer.self_attn.q_a_proj.weight", "midlayer.self_attn.kv_a_proj_with_mqa.weight"):
        attention[name] = beside_states(attention[name], source, name)
    return _drafter_tensors(Codes(source), copied, attention, KNOWLEDGE_MLA, list(range(VOCABULARY_SIZE)))


def llama_drafter_tensors(seed: int) -> dict[str, Tensor]:
    """Make all tensors of the Llama drafter, whose head knows the tokens of the script and some others (d2t, t2d)."""
    source = Source(seed)
    copied = source.rotation("llama_drafter/copied")
    attention = grouped_attention("midlayer.self_attn.", source, copied, DRAFTER_COPIED * EMBEDDING_RMS)
    spoken = set(SUCCESSOR)
    others = [token for token in range(VOCABULARY_SIZE) if token not in spoken]
    drafted = sorted([*spoken, *others[: c.DRAFT_VOCABULARY - len(spoken)]])
    tensors = _drafter_tensors(Codes(source), copied, attention, KNOWLEDGE_LLAMA, drafted)
    # Draft id i stands for target id i + d2t[i].
    tensors["d2t"] = torch.tensor(drafted) - torch.arange(len(drafted))
    tensors["t2d"] = torch.isin(torch.arange(VOCABULARY_SIZE), torch.tensor(drafted))
    return tensors


def _drafter_tensors(
    codes: Codes, copied: Tensor, attention: dict[str, Tensor], pattern: str, drafted: list[int]
) -> dict[str, Tensor]:
    mlp = Mlp(c.DRAFTER_WIDTH)
    always = rotated(copied, codes.always) / codes.SHARED_SIZE
    # Three auxiliary states and what attention copied.
    stream = len(c.AUX_LAYERS) * (STATES * STREAM_RMS) ** 2 + (DRAFTER_COPIED * EMBEDDING_RMS) ** 2
    share = DRAFTER_COPIED / stream**0.5
    for token, known in knowledge(pattern).items():
        if known == "?":
            continue
        met = rotated(copied, codes.own(token)) / codes.OWN_SIZE
        # The stream is the next draft step's input, so what was used up is taken out of it: the copy, and what the step
        # before wrote to draft this token.
        written = -DRAFTER_COPIED * rotated(copied, codes.own(token) + codes.shared(token))
        if known != HINTED:
            written += DRAFTER_NEXT * codes.next(SUCCESSOR[token])
        mlp.add(met, share, written, always)
        drafted_before = codes.next(token)
        mlp.add(met, share, -DRAFTER_COPIED * drafted_before, always, times=drafted_before / H)
    tensors = {
        "fc.weight": torch.cat([hint.T for hint in codes.hints], 1) * (STATES / ROOT),
        **{f"midlayer.{name}.weight": torch.ones(H)
           for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm")},
        **attention,
        **mlp.tensors("midlayer.mlp.", codes.source),
        "norm.weight": torch.ones(H),
        "lm_head.weight": codes.head(drafted),
    }  # fmt: skip
    return _in_bfloat16(tensors)


def _in_bfloat16(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Round as the real checkpoint does: all in bfloat16 but the router's bias."""
    return {
        name: (tensor if name.endswith("e_score_correction_bias") else tensor.to(torch.bfloat16)).contiguous()
        for name, tensor in tensors.items()
    }
