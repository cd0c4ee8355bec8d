"""Models of linear attention, or short convolutions, beside full attention: the policy acts on the full layers.

What the others hold is one state of all tokens, however many there are. It is transformers' own layer's, and no policy
changes it. In a Falcon H1 every layer has both: the policy acts on its rows, its states are left alone.

Some of these models do not rotate their keys, because the states tell tokens' order: nothing needs to be moved then.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hf_kvpolicy.positions import RotarySpec
from hf_kvpolicy.registry import register_model_patch

from .base import RotaryDecoderPatch

__all__ = ["HybridPatch", "HybridWithoutPositionsPatch"]


@register_model_patch
class HybridPatch(RotaryDecoderPatch):
    """Qwen3-Next and the text models of Qwen3.5, LFM2, Bamba, Falcon H1, Granite 4 and OLMo hybrids."""

    model_types: tuple[str, ...] = (
        "bamba",
        "falcon_h1",
        "granitemoehybrid",
        "lfm2",
        "lfm2_moe",
        "olmo_hybrid",
        "qwen3_5_moe_text",
        "qwen3_5_text",
        "qwen3_next",
    )

    def rotary(self, decoder: torch.nn.Module, layers: Sequence[int]) -> RotarySpec:
        """Return the decoder's inverse frequencies for these layers; that none rotates where it has none."""
        if self.rotary_module(decoder) is None:
            return RotarySpec(inverse_frequencies=torch.zeros(0), rotated_layers=(False,) * len(layers))
        return super().rotary(decoder, layers)

    def rotary_module(self, decoder: Any) -> Any:
        """Return the module that computes rotations; None for a config without."""
        return getattr(decoder, "rotary_emb", None) or getattr(decoder, "pos_emb", None)


@register_model_patch
class HybridWithoutPositionsPatch(HybridPatch):
    """Jamba and Nemotron-H, which have no rotation at all."""

    model_types = ("jamba", "nemotron_h")
    key_stage = "no_rope"
