"""Gemma 2 and the text models of Gemma 3: sliding and full layers in turn; the policy acts on the full ones.

Gemma 2 caps its attention logits; both scale queries by `query_pre_attn_scalar`. Gemma 3 normalises queries and keys,
and rotates full and sliding layers by different frequencies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hf_kvpolicy.errors import UnsupportedModelError
from hf_kvpolicy.registry import register_model_patch

from .base import RotaryDecoderPatch

__all__ = ["Gemma2Patch", "Gemma3Patch"]


@register_model_patch
class Gemma2Patch(RotaryDecoderPatch):
    """Gemma 2."""

    model_types = ("gemma2",)

    def check(self, config: Any) -> None:
        """Refuse attention that looks ahead.

        Raises:
            UnsupportedModelError: the config attends in both directions.
        """
        if getattr(config, "use_bidirectional_attention", False):
            raise UnsupportedModelError(
                f"This {config.model_type!r} config attends in both directions (use_bidirectional_attention), so no "
                "row can be dropped before the last token is known. Use a causal checkpoint."
            )


@register_model_patch
class Gemma3Patch(Gemma2Patch):
    """The text models of Gemma 3."""

    model_types = ("gemma3_text",)

    def rope_type(self, module: Any, decoder: Any, layers: Sequence[int]) -> str:
        """Return the rotation of the policy's layers, which are of one kind."""
        return str(module.rope_type[decoder.config.layer_types[layers[0]]])

    def frequencies(self, module: Any, decoder: Any, layers: Sequence[int]) -> Any:
        """Return the inverse frequencies of that kind."""
        return getattr(module, f"{decoder.config.layer_types[layers[0]]}_inv_freq", None)

    def amplitude(self, module: Any, decoder: Any, layers: Sequence[int]) -> float:
        """Return the factor of that kind."""
        return float(getattr(module, f"{decoder.config.layer_types[layers[0]]}_attention_scaling", 1.0))
