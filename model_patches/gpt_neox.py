"""GPT-NeoX and Pythia: every query head has its own KV head, and only the leading channels of a head are rotated."""

from __future__ import annotations

from hf_kvpolicy.registry import register_model_patch

from .base import RotaryDecoderPatch

__all__ = ["GPTNeoXPatch"]


@register_model_patch
class GPTNeoXPatch(RotaryDecoderPatch):
    """GPT-NeoX and everything stored under `model_type: gpt_neox` (Pythia)."""

    model_types = ("gpt_neox",)
