"""From scaled products of queries and keys to attention weights, where a family does more than a softmax.

Gemma 2 caps logits (cap * tanh(logit / cap)); gpt-oss lets each query head spend attention on a learned logit that has
no value (a sink). Both change what a row receives, so attention and evidence ask the same object.

Letters: B batch rows, S stored heads, G query heads of one, Q query heads (S * G), T queries, N rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["PLAIN", "Weighting", "spend_on_sinks"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Weighting:
    """What a layer does between scaled products and weights."""

    # Logits are squeezed into (-softcap, softcap) before they are masked.
    softcap: float | None = None
    # A logit per query head that takes part in the softmax and gives nothing.
    sinks_Q: Tensor | None = None

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> Weighting:
        """Read what a model passes to its attention function."""
        softcap, sinks = arguments.get("softcap"), arguments.get("s_aux")
        if softcap is None and sinks is None:
            return PLAIN
        return cls(softcap=softcap, sinks_Q=None if sinks is None else sinks.detach())

    @property
    def is_plain(self) -> bool:
        """Whether weights are the softmax of scaled products."""
        return self.softcap is None and self.sinks_Q is None

    def cap_(self, logits: Tensor) -> Tensor:
        """Cap scaled products, in place."""
        return logits if self.softcap is None else logits.div_(self.softcap).tanh_().mul_(self.softcap)

    def of_owners(self, owners: Sequence[int], heads: int) -> Weighting:
        """Return the weighting of some owners' query heads; owners are batch-major over `heads` stored heads."""
        if self.sinks_Q is None:
            return self
        sinks_SG = self.sinks_Q.view(heads, -1)
        return Weighting(softcap=self.softcap, sinks_Q=sinks_SG[[owner % heads for owner in owners]].flatten())

    def weights(self, logits: Tensor) -> Tensor:
        """Return the softmax of masked logits [B, Q, T, N] or [B, S, G, T, N]; with sinks a row sums to less than 1."""
        weights = torch.softmax(logits, dim=-1)
        if self.sinks_Q is None:
            return weights
        return spend_on_sinks(weights, logits, self.sinks_Q.to(logits).view(*logits.shape[1:-2], 1, 1))


PLAIN = Weighting()


def spend_on_sinks(weights: Tensor, logits: Tensor, sinks: Tensor) -> Tensor:
    """Return weights [..., T, N] without the share that a logit per head [..., 1 or T, 1] takes."""
    return weights * torch.sigmoid(torch.logsumexp(logits, dim=-1, keepdim=True) - sinks)
