"""Evidence that rows carry: a state per row, updated by every query that sees the row, gathered with K and V.

Letters: B batch rows, S stored heads, G query heads per stored head, T queries, N rows, M map heads, X state channels.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..weighting import spend_on_sinks
from .base import LayerObservation

__all__ = ["CarriedEvidence", "QueryBlock", "reduce_group"]


@dataclass(frozen=True, kw_only=True, eq=False)
class QueryBlock:
    """Some queries and the scaled logits of every row they may see."""

    # The layer; one number for each batch row where layers are folded into the batch.
    layer: int | Tensor
    # fp32, -inf where a query does not see a row.
    logits_BSGTN: Tensor
    query_tokens_BT: Tensor
    row_tokens_BMN: Tensor
    # Which queries are real tokens; None when all are.
    real_BT: Tensor | None
    # Decode tokens accepted since the last prompt segment, counted with each query; 0 in a prompt segment.
    clock_BT: Tensor
    dtype: torch.dtype
    # Logits that take attention and give nothing, [B or 1, S, G]; None for families without any.
    sinks_BSG: Tensor | None = None

    @cached_property
    def attention_BSGTN(self) -> Tensor:
        """Ordinary attention of these queries, fp32; rows of pads are zero."""
        return self.weights(self.logits_BSGTN)

    def weights(self, logits_BSGTN: Tensor, temperature_B11T1: Tensor | None = None) -> Tensor:
        """Return the softmax of logits, over a temperature if given; rows of pads are zero, sinks take their share."""
        sinks = None if self.sinks_BSG is None else self.sinks_BSG[..., None, None]
        if temperature_B11T1 is not None:
            logits_BSGTN = logits_BSGTN / temperature_B11T1
            sinks = None if sinks is None else sinks / temperature_B11T1
        weights = torch.softmax(logits_BSGTN, dim=-1)
        return self.without_pads(weights if sinks is None else spend_on_sinks(weights, logits_BSGTN, sinks))

    def without_pads(self, weights_BSGTN: Tensor) -> Tensor:
        """Return weights with the rows of pad queries set to zero (a pad may see nothing at all)."""
        if self.real_BT is None:
            return weights_BSGTN
        return weights_BSGTN.masked_fill(~self.real_BT[:, None, None, :, None], 0.0)

    @property
    def seen_BSTN(self) -> Tensor:
        """Which rows each real query sees."""
        seen = self.logits_BSGTN[:, :, 0] > float("-inf")
        return seen if self.real_BT is None else seen & self.real_BT[:, None, :, None]

    @property
    def seen_counts_BSN(self) -> Tensor:
        """How many real queries see each row."""
        # Bytes add faster than booleans do.
        return self.seen_BSTN.view(torch.uint8).sum(dim=2, dtype=torch.int32)


class CarriedEvidence(ABC):
    """Scores that accumulate. A new row starts with a state of zeros; a row that is dropped takes its state along."""

    name: str
    window_queries: int = 0
    differs_by_layer: bool = True
    # Which of two equal scores stays: the lower token position, unless the method says otherwise.
    keeps_newest_on_ties: bool = False

    @property
    @abstractmethod
    def channels(self) -> int:
        """State channels per row."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the state."""
        return torch.float32

    @property
    def last_queries(self) -> int | None:
        """How many queries at the end of a segment matter; None for all."""
        return None

    @abstractmethod
    def observe_(self, state_BSNX: Tensor, block: QueryBlock, group: str) -> None:
        """Add a block of queries to the states, in place."""

    @abstractmethod
    def scores(self, state_SNX: Tensor, tokens_MN: Tensor) -> Tensor:
        """Return fp32 scores [..., S, N] from states [..., S, N, X]; higher stays."""

    def close_prompt_(self, state_SNX: Tensor, recent_MN: Tensor) -> None:  # noqa: B027 - most evidence has nothing to close
        """Note in the states of kept rows that a prompt segment ended; `recent` marks its protected newest rows."""

    def votes(self, seen: LayerObservation, *, group: str, score_heads: int) -> Tensor:
        """Return the scores of the candidates' states [B, S, N]."""
        assert seen.state_BSNX is not None, "the engine hands states to evidence that carries them"
        return self.scores(seen.state_BSNX, seen.tokens_BMN)

    def refine(self, votes_BMN: Tensor) -> Tensor:
        """Return the votes unchanged."""
        return votes_BMN

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Return the JSON-able parameters that enter the manifest."""


def reduce_group(weights_BSGTN: Tensor, group: str) -> Tensor:
    """Reduce the query heads of a KV head, axis 2: per query [B, S, T, N], or [B, S, N] where queries were summed."""
    if group == "mean":
        return weights_BSGTN.mean(dim=2)
    return weights_BSGTN.sum(dim=2) if group == "sum" else weights_BSGTN.amax(dim=2)
