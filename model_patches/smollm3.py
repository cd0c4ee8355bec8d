"""SmolLM3: as Llama, but every fourth layer (`no_rope_layers`) does not rotate its keys: they are never moved."""

from __future__ import annotations

from typing import Any

from hf_kvpolicy.registry import register_model_patch

from .base import RotaryDecoderPatch

__all__ = ["SmolLM3Patch"]


@register_model_patch
class SmolLM3Patch(RotaryDecoderPatch):
    """SmolLM3."""

    model_types = ("smollm3",)

    def rotates(self, decoder: Any, layer: int) -> bool:
        """Whether a layer has rotary positions."""
        return bool(decoder.config.no_rope_layers[layer])
