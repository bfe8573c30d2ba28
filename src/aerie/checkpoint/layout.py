"""Which tensors a checkpoint must hold, by its config.json: names, dtypes and shapes before any split over ranks.

For Kimi-K2.5 this gives the 208,550 tensors and 595,148,192,736 bytes of the published index. The names are those of
the published checkpoints and of vLLM's loaders (deepseek_v2.py, kimi_k25.py, deepseek_eagle3.py, llama_eagle3.py).
"""

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from aerie.checkpoint.config import ConfigError, Drafter, Latent, Quantization, Target, Vision

_BYTES = {"BF16": 2, "F32": 4, "I32": 4, "I64": 8, "BOOL": 1}
_PACKED = 32  # bits of an integer that holds quantised weights


class Expected(NamedTuple):
    """One tensor: safetensors' dtype, and its shape."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Bytes."""
        return math.prod(self.shape) * _BYTES[self.dtype]


Layout = dict[str, Expected]


def target_layout(target: Target) -> Layout:
    """Return a target's tensors; raises ConfigError where it is quantised in a way that is not known here."""
    quantization = target.quantization
    if quantization and not (quantization.is_packed_integers and quantization.bits == 4 and quantization.group > 0):  # noqa: PLR2004
        raise ConfigError(
            f"{target.directory}: quantised by {quantization.method} as {quantization.form} with {quantization.bits} "
            "bits; known here are compressed-tensors' pack-quantized with 4 bits in groups, and no quantisation"
        )
    model = f"{target.prefix}model."
    hidden = target.hidden_size
    tensors = _plain(f"{model}embed_tokens", target.vocabulary, hidden) | _norm(f"{model}norm", hidden)
    tensors |= _plain(f"{target.prefix}lm_head", target.vocabulary, hidden)
    for number in range(target.layers):
        layer = f"{model}layers.{number}."
        tensors |= _norm(f"{layer}input_layernorm", hidden) | _norm(f"{layer}post_attention_layernorm", hidden)
        tensors |= _latent(f"{layer}self_attn.", target.attention, hidden, hidden)
        if number < target.experts.first_layer:
            tensors |= _mlp(f"{layer}mlp.", hidden, target.dense_width)
        else:
            tensors |= _experts(f"{layer}mlp.", target, quantization)
    if target.vision:
        tensors |= _vision(target.vision, hidden)
    return tensors


def drafter_layout(drafter: Drafter, present: Mapping[str, object] | None = None) -> Layout:
    """Return a drafter's tensors, with its first layer called `midlayer`.

    Its own embedding and head may be missing, then it uses the target's; `present` says which are there. A reduced
    vocabulary takes d2t: draft id i stands for the target's id i + d2t[i].
    """
    hidden, states = drafter.hidden_size, drafter.aux_states * drafter.target_hidden_size
    tensors = _plain("fc", hidden, states) | _norm("norm", hidden)
    if drafter.whole.get("fc_norm"):
        for number in range(drafter.aux_states):
            tensors |= _norm(f"fc_norm.{number}", drafter.target_hidden_size)
    for number in range(drafter.layers):
        layer = f"layers.{number}." if number else "midlayer."
        tensors |= _norm(f"{layer}hidden_norm", hidden) | _norm(f"{layer}input_layernorm", hidden)
        tensors |= _norm(f"{layer}post_attention_layernorm", hidden)
        # The first layer's attention reads the token's embedding beside the hidden state.
        read = hidden if number else 2 * hidden
        if drafter.is_mla:
            tensors |= _latent(f"{layer}self_attn.", drafter.attention, read, hidden)
        else:
            tensors |= _grouped(f"{layer}self_attn.", drafter, read)
        tensors |= _mlp(f"{layer}mlp.", hidden, drafter.width)
    reduced = drafter.draft_vocabulary != drafter.vocabulary
    if present is None or "embed_tokens.weight" in present:
        tensors |= _plain("embed_tokens", drafter.vocabulary, hidden)
    if present is None or reduced or "lm_head.weight" in present:
        tensors |= _plain("lm_head", drafter.draft_vocabulary, hidden)
    if reduced:
        tensors["d2t"] = Expected("I64", (drafter.draft_vocabulary,))
    return tensors


def drafter_name(name: str) -> str:
    """Return a tensor's name as `drafter_layout` gives it: checkpoints say `midlayer.` or `layers.0.`."""
    return name.replace("layers.0.", "midlayer.", 1) if name.startswith("layers.0.") else name


def _plain(name: str, rows: int, columns: int) -> Layout:
    return {f"{name}.weight": Expected("BF16", (rows, columns))}


