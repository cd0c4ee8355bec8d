"""Mixtral: Mistral's attention under a mixture of experts, with or without a sliding window in every layer."""

from __future__ import annotations

from hf_kvpolicy.registry import register_model_patch

from .base import RotaryDecoderPatch

__all__ = ["MixtralPatch"]


@register_model_patch
class MixtralPatch(RotaryDecoderPatch):
    """Mixtral and everything stored under `model_type: mixtral`."""

    model_types = ("mixtral",)
