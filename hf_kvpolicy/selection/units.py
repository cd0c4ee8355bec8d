"""The selection unit: whose scores are averaged before rows compete.

`head`: each stored head keeps its own rows. `pair`: so does each head of two layers that share rows, decided after the
deeper one; a layer without a partner decides alone. `layer`: the heads of a layer share one set. `token`: one set for
the whole cache, decided after all layers were seen. Votes are fp32 (evidence reduces query heads of a group first,
pooling comes last).
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

__all__ = ["UNITS", "reduce_heads", "reduce_layers"]

UNITS = ("head", "pair", "layer", "token")
_OWN_SETS = ("head", "pair")


def reduce_heads(votes_BSN: Tensor, unit: str) -> Tensor:
    """Return votes per map head: unchanged where heads have sets of their own, summed over heads otherwise, [B, 1, N].

    Sums rank as averages do, and sums of whole counts stay whole, so that equal counts stay equal.
    """
    return votes_BSN if unit in _OWN_SETS else votes_BSN.sum(dim=1, keepdim=True)


def reduce_layers(votes_LBMN: Tensor, unit: str, pairs: Sequence[tuple[int, int]]) -> Tensor:
    """Return votes of all layers, summed over those that share a set: both of a pair, or all of them, [1, B, M, N]."""
    if unit == "token":
        return votes_LBMN.sum(dim=0, keepdim=True)
    if unit != "pair":
        return votes_LBMN
    lower, deeper = (list(layers) for layers in zip(*pairs, strict=True))
    summed = votes_LBMN.clone()
    summed[lower] = summed[deeper] = votes_LBMN[lower] + votes_LBMN[deeper]
    return summed
