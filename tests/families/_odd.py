"""Llamas that do one thing no policy cache could follow, each under a `model_type` of its own."""

from __future__ import annotations

from typing import Any

import torch
from helpers import VOCAB
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaAttention, apply_rotary_pos_emb
from transformers.models.llama.modeling_llama import eager_attention_forward as llama_eager

ODDITIES = {
    "cooled": "weighs rows in layer 0 differently",
    "copied": "with keys that are not the ones its cache returned",
    "misnumbered": "calls attention for layer 1 where layer 0 was due",
    "louder": "something else than weights times values",
    "unscaled": "does not tell attention its scale",
}


def eager_attention_forward(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float | None = None, **more: Any
) -> tuple[Tensor, Tensor]:
    """Llama's, at a temperature that only the module knows."""
    scaling = module.head_dim**-0.5 if scaling is None else scaling
    cooled = 0.5 if module.config.oddity == "cooled" else 1.0
    output, weights = llama_eager(module, query, key, value, mask, scaling=scaling * cooled, **more)
    return output * (2.0 if module.config.oddity == "louder" else 1.0), weights


class OddAttention(LlamaAttention):
    """Llama's attention with one oddity."""

    def forward(self, hidden_states: Tensor, position_embeddings: Any, attention_mask: Any, **kwargs: Any) -> Any:
        cache = kwargs.pop("cache", None) or kwargs.pop("past_key_values", None)
        kwargs.pop("past_key_values", None)
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        query, key, value = (
            layer(hidden_states).view(shape).transpose(1, 2) for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        oddity = self.config.oddity
        if oddity == "copied":
            key = key.clone()
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        if oddity == "unscaled":
            output, weights = attend(self, query, key, value, attention_mask, **kwargs)
        else:
            output, weights = attend(self, query, key, value, attention_mask, scaling=self.scaling, **kwargs)
        return self.o_proj(output.reshape(*hidden_states.shape[:-1], -1)), weights


class OddConfig(LlamaConfig):
    """A Llama's config that names its oddity."""

    model_type = "odd_llama"
    oddity: str = ""


class OddForCausalLM(LlamaForCausalLM):
    """A Llama with odd attention."""

    config_class = OddConfig


def odd(oddity: str) -> Any:
    """Return a tiny model with one oddity."""
    torch.manual_seed(0)
    config = OddConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,
    )
    config.oddity = oddity
    model = OddForCausalLM(config)
    for number, layer in enumerate(model.model.layers):
        attention = OddAttention(model.config, number)
        attention.load_state_dict(layer.self_attn.state_dict())
        layer.self_attn = attention
        if oddity == "misnumbered":
            attention.layer_idx = 1 - number
    # Only eager cools: transformers' sdpa does what it is told.
    model.set_attn_implementation("sdpa" if oddity == "cooled" else "eager")
    return model.eval()
