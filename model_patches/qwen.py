"""Qwen 2 and 3, dense and mixture of experts: as Llama; Qwen 3 normalises queries and keys before it rotates them.

Configs with `use_sliding_window` slide in some layers: the policy acts on the full ones.
"""

from __future__ import annotations

from hf_kvpolicy.registry import register_model_patch

from .base import RotaryDecoderPatch

__all__ = ["QwenPatch"]


@register_model_patch
class QwenPatch(RotaryDecoderPatch):
    """Qwen2, Qwen2.5 and Qwen3, with or without experts."""

    model_types = ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe")
