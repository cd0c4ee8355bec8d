"""MPT: ALiBi, no positions in keys, every query head with a KV head of its own.

`transformers` builds the bias with `alibi_bias_max=8` and without regard to pads, whatever the config says, and applies
neither `qk_ln` nor `prefix_lm`; this file does what the model does. The model's own forward ends at `max_seq_len`
columns; with a policy cache there is no such end.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from hf_kvpolicy.own_attention import Attend
from hf_kvpolicy.positions import AlibiSpec
from hf_kvpolicy.registry import register_model_patch

from .own import OwnAttentionPatch

__all__ = ["MptPatch", "mpt_slopes"]

_BIAS_MAX = 8


@register_model_patch
class MptPatch(OwnAttentionPatch):
    """MPT as transformers implements it (`model_type: mpt`)."""

    model_types = ("mpt",)
    layers_name, attention_name = "blocks", "attn"

    def alibi(self, config: Any) -> AlibiSpec:
        """Return the slopes; distance counts columns."""
        return AlibiSpec(slopes=mpt_slopes(int(config.n_heads)), counts_pads=True)

    @staticmethod
    def attention_forward(module: Any, attend: Attend, arguments: Mapping[str, Any]) -> tuple[Tensor, None]:
        """Project, clip, attend, project."""
        hidden_states: Tensor = arguments["hidden_states"]
        fused = module.Wqkv(hidden_states)
        if module.clip_qkv:
            fused = fused.clamp(min=-module.clip_qkv, max=module.clip_qkv)
        shape = (*hidden_states.shape[:2], module.n_heads, module.head_dim)
        query, keys, values = (part.reshape(shape).transpose(1, 2) for part in fused.chunk(3, dim=2))
        dropout = module.attn_dropout_p if module.training else 0.0
        return module.out_proj(attend(query, keys, values, scaling=module.softmax_scale, dropout=dropout)), None


def mpt_slopes(heads: int) -> tuple[float, ...]:
    """Return 2^(-8 k / n) for k = 1..n; for another n than a power of two, odd then even ones of the next power's."""
    power = 2 ** math.ceil(math.log2(heads))
    slopes = [2.0 ** (-_BIAS_MAX * k / power) for k in range(1, power + 1)]
    return tuple(slopes if power == heads else (slopes[1::2] + slopes[::2])[:heads])
