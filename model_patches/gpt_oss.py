"""gpt-oss: each query head may spend attention on a learned logit without a value (a sink); sliding and full layers.

The policy acts on the full layers. Its rotation is yarn by default: inverse frequencies that do not depend on the
length, and a constant factor that every key carries from its first rotation on.
"""

from __future__ import annotations

from hf_kvpolicy.registry import register_model_patch

from .base import RotaryDecoderPatch

__all__ = ["GptOssPatch"]


@register_model_patch
class GptOssPatch(RotaryDecoderPatch):
    """gpt-oss."""

    model_types = ("gpt_oss",)
