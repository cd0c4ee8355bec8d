"""Families without a file of their own: what was checked on a loaded model, and nothing more.

`hf_kvpolicy.attach` runs the check (`hf_kvpolicy/probe.py`). How keys are rotated is not known: they are never moved.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from hf_kvpolicy.errors import UnsupportedModelError
from hf_kvpolicy.positions import RotarySpec
from hf_kvpolicy.registry import register_fallback_patch

from .base import InterfacePatch
from .longrope import watched_methods

__all__ = ["ProbedPatch"]


@register_fallback_patch
class ProbedPatch(InterfacePatch):
    """A family that attends through the interface, by a check or (`unproven`) by the user's word."""

    def __init__(self, proof: str) -> None:
        self.proof = proof

    def methods(self, config: Any) -> Mapping[str, Callable[..., Any]]:
        """Return the watched method of a config with two sets of frequencies, where `generate` may drop the cache."""
        return watched_methods() if hasattr(config, "original_max_position_embeddings") else {}

    def rotary(self, decoder: torch.nn.Module, layers: Sequence[int]) -> RotarySpec:
        """Refuse: how this family positions its keys was not checked.

        Raises:
            UnsupportedModelError: always.
        """
        raise UnsupportedModelError(
            f"positions='cache_local' moves rotated keys, but how {type(decoder).__name__} rotates them is not known: "
            "its family has no patch. Use positions='original', or add a patch (CONTRIBUTING.md)."
        )
