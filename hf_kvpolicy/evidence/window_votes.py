"""Votes of the observation window: how much attention the last queries of a segment pay to each row.

Source: Li et al., "SnapKV: LLM Knows What You are Looking for Before Generation" (arXiv 2404.14469). Softmax runs over
every row a query may see, window columns included; only then are votes read, summed over the window's queries, reduced
over the query heads of a group, and pooled over neighbouring rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from ..errors import ConfigError
from ..weighting import Weighting
from .base import LayerObservation
from .carried import reduce_group
from .masking import mask_logits_

__all__ = ["GROUPS", "Pooling", "WindowVotes", "pool_reference", "window_votes_reference"]

Pooling = Literal["max", "avg"]
GROUPS = ("mean", "max", "sum")


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowVotes:
    """Summed, pooled attention of the last `window_queries` queries."""

    window_queries: int
    kernel_size: int
    pooling: Pooling
    name: str = "observation_window"
    differs_by_layer: bool = True

    def __post_init__(self) -> None:
        """Reject windows and kernels that cannot keep the length.

        Raises:
            ConfigError: window below 1, kernel not a positive odd number, pooling unknown.
        """
        if self.window_queries < 1:
            raise ConfigError(f"window={self.window_queries} observes no query; give a window of at least 1 token.")
        if self.kernel_size < 1 or self.kernel_size % 2 == 0:
            raise ConfigError(
                f"kernel_size={self.kernel_size} would change the number of scores; give a positive odd kernel."
            )
        if self.pooling not in ("max", "avg"):
            raise ConfigError(f"pooling={self.pooling!r} is unknown; give 'max' or 'avg'.")

    def votes(self, seen: LayerObservation, *, group: str, score_heads: int) -> Tensor:
        """Return fp32 votes [B, S, N]. One KV head at a time: the transient is [B, G, W, N] fp32, twice."""
        assert seen.queries_BQWD is not None, "the engine hands the queries to evidence that asks for them"
        assert seen.visibility is not None, "queries come with what they see"
        heads = seen.keys_BHND.shape[1]
        group_size = seen.queries_BQWD.shape[1] // heads
        visible = seen.visibility()
        parts = []
        for head in range(heads):
            queries = seen.queries_BQWD[:, head * group_size : (head + 1) * group_size].float()
            mask = None if visible is None else _of_head(visible, head, heads)
            weighting = seen.weighting.of_owners([head], heads)
            votes_BGN = _summed_attention(queries, seen.keys_BHND[:, head].float(), mask, seen, weighting)
            parts.append(votes_BGN if score_heads > heads else reduce_group(votes_BGN[:, None], group))
        return torch.cat(parts, dim=1)

    def refine(self, votes_BMN: Tensor) -> Tensor:
        """Return pooled scores; out-of-range neighbours count as zero votes, as in the official code."""
        if self.kernel_size == 1:
            return votes_BMN
        margin = self.kernel_size // 2
        if self.pooling == "avg":
            return functional.avg_pool1d(votes_BMN, self.kernel_size, stride=1, padding=margin)
        return functional.max_pool1d(votes_BMN, self.kernel_size, stride=1, padding=margin)

    def describe(self) -> dict[str, Any]:
        """Return window, kernel and pooling."""
        return {"window": self.window_queries, "kernel_size": self.kernel_size, "pooling": self.pooling}


def _summed_attention(
    queries_BGWD: Tensor, keys_BND: Tensor, mask: Tensor | None, seen: LayerObservation, weighting: Weighting
) -> Tensor:
    logits = weighting.cap_(torch.matmul(queries_BGWD, keys_BND[:, None].transpose(2, 3)).mul_(seen.scaling))
    if mask is not None:
        mask_logits_(logits[:, None], mask)
    attention = weighting.weights(logits)
    if seen.observed_BW is not None:
        # A pad's query may see nothing at all; its row is NaN and must not vote.
        attention.masked_fill_(~seen.observed_BW[:, None, :, None], 0.0)
    return attention.sum(dim=2)


def _of_head(mask: Tensor, head: int, heads: int) -> Tensor:
    """Return a mask's part of one KV head: its row of a bool mask, or those of its query heads of a bias."""
    width = mask.shape[1] // heads
    return mask[:, head * width : (head + 1) * width] if width else mask


def window_votes_reference(queries_QTD: Tensor, keys_HTD: Tensor, *, window: int, group: str, scaling: float) -> Tensor:
    """Plain oracle for one prompt without padding: votes [H, T] before pooling, from full causal attention."""
    heads, tokens, _ = keys_HTD.shape
    group_size = queries_QTD.shape[0] // heads
    rows = []
    for head in range(heads):
        per_query_head = []
        for query_head in range(head * group_size, (head + 1) * group_size):
            logits = queries_QTD[query_head].float() @ keys_HTD[head].float().T * scaling
            causal = torch.ones(tokens, tokens, dtype=torch.bool).tril()
            attention = torch.softmax(logits.masked_fill(~causal, float("-inf")), dim=-1)
            per_query_head.append(attention[-window:].sum(0))
        stacked = torch.stack(per_query_head)
        rows.append({"mean": stacked.mean(0), "sum": stacked.sum(0), "max": stacked.amax(0)}[group])
    return torch.stack(rows)


def pool_reference(votes: list[float], kernel_size: int, pooling: Pooling) -> list[float]:
    """Plain oracle of pooling: neighbours outside the row range count as zero votes."""
    margin = kernel_size // 2
    padded = [0.0] * margin + list(votes) + [0.0] * margin
    windows = [padded[i : i + kernel_size] for i in range(len(votes))]
    return [max(w) if pooling == "max" else sum(w) / kernel_size for w in windows]
