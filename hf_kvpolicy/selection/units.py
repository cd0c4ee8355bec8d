"""The selection unit: whose scores are averaged before rows compete.

`head`: each stored head keeps its own rows. `layer`: the heads of a layer share one set. `token`: one set for the
whole cache, decided after all layers were seen. Votes are fp32 (evidence reduces query heads of a group first, pooling
comes last).
"""

from __future__ import annotations

from torch import Tensor

__all__ = ["UNITS", "reduce_heads"]

UNITS = ("head", "layer", "token")


def reduce_heads(votes_BSN: Tensor, unit: str) -> Tensor:
    """Return votes per map head: unchanged for `head`, summed over heads otherwise, [B, 1, N].

    Sums rank as averages do, and sums of whole counts stay whole, so that equal counts stay equal.
    """
    return votes_BSN if unit == "head" else votes_BSN.sum(dim=1, keepdim=True)
