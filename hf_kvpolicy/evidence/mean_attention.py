"""Mean attention per query, and on a prompt how much of it lies near the query: what FastGen measures.

Source: Ge et al., "Model Tells You What to Discard: Adaptive KV Cache Compression for LLMs" (arXiv 2310.01801). Let
mass[j] be the attention row j received, and band[j] the part from queries that had it among their newest rows. A policy
that keeps a set S, and for each query that query's own newest rows, recovers sum over S of mass[j] + sum over the other
rows of band[j]: two sums per row are enough for every candidate.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .carried import CarriedEvidence, QueryBlock, reduce_group
from .segment_sums import ALL_QUERIES

__all__ = ["MeanAttention"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeanAttention(CarriedEvidence):
    """Sum of attention and count of the queries that saw a row, fp32. Rows compete by the mean.

    With `local_rows` a segment is measured as well: channel 2 is the attention a row received from the segment's
    queries, channel 3 the part from queries that had it among their newest `local_rows` rows. Such states are made for
    one profile and are not kept.
    """

    local_rows: int | None = None
    # Every query of a prompt is held until the prompt's length, and with it the width of the band, is known.
    window_queries: int = ALL_QUERIES
    name: str = "mean_attention"

    @property
    def channels(self) -> int:
        """Sum and count; mass and band where a segment is measured."""
        return 2 if self.local_rows is None else 4

    def observe_(self, state_BSNX: Tensor, block: QueryBlock, group: str) -> None:
        """Add the attention each row received."""
        weights_BSTN = reduce_group(block.attention_BSGTN, group)
        received_BSN = weights_BSTN.sum(dim=2)
        state_BSNX[..., 0] += received_BSN
        state_BSNX[..., 1] += block.seen_counts_BSN
        if self.local_rows is not None:
            state_BSNX[..., 2] += received_BSN
            state_BSNX[..., 3] += (self._near(block, self.local_rows) * weights_BSTN).sum(dim=2)

    @staticmethod
    def _near(block: QueryBlock, local_rows: int) -> Tensor:
        """Return 1 where a row is among a query's newest rows, else 0, fp32 [B, M, T, N]."""
        last_far_BT = (block.query_tokens_BT - local_rows).float()
        # Whole numbers: clamping their difference costs a fraction of comparing and masking.
        return (block.row_tokens_BMN.float()[:, :, None, :] - last_far_BT[:, None, :, None]).clamp_(0.0, 1.0)

    def scores(self, state_SNX: Tensor, tokens_MN: Tensor) -> Tensor:
        """Return the means."""
        return state_SNX[..., 0] / state_SNX[..., 1].clamp(min=1)

    def describe(self) -> dict[str, Any]:
        """Return nothing: the band is part of the policy's options."""
        return {}
