"""Mistral: as Llama, with or without a sliding window in every layer.

With a window (`sliding_window` in the config) the policy acts on all layers, and the window is evaluated on the
columns of the rows each layer really holds: a row that left the window is masked whether or not the policy kept it.
"""

from __future__ import annotations

from hf_kvpolicy.registry import register_model_patch

from .base import RotaryDecoderPatch

__all__ = ["MistralPatch"]


@register_model_patch
class MistralPatch(RotaryDecoderPatch):
    """Mistral and everything stored under `model_type: mistral`."""

    model_types = ("mistral",)
    repeats_layers = True
