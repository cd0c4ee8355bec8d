"""Recency: a row's score is its token position. The same for every layer and head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .base import LayerObservation

__all__ = ["Recency"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recency:
    """The newest rows score highest."""

    name: str = "recency"
    window_queries: int = 0
    differs_by_layer: bool = False

    def votes(self, seen: LayerObservation, *, group: str, score_heads: int) -> Tensor:
        """Return token positions (integers, so that no two rows tie at any length)."""
        return seen.tokens_BMN[:, :1]

    def refine(self, votes_BMN: Tensor) -> Tensor:
        """Return the votes unchanged."""
        return votes_BMN

    def describe(self) -> dict[str, Any]:
        """Return no parameters."""
        return {}
