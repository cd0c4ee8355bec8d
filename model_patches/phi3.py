"""Phi-3 and Phi-4 mini: partial rotation; long-context configs switch frequencies at a length (`longrope.py`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hf_kvpolicy.registry import register_model_patch

from .base import RotaryDecoderPatch
from .longrope import watched_methods

__all__ = ["Phi3Patch"]


@register_model_patch
class Phi3Patch(RotaryDecoderPatch):
    """Phi-3, Phi-3.5 and Phi-4 mini."""

    model_types = ("phi3",)

    def methods(self, config: Any) -> Mapping[str, Callable[..., Any]]:
        """Return the watched method."""
        return watched_methods()
