"""The configuration files of the tiny target and its two drafters.

Heads keep the sizes of Kimi-K2.5 (moonshotai/Kimi-K2.5, config.json), since kernels are chosen and refused by them.
Width, depth, experts and vocabulary are small.
"""

from __future__ import annotations

from typing import Any

from aerie.checkpoint.config import default_aux_layers
from aerie.checkpoint.tiny.script import SPECIAL_ID, VOCABULARY
from aerie.checkpoint.tiny.tokenizer import MAX_LENGTH

# Kimi-K2.5's own.
KV_LORA_RANK = 512
QK_ROPE_HEAD_DIM = 64
QK_NOPE_HEAD_DIM = 128
V_HEAD_DIM = 128
YARN_FACTOR = 64.0
ROUTED_SCALING_FACTOR = 2.827

# Small.
HIDDEN_SIZE = 128
LAYERS = 7  # the least for which vLLM's default auxiliary layers differ from one another
HEADS = 4  # two a rank at TP2: with one, other kernels are taken
Q_LORA_RANK = 128
DENSE_WIDTH = 256
EXPERTS = 8
EXPERTS_PER_TOKEN = 2
EXPERT_WIDTH = 32
DRAFTER_WIDTH = 256
DRAFT_VOCABULARY = 256
VISION_WIDTH = 64
VISION_HEADS = 2
VISION_LAYERS = 2
VISION_MLP_WIDTH = 128
PATCH = 14
POSITIONS = 16  # of the vision tower's learned position table, a side

# The layers whose inputs the drafters read; vLLM's id i is the input of layer i.
AUX_LAYERS = default_aux_layers(LAYERS)

END_OF_TURN = SPECIAL_ID["<|im_end|>"]
TOKEN_IDS = {"bos_token_id": SPECIAL_ID["[BOS]"], "eos_token_id": END_OF_TURN, "pad_token_id": SPECIAL_ID["[PAD]"]}

_COMMON: dict[str, Any] = {
    "vocab_size": len(VOCABULARY),
    "hidden_size": HIDDEN_SIZE,
    "num_attention_heads": HEADS,
    "hidden_act": "silu",
    "attention_bias": False,
    "rms_norm_eps": 1e-5,
    "rope_theta": 50000.0,
    "max_position_embeddings": MAX_LENGTH,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    **TOKEN_IDS,
}

_LATENT_ATTENTION: dict[str, Any] = {
    "model_type": "kimi_k2",
    "num_key_value_heads": HEADS,
    "kv_lora_rank": KV_LORA_RANK,
    "q_lora_rank": Q_LORA_RANK,
    "qk_nope_head_dim": QK_NOPE_HEAD_DIM,
    "qk_rope_head_dim": QK_ROPE_HEAD_DIM,
    "v_head_dim": V_HEAD_DIM,
    "rope_scaling": {
        "type": "yarn",
        "factor": YARN_FACTOR,
        "original_max_position_embeddings": int(MAX_LENGTH / YARN_FACTOR),
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "n_routed_experts": EXPERTS,
    "n_shared_experts": 1,
    "num_experts_per_tok": EXPERTS_PER_TOKEN,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": ROUTED_SCALING_FACTOR,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "moe_intermediate_size": EXPERT_WIDTH,
}

TARGET: dict[str, Any] = {
    "architectures": ["KimiK25ForConditionalGeneration"],
    "model_type": "kimi_k25",
    "text_config": {
        **_COMMON,
        **_LATENT_ATTENTION,
        "architectures": ["DeepseekV3ForCausalLM"],
        "num_hidden_layers": LAYERS,
        "intermediate_size": DENSE_WIDTH,
        "num_nextn_predict_layers": 0,
        "use_cache": True,
    },
    "vision_config": {
        "model_type": "kimi_k25_vision",
        "patch_size": PATCH,
        "init_pos_emb_height": POSITIONS,
        "init_pos_emb_width": POSITIONS,
        "init_pos_emb_time": 4,
        "pos_emb_type": "divided_fixed",
        "num_attention_heads": VISION_HEADS,
        "num_hidden_layers": VISION_LAYERS,
        "hidden_size": VISION_WIDTH,
        "intermediate_size": VISION_MLP_WIDTH,
        "merge_kernel_size": [2, 2],
        "merge_type": "sd2_tpool",
        "video_attn_type": "spatial_temporal",
        "mm_projector_type": "patchmerger",
        "mm_hidden_size": VISION_WIDTH,
        "projector_hidden_act": "gelu",
        "projector_ln_eps": 1e-5,
    },
    "ignore_index": -100,
    # The real repository says the first, vLLM and transformers read the second.
    "media_placeholder_token_id": SPECIAL_ID["<|media_pad|>"],
    "image_token_id": SPECIAL_ID["<|media_pad|>"],
    "use_unified_vision_chunk": True,
    "video_placeholder": "<|kimi_k25_video_placeholder|>",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    **TOKEN_IDS,
}

GENERATION: dict[str, Any] = TOKEN_IDS

PREPROCESSOR: dict[str, Any] = {
    "image_processor_type": "KimiK25VisionProcessor",
    "media_proc_cfg": {
        "patch_size": PATCH,
        "merge_kernel_size": 2,
        "in_patch_limit": POSITIONS * POSITIONS,
        "patch_limit_on_one_side": POSITIONS,
        "in_patch_limit_each_frame": POSITIONS * POSITIONS // 4,
        "in_patch_limit_video": POSITIONS * POSITIONS,
        "temporal_merge_kernel_size": 4,
        "fixed_output_tokens": None,
        "sample_fps": 2.0,
        "timestamp_mode": "hh:mm:ss.fff",
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    },
}

MLA_DRAFTER: dict[str, Any] = {
    **_COMMON,
    **_LATENT_ATTENTION,
    "architectures": ["Eagle3DeepseekV2ForCausalLM"],
    "num_hidden_layers": 1,
    "intermediate_size": DRAFTER_WIDTH,
    "draft_vocab_size": len(VOCABULARY),
}

LLAMA_DRAFTER: dict[str, Any] = {
    **_COMMON,
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "num_hidden_layers": 1,
    "intermediate_size": DRAFTER_WIDTH,
    "num_key_value_heads": HEADS // 2,
    "head_dim": HIDDEN_SIZE // 2,
    "mlp_bias": False,
    "draft_vocab_size": DRAFT_VOCABULARY,
    "eagle_aux_hidden_state_layer_ids": list(AUX_LAYERS),
}
