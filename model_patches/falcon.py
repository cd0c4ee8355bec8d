"""Falcon: rotary keys or ALiBi; one KV head for all query heads, groups of them, or one each.

The newer architecture repeats K and V for every query head before it caches them; here its KV heads are stored once.
With ALiBi the bias is rounded to bfloat16, at absolute token positions, whatever the model's dtype; so is ours. The
model's eager path adds that bias twice, once in the mask and once in the logits, unlike its SDPA path and the published
model: it is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.models.falcon.modeling_falcon import apply_rotary_pos_emb

from hf_kvpolicy.own_attention import Attend, OwnAttention
from hf_kvpolicy.positions import AlibiSpec
from hf_kvpolicy.registry import register_model_patch

from .bloom import bloom_slopes
from .own import OwnAttentionPatch

__all__ = ["FalconPatch"]


@register_model_patch
class FalconPatch(OwnAttentionPatch):
    """Falcon 7B, 40B and 180B, and Falcon-RW (`model_type: falcon`)."""

    model_types = ("falcon",)

    def alibi(self, config: Any) -> AlibiSpec | None:
        """Return the slopes of a config with ALiBi; the model scales the bias as it scales products."""
        if not config.alibi:
            return None
        slopes = bloom_slopes(int(config.num_attention_heads))
        return AlibiSpec(slopes=slopes, product_dtype=torch.bfloat16, scale=config.head_dim**-0.5)

    def own_attention(self, decoder: torch.nn.Module) -> OwnAttention:
        """Return the attention modules and the family's forward."""
        own = super().own_attention(decoder)
        config: Any = decoder.config
        if not config.alibi:
            return own
        why = "Falcon's own eager attention adds the ALiBi bias twice, and no other backend carries it"
        return OwnAttention(modules=own.modules, forward=own.forward, backends=("sdpa",), why=why)

    @staticmethod
    def attention_forward(module: Any, attend: Attend, arguments: Mapping[str, Any]) -> tuple[Tensor, None]:
        """Split the fused projection into KV heads and their queries, rotate, attend, project."""
        fused = module.query_key_value(arguments["hidden_states"])
        query, keys, values = _split(module, fused)
        with_alibi = arguments.get("alibi") is not None
        if not with_alibi:
            query, keys = apply_rotary_pos_emb(query, keys, *arguments["position_embeddings"])
        # The model itself drops attention only with ALiBi.
        dropout = module.attention_dropout.p if module.training and with_alibi else 0.0
        return module.dense(attend(query, keys, values, scaling=module.inv_norm_factor, dropout=dropout)), None


def _split(module: Any, fused: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return query [B, Q, T, D], keys and values [B, H, T, D]; each KV head comes behind its own queries."""
    batch, tokens, _ = fused.shape
    stored = module.num_kv_heads if module.new_decoder_architecture or module.multi_query else module.num_heads
    grouped = fused.view(batch, tokens, stored, -1, module.head_dim)
    query = grouped[:, :, :, :-2].flatten(2, 3)
    parts = (query, grouped[:, :, :, -2], grouped[:, :, :, -1])
    return tuple(part.transpose(1, 2) for part in parts)  # type: ignore[return-value]
