"""What the target computes, by another implementation: transformers' DeepseekV3ForCausalLM in fp32, same weights."""

from __future__ import annotations

import json
from functools import cache
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

if TYPE_CHECKING:
    from pathlib import Path

PREFIX = "language_model."  # of the text model's tensors in Kimi-K2.5's checkpoint


class Reference:
    """The text model of a Kimi-K2.5 checkpoint, one sequence at a time: no cache, batch, padding or speculation."""

    def __init__(self, checkpoint: Path) -> None:
        text = json.loads((checkpoint / "config.json").read_text())["text_config"]
        config = DeepseekV3Config(**text | {"model_type": "deepseek_v3"}, attn_implementation="eager")
        model = DeepseekV3ForCausalLM(config).float().eval()
        tensors = load_file(checkpoint / "model.safetensors")
        tensors = {name.removeprefix(PREFIX): t.float() for name, t in tensors.items() if name.startswith(PREFIX)}
        if any(name.endswith("experts.gate_up_proj") for name in model.state_dict()):
            _fuse_experts(tensors, config.num_hidden_layers, config.n_routed_experts)
        missing, unexpected = model.load_state_dict(tensors, strict=False)
        # Rotary frequencies are computed, in some releases as buffers.
        wrong = [name for name in missing if "rotary_emb" not in name] + unexpected
        assert not wrong, f"weights do not fit: missing or unexpected {wrong}"
        self._model = model
        self.layers = config.num_hidden_layers
        self._before_norm: list[torch.Tensor] = []
        model.model.norm.register_forward_pre_hook(lambda _, inputs: self._before_norm.append(inputs[0]))

    @cache  # noqa: B019 - it lives as long as the program
    @torch.inference_mode()
    def states(self, tokens: tuple[int, ...]) -> torch.Tensor:
        """Give the input of each layer, and last what the last layer puts out, before the norm.

        [layers + 1, tokens, hidden size] in fp32. Entry i is what vLLM calls auxiliary layer i.
        """
        self._before_norm.clear()
        found = self._model.model(torch.tensor([tokens]), output_hidden_states=True, use_cache=False).hidden_states
        # transformers' own last entry is behind the norm.
        return torch.stack([*(state[0] for state in found[: self.layers]), self._before_norm[0][0]])


def _fuse_experts(tensors: dict[str, torch.Tensor], layers: int, experts: int) -> None:
    """Stack the experts' matrices as transformers 5 holds them."""
    for layer in range(layers):
        prefix = f"model.layers.{layer}.mlp.experts."
        if f"{prefix}0.gate_proj.weight" not in tensors:
            continue
        gate, up, down = (
            [tensors.pop(f"{prefix}{expert}.{name}_proj.weight") for expert in range(experts)]
            for name in ("gate", "up", "down")
        )
        tensors[f"{prefix}gate_up_proj"] = torch.cat([torch.stack(gate), torch.stack(up)], 1)
        tensors[f"{prefix}down_proj"] = torch.stack(down)
