"""Bloom: ALiBi, no positions in keys; the attention module adds the residual itself.

The bias is computed in fp32 and rounded to the model's dtype before logits get it, at absolute token positions; so is
ours. The variant that splits the output projection as it was trained (`slow_but_exact` with `pretraining_tp` above 1)
is refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hf_kvpolicy.errors import UnsupportedModelError
from hf_kvpolicy.own_attention import Attend
from hf_kvpolicy.positions import AlibiSpec
from hf_kvpolicy.registry import register_model_patch

from .own import OwnAttentionPatch

__all__ = ["BloomPatch", "bloom_slopes"]


@register_model_patch
class BloomPatch(OwnAttentionPatch):
    """Bloom and Bloomz."""

    model_types = ("bloom",)

    def check(self, config: Any) -> None:
        """Refuse the split output projection.

        Raises:
            UnsupportedModelError: the config asks for it.
        """
        if config.slow_but_exact and config.pretraining_tp > 1:
            raise UnsupportedModelError(
                "This Bloom splits its output projection (slow_but_exact=True), which policy caches do not follow. Set "
                "config.slow_but_exact = False before you load it."
            )

    def alibi(self, config: Any) -> AlibiSpec:
        """Return the slopes; distance counts tokens."""
        return AlibiSpec(slopes=bloom_slopes(int(config.n_head)), rounds_to="model")

    @staticmethod
    def attention_forward(module: Any, attend: Attend, arguments: Mapping[str, Any]) -> tuple[Tensor, None]:
        """Split the fused projection, attend, project, add the residual."""
        hidden_states: Tensor = arguments["hidden_states"]
        shape = (*hidden_states.shape[:2], module.num_heads, 3, module.head_dim)
        query, keys, values = module.query_key_value(hidden_states).view(shape).transpose(1, 2).unbind(3)
        dropout = module.attention_dropout.p if module.training else 0.0
        projected = module.dense(attend(query, keys, values, scaling=module.inv_norm_factor, dropout=dropout))
        return arguments["residual"] + functional.dropout(projected, module.hidden_dropout, module.training), None


def bloom_slopes(heads: int) -> tuple[float, ...]:
    """Return 2^(-8 k / n) for k = 1..n; beyond the power of two below, every other one of the next power's.

    As powers of one fp32 number, as the model takes them: rounding to half precision tells the difference.
    """
    power = 2 ** math.floor(math.log2(heads))
    slopes = _powers(2.0 ** (-8 / power), range(1, power + 1))
    return (*slopes, *_powers(2.0 ** (-4 / power), range(1, 2 * (heads - power), 2)))


def _powers(base: float, exponents: Sequence[int]) -> list[float]:
    found: list[float] = torch.pow(torch.tensor(base), torch.tensor(exponents, dtype=torch.int32)).tolist()
    return found