def _norm(name: str, width: int) -> Layout:
    return {f"{name}.weight": Expected("BF16", (width,))}


def _with_bias(name: str, *shape: int) -> Layout:
    return {f"{name}.weight": Expected("BF16", shape), f"{name}.bias": Expected("BF16", shape[:1])}


def _latent(prefix: str, attention: Latent, read: int, written: int) -> Layout:
    query = attention.heads * (attention.nope + attention.rope)
    tensors: Layout = {}
    if attention.q_lora_rank is None:
        tensors |= _plain(f"{prefix}q_proj", query, read)
    else:
        tensors |= _plain(f"{prefix}q_a_proj", attention.q_lora_rank, read)
        tensors |= _norm(f"{prefix}q_a_layernorm", attention.q_lora_rank)
        tensors |= _plain(f"{prefix}q_b_proj", query, attention.q_lora_rank)
    tensors |= _plain(f"{prefix}kv_a_proj_with_mqa", attention.kv_lora_rank + attention.rope, read)
    tensors |= _norm(f"{prefix}kv_a_layernorm", attention.kv_lora_rank)
    tensors |= _plain(
        f"{prefix}kv_b_proj", attention.heads * (attention.nope + attention.value), attention.kv_lora_rank
    )
    return tensors | _plain(f"{prefix}o_proj", written, attention.heads * attention.value)


def _grouped(prefix: str, drafter: Drafter, read: int) -> Layout:
    query, keys = drafter.heads * drafter.head_size, drafter.kv_heads * drafter.head_size
    return (
        _plain(f"{prefix}q_proj", query, read)
        | _plain(f"{prefix}k_proj", keys, read)
        | _plain(f"{prefix}v_proj", keys, read)
        | _plain(f"{prefix}o_proj", drafter.hidden_size, query)
    )


def _mlp(prefix: str, hidden: int, width: int) -> Layout:
    return (
        _plain(f"{prefix}gate_proj", width, hidden)
        | _plain(f"{prefix}up_proj", width, hidden)
        | _plain(f"{prefix}down_proj", hidden, width)
    )


def _experts(prefix: str, target: Target, quantization: Quantization | None) -> Layout:
    experts, hidden = target.experts, target.hidden_size
    tensors = _plain(f"{prefix}gate", experts.routed, hidden)
    if target.text.get("topk_method") == "noaux_tc":
        tensors[f"{prefix}gate.e_score_correction_bias"] = Expected("F32", (experts.routed,))
    if experts.shared:
        tensors |= _mlp(f"{prefix}shared_experts.", hidden, experts.shared * experts.width)
    for number in range(experts.routed):
        for name, one in _mlp(f"{prefix}experts.{number}.", hidden, experts.width).items():
            module = name.removesuffix(".weight")
            if quantization and quantization.quantises(module):
                tensors |= dict(_packed(module, one.shape, quantization))
            else:
                tensors[name] = one
    return tensors


def _packed(module: str, shape: tuple[int, ...], quantization: Quantization) -> Iterator[tuple[str, Expected]]:
    rows, columns = shape
    yield f"{module}.weight_packed", Expected("I32", (rows, columns * quantization.bits // _PACKED))
    yield f"{module}.weight_scale", Expected("BF16", (rows, columns // quantization.group))
    yield f"{module}.weight_shape", Expected("I32", (2,))


def _vision(vision: Vision, hidden: int) -> Layout:
    width, merged = vision.width, vision.merge[0] * vision.merge[1] * vision.width
    embed = "vision_tower.patch_embed."
    tensors = _with_bias(f"{embed}proj", width, 3, vision.patch, vision.patch)
    tensors[f"{embed}pos_emb.weight"] = Expected("BF16", (*vision.positions, width))
    for number in range(vision.layers):
        block = f"vision_tower.encoder.blocks.{number}."
        for name, rows, columns in (
            ("wqkv", 3 * width, width),
            ("wo", width, width),
            ("mlp.fc0", vision.mlp_width, width),
            ("mlp.fc1", width, vision.mlp_width),
        ):
            tensors |= _with_bias(f"{block}{name}", rows, columns)
        tensors |= _with_bias(f"{block}norm0", width) | _with_bias(f"{block}norm1", width)
    tensors |= _with_bias("vision_tower.encoder.final_layernorm", width)
    tensors |= _with_bias("mm_projector.pre_norm", width)
    tensors |= _with_bias("mm_projector.proj.0", merged, merged)
    return tensors | _with_bias("mm_projector.proj.2", hidden, merged)
