"""OLMo 2: queries and keys are normalised over all heads before they are rotated; caching is as in Llama."""

from __future__ import annotations

from hf_kvpolicy.registry import register_model_patch

from .base import RotaryDecoderPatch

__all__ = ["Olmo2Patch"]


@register_model_patch
class Olmo2Patch(RotaryDecoderPatch):
    """OLMo 2."""

    model_types = ("olmo2",)
