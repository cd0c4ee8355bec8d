"""Cumulative attention: what a row received from every query that saw it.

Source: Zhang et al., "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models"
(arXiv 2306.14048), the additive score h_t[j] = h_{t-1}[j] + a_t[j].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .carried import CarriedEvidence, QueryBlock, reduce_group

__all__ = ["CumulativeAttention"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CumulativeAttention(CarriedEvidence):
    """Sum of attention over queries, fp32. With `normalize` rows compete by their mean per query that saw them."""

    normalize: bool = False
    # The released code casts probabilities to the model's dtype before it sums them.
    rounds_to_model_dtype: bool = False
    name: str = "cumulative_attention"

    @property
    def channels(self) -> int:
        """The sum, and the queries counted where rows compete by their mean."""
        return 2 if self.normalize else 1

    def observe_(self, state_BSNX: Tensor, block: QueryBlock, group: str) -> None:
        """Add the attention each row received."""
        attention = block.attention_BSGTN
        if self.rounds_to_model_dtype:
            attention = attention.to(block.dtype).float()
        state_BSNX[..., 0] += reduce_group(attention, group).sum(dim=2)
        if self.normalize:
            state_BSNX[..., 1] += block.seen_counts_BSN

    def scores(self, state_SNX: Tensor, tokens_MN: Tensor) -> Tensor:
        """Return the sums, or the means."""
        total = state_SNX[..., 0]
        return total / state_SNX[..., 1].clamp(min=1) if self.normalize else total

    def describe(self) -> dict[str, Any]:
        """Return what changes the score."""
        return {"normalize": self.normalize, "rounds_to_model_dtype": self.rounds_to_model_dtype}
