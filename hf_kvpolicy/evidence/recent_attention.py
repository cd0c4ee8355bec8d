"""Attention of the newest queries, the newest weighing most: what makes a row pivotal context.

Source: Yang et al., "PyramidInfer" (arXiv 2405.12532), with the weights of the released code. Softmax runs over every
row a query may see; only then are votes weighted over queries by linspace(1, distance_weight) and averaged.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import ConfigError
from .base import LayerObservation
from .carried import reduce_group

__all__ = ["RecentAttention"]

# fp32 logits and weights of one block of queries: what stays in a CPU's cache, or what keeps a GPU busy.
_CPU_WORKSPACE_BYTES, _WORKSPACE_BYTES = 4 << 20, 64 << 20


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
        workspace_bytes = _CPU_WORKSPACE_BYTES if device.type == "cpu" else _WORKSPACE_BYTES
        width = max(1, workspace_bytes // (8 * batch * query_heads * rows))
        for start in range(0, queries, width):
            stop = min(queries, start + width)
            mask, covered = seen.visibility.block(start, stop)
            block = seen.queries_BQWD[:, :, start:stop].float().reshape(batch, heads, size * (stop - start), -1)
            logits = torch.matmul(block * seen.scaling, keys_BHND[:, :, :covered].transpose(2, 3))
            logits = logits.view(batch, heads, size, stop - start, covered)
            if mask is not None:
                logits[..., covered - mask.shape[-1] :].masked_fill_(~mask.unsqueeze(2), float("-inf"))
            votes_BHGN[..., :covered] += torch.matmul(weight_W[start:stop], torch.softmax(logits, dim=-1))
        return reduce_group(votes_BHGN, group)

    def refine(self, votes_BMN: Tensor) -> Tensor:
        """Return the votes unchanged."""
        return votes_BMN

    def describe(self) -> dict[str, Any]:
        """Return share and weight."""
        return {"recent_ratio": self.recent_ratio, "distance_weight": self.distance_weight}
