"""Attention of the newest queries, the newest weighing most: what makes a row pivotal context.

Source: Yang et al., "PyramidInfer" (arXiv 2405.12532), with the weights of the released code. Softmax runs over every
row a query may see; only then are votes weighted over queries by linspace(1, distance_weight) and averaged. In decode
queries come one by one; weights are linear in a query's number, so two sums a row are enough.

Letters: L layers, B batch rows, H KV heads, S score heads, G query heads of one, W queries or undecided rows, N rows, X
state channels, D head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import ConfigError
from .base import LayerObservation
from .carried import reduce_group
from .masking import mask_logits_

__all__ = ["RecentAttention"]

# fp32 logits and weights of one block of queries: what stays in a CPU's cache, or what keeps a GPU busy.
_CPU_WORKSPACE_BYTES, _WORKSPACE_BYTES = 4 << 20, 64 << 20
_FLOAT_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class RecentAttention:
    """Weighted mean attention of a segment's recent queries, fp32, in blocks of queries."""

    # Share of a segment's tokens whose queries are observed, beside the last one.
    recent_ratio: float
    # Weight of the newest query; the oldest observed one has weight 1.
    distance_weight: float
    name: str = "recent_attention"
    # The number of queries grows with the segment (`recent_tokens`), and they are read while it runs: none are held.
    window_queries: int = 0
    differs_by_layer: bool = True

    def __post_init__(self) -> None:
        """Reject weights that would turn votes round.

        Raises:
            ConfigError: distance_weight is not a positive finite number.
        """
        if not 0.0 < self.distance_weight < float("inf"):
            raise ConfigError(f"distance_weight={self.distance_weight!r} must be a positive number.")

    def recent_tokens(self, tokens: int) -> int:
        """Return how many of a segment's tokens are recent: they vote, and they stay."""
        return min(tokens, 1 + int(tokens * self.recent_ratio))

    def votes(self, seen: LayerObservation, *, group: str, score_heads: int) -> Tensor:
        """Return fp32 votes [B, H, N]; every observed query is real.

        A mask narrower than the rows its queries see is about the last of these.
        """
        assert seen.queries_BQWD is not None, "the engine hands over the recent queries"
        assert seen.visibility is not None, "queries come with what they see"
        batch, heads, rows, _ = seen.keys_BHND.shape
        query_heads, queries = seen.queries_BQWD.shape[1:3]
        size, device = query_heads // heads, seen.keys_BHND.device
        votes_BHGN = torch.zeros((batch, heads, size, rows), dtype=torch.float32, device=device)
        keys_BHND = seen.keys_BHND.float()
        weight_W = torch.linspace(1.0, self.distance_weight, queries, device=device) / queries
        width = _block_queries(batch * query_heads, rows, device)
        for start in range(0, queries, width):
            stop = min(queries, start + width)
            mask, covered = seen.visibility.block(start, stop)
            block = seen.queries_BQWD[:, :, start:stop].float().reshape(batch, heads, size * (stop - start), -1)
            products = torch.matmul(block * seen.scaling, keys_BHND[:, :, :covered].transpose(2, 3))
            logits = seen.weighting.cap_(products).view(batch, heads, size, stop - start, covered)
            if mask is not None:
                mask_logits_(logits, mask)
                del mask  # a bias is as large as the logits
            votes_BHGN[..., :covered] += torch.matmul(weight_W[start:stop], seen.weighting.weights(logits))
        return reduce_group(votes_BHGN, group)

    def workspace_bytes(self, queries_BQWD: Tensor, rows: int) -> int:
        """Return the bytes alive at once while `votes` observes queries over so many rows of each KV head."""
        batch, heads, queries, dim = queries_BQWD.shape
        block = min(queries, _block_queries(batch * heads, rows, queries_BQWD.device))
        # Logits and weights of a block, its queries before and after scaling, its mask and the inverse of it.
        of_query = heads * (2 * rows + 2 * dim) * _FLOAT_BYTES + 2 * rows
        # Votes, and what a block adds to them; keys in fp32 are a copy unless they are that already.
        of_row = 2 * heads * _FLOAT_BYTES + (dim * _FLOAT_BYTES if queries_BQWD.dtype != torch.float32 else 0)
        return batch * (block * of_query + rows * of_row)

    def votes_of_token(self, received_LBSW: Tensor, undecided: Sequence[int], block_tokens: int) -> Tensor:
        """Return what the newest token adds to the states [L, B, S, W, 2] of undecided rows, oldest first.

        The tokens behind a row's block vote for it, counted from 0: states are the sum of their attention, and the sum
        of attention times number.

        Args:
            received_LBSW: attention that the newest token gives to each row; anything in slots that hold none.
            undecided: rows of each batch row, that of the newest token among them.
            block_tokens: rows of a block; the first one begins with the oldest row.
        """
        device = received_LBSW.device
        last_B11 = torch.tensor(undecided, device=device)[:, None, None] - 1
        behind_W = (torch.arange(received_LBSW.shape[3], device=device) // block_tokens + 1) * block_tokens
        number_B1W = last_B11 - behind_W
        votes_LBSW = torch.where(number_B1W >= 0, received_LBSW, 0.0)
        return torch.stack([votes_LBSW, votes_LBSW * number_B1W], dim=-1)

    def block_votes(self, states_LSWX: Tensor, voters: int) -> Tensor:
        """Return the votes [L, S, W] that so many tokens gave, as `votes` weights them."""
        slope = (self.distance_weight - 1.0) / max(1, voters - 1)
        return (states_LSWX[..., 0] + slope * states_LSWX[..., 1]) / voters

    def refine(self, votes_BMN: Tensor) -> Tensor:
        """Return the votes unchanged."""
        return votes_BMN

    def describe(self) -> dict[str, Any]:
        """Return share and weight."""
        return {"recent_ratio": self.recent_ratio, "distance_weight": self.distance_weight}


def _block_queries(query_heads: int, rows: int, device: torch.device) -> int:
    """Return of how many queries logits and weights fit into the workspace at once."""
    workspace_bytes = _CPU_WORKSPACE_BYTES if device.type == "cpu" else _WORKSPACE_BYTES
    return max(1, workspace_bytes // (2 * _FLOAT_BYTES * query_heads * rows))
