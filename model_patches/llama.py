"""Llama: full attention, rotary keys, grouped query heads."""

from __future__ import annotations

from hf_kvpolicy.registry import register_model_patch

from .base import RotaryDecoderPatch

__all__ = ["LlamaPatch"]


@register_model_patch
class LlamaPatch(RotaryDecoderPatch):
    """Llama 1-3 and everything stored under `model_type: llama` (SmolLM2, TinyLlama, Vicuna, ...)."""

    model_types = ("llama",)
    repeats_layers = True
