"""The text models of Llama 4: layers that rotate keys and attend within chunks, and full layers that do neither.

The policy acts on the full layers, whose keys carry no position: with `cache_local` nothing of them has to be moved.
Their queries are scaled by how many tokens were fed (temperature tuning) before attention sees them, so scores are
taken of the scaled ones. Chunked layers hold what transformers' own cache would. A config without chunks rotates in
full layers, by pairs of neighbours; the norm of queries and keys that follows does not see a rotation.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from hf_kvpolicy.registry import register_model_patch

from .base import RotaryDecoderPatch

__all__ = ["Llama4Patch"]


@register_model_patch
class Llama4Patch(RotaryDecoderPatch):
    """Llama 4 without images."""

    model_types = ("llama4_text",)
    interleaved = True

    def decoder(self, model: PreTrainedModel) -> torch.nn.Module:
        """Return the module whose forward receives the cache; a causal model says it is its own decoder."""
        inner = super().decoder(model)
        found: torch.nn.Module = getattr(inner, "model", inner)
        return found

    def rotates(self, decoder: Any, layer: int) -> bool:
        """Whether a layer has rotary positions."""
        return bool(decoder.config.no_rope_layers[layer])
