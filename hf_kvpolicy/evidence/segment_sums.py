"""Attention that rows received from every query of a segment: H2O's score of a prompt, without a state that is carried.

Source: the additive score of Zhang et al., "H2O" (arXiv 2306.14048), read once at the end of a segment. Older segments'
queries have no share in it, so nothing has to travel with rows; the segment's queries are held until it ends.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .base import LayerObservation
from .carried import reduce_group
from .masking import mask_logits_

__all__ = ["ALL_QUERIES", "SegmentAttention"]

# Every query of a segment is observed.
ALL_QUERIES = sys.maxsize // 2
# fp32 logits and weights of one block of queries.
_WORKSPACE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentAttention:
    """Summed attention of a segment's queries, fp32, in blocks of queries."""

    name: str = "segment_attention"
    window_queries: int = ALL_QUERIES
    differs_by_layer: bool = True

    def votes(self, seen: LayerObservation, *, group: str, score_heads: int) -> Tensor:
        """Return fp32 votes [B, S, N]; see `WindowVotes.votes`."""
        assert seen.queries_BQWD is not None, "the engine hands the queries to evidence that asks for them"
        assert seen.visibility is not None, "queries come with what they see"
        batch, heads, rows, _ = seen.keys_BHND.shape
        query_heads, queries = seen.queries_BQWD.shape[1:3]
        size = query_heads // heads
        votes_BHGN = torch.zeros((batch, heads, size, rows), dtype=torch.float32, device=seen.keys_BHND.device)
        keys_BHND = seen.keys_BHND.float()
        # A batch row of pads alone holds no row.
        width = max(1, _WORKSPACE_BYTES // max(1, 12 * batch * query_heads * rows))
        for start in range(0, queries, width):
            stop = min(queries, start + width)
            mask, covered = seen.visibility.block(start, stop)
            block = seen.queries_BQWD[:, :, start:stop].float().reshape(batch, heads, size * (stop - start), -1)
            products = torch.matmul(block, keys_BHND[:, :, :covered].transpose(2, 3)).mul_(seen.scaling)
            logits = seen.weighting.cap_(products).view(batch, heads, size, stop - start, covered)
            if mask is not None:
                mask_logits_(logits, mask)
                del mask  # a bias is as large as the logits
            attention = seen.weighting.weights(logits)
            if seen.observed_BW is not None:
                # A pad's query may see nothing at all; its row is NaN and must not vote.
                attention.masked_fill_(~seen.observed_BW[:, None, None, start:stop, None], 0.0)
            votes_BHGN[..., :covered] += attention.sum(dim=3)
        if score_heads > heads:
            return votes_BHGN.flatten(1, 2)
        return reduce_group(votes_BHGN, group)

    def refine(self, votes_BMN: Tensor) -> Tensor:
        """Return the votes unchanged."""
        return votes_BMN

    def describe(self) -> dict[str, Any]:
        """Return nothing: there is no parameter."""
        return {}
