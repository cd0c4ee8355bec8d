"""GLM-4: only the leading channels of a head are rotated, in pairs of neighbours."""

from __future__ import annotations

from hf_kvpolicy.registry import register_model_patch

from .base import RotaryDecoderPatch

__all__ = ["Glm4Patch"]


@register_model_patch
class Glm4Patch(RotaryDecoderPatch):
    """GLM-4 (`glm4`, and the earlier `glm`)."""

    model_types = ("glm", "glm4")
    interleaved = True
