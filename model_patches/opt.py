"""OPT: learned positions; attention gets queries that are scaled already."""

from __future__ import annotations

from hf_kvpolicy.registry import register_model_patch

from .base import LearnedPositionsPatch

__all__ = ["OPTPatch"]


@register_model_patch
class OPTPatch(LearnedPositionsPatch):
    """OPT."""

    model_types = ("opt",)
